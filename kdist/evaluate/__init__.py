"""`python -m kdist.evaluate`; see `kdist.cli.evaluate`."""
