"""Tiny SeedVR2 folders with random weights, under the authors' names of tensors; diffusers has no classes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHANNELS = 4
TEXT_DIM, TEXT_TOKENS = 24, 5
# Of a 3B model: the text has layers of its own in the first block.
TRANSFORMER: dict[str, Any] = {
    "vid_in_channels": 2 * CHANNELS + 1,
    "vid_out_channels": CHANNELS,
    "vid_dim": 64,
    "txt_in_dim": TEXT_DIM,
    "heads": 2,
    "head_dim": 32,
    "expand_ratio": 4,
    "num_layers": 3,
    "mm_layers": 1,
    "norm_eps": 1e-5,
    "mlp_type": "swiglu",
    "rope_type": "mmrope3d",
    "vid_out_norm": True,
    "patch_size": [1, 2, 2],
    "window": [4, 3, 3],
    "qk_bias": False,
}
# Of a 7B model: in every block, networks without a gate, no norm at the end.
LARGE = {**TRANSFORMER, "mm_layers": 3, "mlp_type": "normal", "rope_type": "rope3d", "vid_out_norm": False}
VAE: dict[str, Any] = {
    "latent_channels": CHANNELS,
    "block_out_channels": [16, 16, 32, 32],
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "temporal_scale_num": 2,
    "scaling_factor": 0.9152,
}


def write_tiny_seedvr2(folder: Path, *, is_large: bool = False) -> Path:
    """Write a whole folder and return its path; its weights are the same always."""
    from safetensors.torch import save_file

    config = LARGE if is_large else TRANSFORMER
    files = {
        "model_index.json": {
            "_class_name": "SeedVR2Pipeline",
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "transformer": ["diffusers", "SeedVR2Transformer3DModel"],
            "vae": ["diffusers", "AutoencoderKLSeedVR2"],
        },
        "transformer/config.json": {"_class_name": "SeedVR2Transformer3DModel", **config},
        "vae/config.json": {"_class_name": "AutoencoderKLSeedVR2", **VAE},
        "scheduler/scheduler_config.json": {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "num_train_timesteps": 1000,
            "shift": 1.0,
        },
    }
    for name, values in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    save_file(tiny_transformer(folder), folder / "transformer" / "diffusion_pytorch_model.safetensors")
    save_file(tiny_autoencoder(), folder / "vae" / "diffusion_pytorch_model.safetensors")
    import torch

    text = torch.randn(TEXT_TOKENS, TEXT_DIM, generator=torch.Generator().manual_seed(2))
    save_file({"positive": text}, folder / "text_embedding.safetensors")
    return folder


def tiny_transformer(folder: Path) -> dict[str, Any]:
    """Random tensors of a folder's transformer by their published names, with those that nothing reads."""
    import torch

    from diffusion_runtime.models.seedvr2.config import read_transformer_config
    from diffusion_runtime.models.seedvr2.weights import transformer_pieces

    config = read_transformer_config(folder)
    shapes = {piece.name: piece.shape for _, pieces in transformer_pieces(config) for piece in pieces}
    tensors = _random(shapes, 0)
    for index in range(config.num_layers):
        tensors[f"blocks.{index}.attn.rope.rope.freqs"] = torch.zeros(config.head_dim // 6)
    return tensors


def tiny_autoencoder() -> dict[str, Any]:
    """Random tensors of the autoencoder."""
    from diffusion_runtime.decoders.replicating_autoencoder import AutoencoderKLSeedVR2

    sizes = {key: value for key, value in VAE.items() if key != "scaling_factor"}
    module = AutoencoderKLSeedVR2(**sizes)
    return _random({name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}, 1)


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Any]:
    """Norms about 1, weights that keep the size of their input."""
    import torch

    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in sorted(shapes.items()):
        tensor = torch.randn(shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            tensor = 1 + 0.2 * tensor
        elif name.endswith("_scale"):
            tensor = 1 + 0.1 * tensor
        elif len(shape) == 1:
            tensor = 0.1 * tensor
        else:
            tensor = tensor / tensor[0].numel() ** 0.5
        tensors[name] = tensor
    return tensors
