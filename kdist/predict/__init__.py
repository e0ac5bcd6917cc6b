"""`python -m kdist.predict`; see `kdist.cli.predict`."""
