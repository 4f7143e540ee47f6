"""LTX-2 text-to-video with sound (arXiv:2601.03233)."""
