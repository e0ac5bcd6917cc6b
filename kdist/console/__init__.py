"""What the user reads.

`lines` holds the lines that a run prints, and `live` the last line of a terminal. `warn` reports events such as the
loss of a worker; every room may use it, the other modules are for the rooms above the strategies.
"""
