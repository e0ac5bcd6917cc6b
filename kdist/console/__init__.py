"""The lines that a run prints (`lines`), and the last line of a terminal (`live`)."""
