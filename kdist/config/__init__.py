"""The config of a run: every key, its default and its checks, and what a config may call.

`schema` is the only place with defaults. Nothing here imports TensorFlow before a config is known to be right.
"""
