"""The tasks of a cluster, and who starts them.

`spec` names the tasks and their addresses; `local` starts them on this machine, `external` waits for externally started
tasks. This room knows nothing of models, strategies or hooks.
"""
