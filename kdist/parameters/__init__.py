"""What lives on the parameter servers: where each variable is, how values travel, how gradients are applied."""
