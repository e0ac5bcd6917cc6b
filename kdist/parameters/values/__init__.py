"""All stored values by name: to read, to write, to save and to restore them."""
