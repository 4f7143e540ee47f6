"""Activations in one pass: SiLU or sigmoid of a gate times features, GELU on a part of a product."""
