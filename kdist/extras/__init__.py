"""Hooks, data sources and a launcher that are found by their names: nothing else in kdist imports them."""
