"""Wan 2.1 text-to-video (arXiv:2503.20314)."""
