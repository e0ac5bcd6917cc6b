"""The command line: `python -m kdist`.

`main` composes the config with Hydra and checks it before anything starts; `experiment` turns it into one run, `sweep`
into many. Every error becomes one message and an exit code.
"""
