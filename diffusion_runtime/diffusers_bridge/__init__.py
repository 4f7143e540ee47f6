"""diffusers bridge: our attention inside diffusers' pipelines and models (attach), and any diffusers pipeline behind
our call (passthrough)."""
