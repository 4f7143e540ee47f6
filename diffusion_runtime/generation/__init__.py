"""One batch, from conditions to frames."""
