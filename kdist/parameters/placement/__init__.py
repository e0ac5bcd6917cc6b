"""The server of every variable, the variables that store them there, and the messages between tasks."""
