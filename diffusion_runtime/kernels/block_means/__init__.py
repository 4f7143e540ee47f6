"""The mean of every block of tokens."""
