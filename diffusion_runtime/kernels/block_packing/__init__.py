"""q, k and v as rows in the order of blocks, with the mean of every block from the same pass."""
