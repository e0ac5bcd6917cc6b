"""Training data, from the arguments of `fit` to the batches of one worker.

`sources` accepts arrays, datasets and dataset functions; `base` makes the dataset of one worker. Datasets travel to
other processes as graphs (`serialization`), Python objects by cloudpickle (`pickling`).
"""
