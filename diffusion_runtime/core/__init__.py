"""Plain values and guards that every row reads."""
