"""Krea 2, text to image (Krea, 2026; https://github.com/krea-ai/krea-2)."""

BASED_ON = "qwen_image"
