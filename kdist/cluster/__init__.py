"""Where the tasks are and who starts them. Knows nothing of models, strategies or hooks."""
