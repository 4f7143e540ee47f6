"""Qwen-Image text-to-image (Wu et al., arXiv:2508.02324)."""
