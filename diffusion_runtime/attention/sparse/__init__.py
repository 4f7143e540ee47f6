"""Sparse attention: one planner a method says which key blocks each query block sees; one kernel computes them."""
