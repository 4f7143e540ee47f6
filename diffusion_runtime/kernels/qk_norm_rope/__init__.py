"""Fused kernel: RMSNorm of q and k and rotary positions, from a packed product into the layout of attention."""
