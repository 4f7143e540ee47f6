"""Explanation of a generation before it runs: attention by layer and step, operations, memory, expected time."""
