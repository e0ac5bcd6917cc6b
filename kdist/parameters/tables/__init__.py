"""Embedding tables on their servers: keys to rows, and the rows that change."""
