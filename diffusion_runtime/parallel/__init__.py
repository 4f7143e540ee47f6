"""Exchanges between processes around a `run` function. They never meet a kernel."""
