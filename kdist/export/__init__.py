"""`python -m kdist.export`; see `kdist.cli.export`."""
