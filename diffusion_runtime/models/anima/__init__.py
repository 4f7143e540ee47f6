"""Anima, text to image (CircleStone Labs and Comfy Org, 2026; https://huggingface.co/circlestone-labs/Anima)."""

BASED_ON = "qwen_image"
