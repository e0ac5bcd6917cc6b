"""The config of a run: every key with its type, default and meaning.

`schema` is the only place with defaults; `targets` resolves what a config may call, and `build` makes the model and the
data. A config is checked without TensorFlow, so that a wrong one is refused at once.
"""
