"""The training data, from what `fit` is given to the batches of one worker.

`sources` accepts arrays, datasets and dataset functions; `worker_dataset` is what one worker reads of them. Datasets
travel to other processes as graphs (`serialization`), Python objects by cloudpickle (`pickling`).
"""
