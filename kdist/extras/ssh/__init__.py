"""Starts the tasks of a cluster on other machines over ssh: `kdist launch`.

There is one connection per host, on which `agent.py` runs; it starts the tasks of its host, and ends them with the
connection. `connection.py` is the launcher's side of it, `launcher.py` the run of all tasks.
"""
