"""HunyuanVideo (Kong et al., arXiv:2412.03603)."""
