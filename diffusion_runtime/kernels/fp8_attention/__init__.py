"""Attention whose inputs and weights are 8-bit floats: api, eager reference, Triton around cuDNN's or FlashInfer's
kernel."""
