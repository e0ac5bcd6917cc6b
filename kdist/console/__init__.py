"""What the user reads on the console.

`lines` has every line that a run prints, `live` the line that changes on a terminal, `warn` the warnings, which every
room may use.
"""
