"""The room of a fit: its request, and the process that runs it: this one, or a task that was started separately."""
