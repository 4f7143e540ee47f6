"""Measures for the first seconds of a process, which switch.py turns off together, and their counts."""
