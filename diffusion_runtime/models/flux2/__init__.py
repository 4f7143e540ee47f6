"""FLUX.2 text-to-image (Black Forest Labs, 2025; https://github.com/black-forest-labs/flux2)."""
