"""Pickled checkpoints (.pt) made into folders of safetensors: `diffusion-runtime models convert`."""
