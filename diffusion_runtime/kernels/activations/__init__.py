"""Activations of feed-forward networks in one pass: SiLU of a gate times features, GELU on a part of a product."""
