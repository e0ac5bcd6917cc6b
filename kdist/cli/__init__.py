"""The command line: a config becomes a run.

`main` composes the config and checks all that can be checked without running it; `experiment` makes one run of it,
`sweep` many. Errors of Hydra and of kdist end here: each becomes one message and an exit code.
"""
