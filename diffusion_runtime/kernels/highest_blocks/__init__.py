"""Top-k: the indexes of the highest scores of each row."""
