"""Packing: permutes the rows of q, k and v into block order, and computes the mean of every block in the same pass."""
