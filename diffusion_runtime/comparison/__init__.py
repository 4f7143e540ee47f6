"""Comparison of settings: the same prompts and seeds under several, in quality and in time (`compare`)."""
