"""kdist beside its peers: `make bench`, or `python -m benchmarks`."""
