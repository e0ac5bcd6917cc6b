"""A Keras model as pure functions and named values.

`replica_step` is the one forward, loss and gradient pass, which training, validation and histograms share. `state`
reads and writes a model's values by the names that checkpoints use.
"""
