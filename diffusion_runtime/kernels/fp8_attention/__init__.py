"""Attention whose inputs, weights and output are 8-bit floats: api, eager reference, Triton around cuDNN's kernel."""
