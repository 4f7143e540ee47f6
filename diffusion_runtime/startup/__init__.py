"""Measures for the first seconds of a process, which switch.py turns off together; docs/environment.md lists them."""
