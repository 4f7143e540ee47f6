"""Attention to parts of the keys, merged by the log-sum-exp of each part."""
