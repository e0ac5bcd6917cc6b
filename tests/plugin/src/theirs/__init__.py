"""A model, data, a hook and a strategy for kdist, with configs for them."""
