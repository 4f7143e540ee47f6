"""LongCat-Image, text to image (Meituan, arXiv:2512.07584; https://github.com/meituan-longcat/LongCat-Image)."""

BASED_ON = "flux1"
