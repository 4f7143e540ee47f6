"""Attention with products in 8 bits: api, eager reference, Triton."""
