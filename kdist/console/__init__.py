"""What the user reads: `lines` that a run prints, the `live` line of a terminal, and `warn`, open to every room."""
