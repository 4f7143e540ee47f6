"""Formats of stored weights: one file each, and its line in registry.py."""
