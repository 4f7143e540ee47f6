"""Traces and times of one generation."""
