"""Runs as data: the records below a folder as rows, grouped over seeds, as a table.

Contents are imported from the modules of this package.
"""
