"""Untrusted input (files, JSON, YAML), read within limits: regular files alone, bounded size, depth and numbers."""
