"""Processes of tasks: started, watched, ended; what they run; what they say to each other at the chief."""
