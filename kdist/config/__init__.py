"""The config of a run. `schema` is the only place with defaults; a wrong config is refused without TensorFlow."""
