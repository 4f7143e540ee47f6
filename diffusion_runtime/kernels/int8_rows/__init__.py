"""Kernel: row-wise quantisation to 8-bit integers after a rotation in groups (ConvRot), and products of such rows."""
