"""Where the tasks are, and who starts them.

`spec` names the tasks and their addresses; `local` starts them on this machine, `external` waits for tasks that others
start. This room knows nothing of models, strategies or hooks.
"""
