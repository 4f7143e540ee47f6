"""Sequence parallel (context parallel) attention and the processes behind it: exchanges around a `run` function.
Nothing here calls a kernel."""
