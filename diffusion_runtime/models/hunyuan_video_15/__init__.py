"""HunyuanVideo-1.5 (arXiv:2511.18870)."""
