"""Wan-Animate 2 (Wan team, 2026; https://github.com/Wan-Video/Wan2.2): a character of an image moves as in a video."""

BASED_ON = "wan"
