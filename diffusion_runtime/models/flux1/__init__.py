"""FLUX.1 text-to-image (Black Forest Labs, 2024; https://github.com/black-forest-labs/flux)."""
