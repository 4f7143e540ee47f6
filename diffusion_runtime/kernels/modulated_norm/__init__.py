"""Fused kernel: gated residual sum, LayerNorm or RMSNorm, scale and shift, optionally quantised to fp8."""
