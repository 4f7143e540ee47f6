"""FLUX.3 Image [klein] (Black Forest Labs, 2026; https://github.com/black-forest-labs/flux-3-image-klein)."""

BASED_ON = "flux2"
