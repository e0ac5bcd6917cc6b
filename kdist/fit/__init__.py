"""How a fit reaches the process that runs it.

A launcher takes a frozen `FitRequest` and returns a `FitOutcome`. There are two: one for this process, and one for a
task of a cluster that others started.
"""
