"""Latents to frames and sound: autoencoders, in tiles, bands and pieces."""
