"""LTX-Video 0.9 (arXiv:2501.00103)."""
