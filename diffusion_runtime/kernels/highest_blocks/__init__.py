"""The highest of each row of scores, by index."""
