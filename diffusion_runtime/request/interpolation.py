"""Frame interpolation as a request asks for it: what is missing without weights, and where these are."""

from __future__ import annotations

RIFE = "rife"
"""What `models convert --as` takes for its weights."""
PUBLISHED = "rife_v4.26.safetensors (22.7 MB) of https://huggingface.co/Comfy-Org/frame_interpolation"
CONVERTED = (
    "`diffusion-runtime models convert flownet.pkl rife.safetensors --as rife` makes one of the authors' file "
    "(https://github.com/hzwer/Practical-RIFE)"
)
NO_INTERPOLATION = (
    f"frames between those of the model are made by RIFE, whose weights are not here: give {PUBLISHED} by "
    f"--interpolation-path FILE; {CONVERTED}"
)
MAX_MULTIPLE = 4
