"""Loss and metrics outside the training step.

`evaluate` validates in this process or on the workers, during training and after it. An evaluator is a task beside the
cluster that evaluates each new checkpoint.
"""
