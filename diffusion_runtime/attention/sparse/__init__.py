"""Sparse attention: one planner per method selects the key blocks of each query block; one kernel computes them."""
