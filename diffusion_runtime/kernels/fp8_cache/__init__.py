"""Cached keys and values in 8 bits, read back into the dtype of attention."""
