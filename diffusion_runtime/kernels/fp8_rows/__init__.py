"""Kernel: row-wise quantisation to 8-bit floats (float8_e4m3fn), and products of such matrices."""
