"""Qwen-Image 2.1, images of text (Qwen team, 2026)."""
