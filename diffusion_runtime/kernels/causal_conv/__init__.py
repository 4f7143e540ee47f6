"""Fused kernels between two causal convolutions of a video decoder: sum, RMSNorm, SiLU, and the next one's input."""
