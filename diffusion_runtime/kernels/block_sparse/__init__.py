"""Attention in which each block of queries sees a chosen list of key blocks."""
