"""MOSS-Image, text to image (OpenMOSS, 2026, arXiv:2610.23374; https://github.com/OpenMOSS/MOSS-Image)."""

BASED_ON = "flux2"
