"""SCAIL-2 (Yan et al. 2026, arXiv:2606.10804): characters of images, moved as in a video or put into it, on Wan 2.1."""

BASED_ON = "wan"
