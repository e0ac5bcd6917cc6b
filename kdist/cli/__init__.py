"""The command line: `main` composes and checks the config, `experiment` makes one run of it, `sweep` many."""
