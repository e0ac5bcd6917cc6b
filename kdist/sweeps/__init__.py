"""Many runs, run, compared and read as rows."""
