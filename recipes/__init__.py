"""Models and data of the shipped recipes, one module each. The recipes themselves are in `conf/recipe`."""
