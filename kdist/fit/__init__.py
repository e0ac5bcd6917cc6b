"""The room of a fit: its request, and the process that runs it, which is this one or a task that others started."""
