"""Attention backends: one file per backend, the interface they share and the registry that finds them."""
