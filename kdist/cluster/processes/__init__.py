"""Processes of tasks: their start, watch and end, their programs, and their meeting place at the chief."""
