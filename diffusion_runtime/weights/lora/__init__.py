"""LoRA files in every format that trainers write, merged into a checkpoint's weights (Hu et al., arXiv:2106.09685)."""
