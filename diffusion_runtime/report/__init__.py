"""Attention report: what ran."""
