"""Block-sparse attention: each block of queries attends to a chosen list of key blocks."""
