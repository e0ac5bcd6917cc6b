"""Strategies, which spread training steps over tasks.

`base` says what a strategy is, `registry` which one a config means. A strategy knows nothing of hooks; of the cluster
it knows the shape and how to call it.
"""
