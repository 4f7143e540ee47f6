"""Judging what a pipeline makes: metrics against a dense run, and the `shapes` data with its programmatic checker."""
