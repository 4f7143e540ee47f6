"""Attention backends: one file a backend, the interface they share and the registry that finds them."""
