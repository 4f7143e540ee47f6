"""Pipelines and models of diffusers: our attention inside them, and any of them behind the same call."""
