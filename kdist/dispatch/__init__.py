"""How the chief calls the workers, and how it notices that one does not respond.

`coordinator` sends calls and hands out results; each worker has a thread of its own. `health` watches the tasks, and
every wait has a limit. Strategies use `Coordinator`, `Supervisor`, `fetch` and the errors that these raise.
"""
