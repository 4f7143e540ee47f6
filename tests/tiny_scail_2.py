"""Tiny SCAIL-2 folders with random weights, under the authors' names of tensors; diffusers has no classes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_models import sensitive_to_images, tiny_scheduler, tiny_text_encoder, tiny_tokenizer, tiny_vae
from tiny_wan_animate_2 import tiny_image_encoder

# 4 x 6 tokens per frame, 2 frames; 2 x 3 of the driving video.
TINY_SIZES: dict[str, int] = {"height": 64, "width": 96, "num_frames": 5}
MAX_TEXT_TOKENS = 16
CONFIG: dict[str, Any] = {
    "model_type": "i2v",
    "text_len": MAX_TEXT_TOKENS,
    "in_dim": 20,
    "mask_dim": 28,
    "dim": 64,
    "num_heads": 4,
    "ffn_dim": 96,
    "freq_dim": 32,
    "text_dim": 32,
    "out_dim": 16,
    "num_layers": 2,
    "eps": 1e-6,
}


def write_tiny_scail_2(folder: Path, *, scheduler: str = "unipc", **config: Any) -> Path:
    """Write a whole folder and return its path; its weights depend on nothing but the arguments. config: of the
    transformer."""
    import torch
    from safetensors.torch import save_file
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = {
            "tokenizer": tiny_tokenizer(),
            "text_encoder": tiny_text_encoder(),
            "vae": sensitive_to_images(tiny_vae("plain")),
            "scheduler": tiny_scheduler(scheduler, 3.0),
            "image_encoder": tiny_image_encoder(),
        }
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    index = {
        name: ["transformers" if name in ("tokenizer", "text_encoder", "image_encoder") else "diffusers", made_by]
        for name, made_by in ((name, type(part).__name__) for name, part in parts.items())
    }
    index["transformer"] = ["scail", "SCAIL2Model"]
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "SCAIL2Pipeline", **index}))
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(
        json.dumps({"_class_name": "WanSCAILModel", **CONFIG, **config})
    )
    weights = tiny_weights({**CONFIG, **config})
    save_file(weights, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return folder


def tiny_weights(config: dict[str, Any]) -> dict[str, Any]:
    """Random tensors of the transformer by their published names: of the norms about 1, of maps such that they keep the
    size of what they read, with attention that tells tokens apart."""
    import torch

    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, shape in shapes_of(config).items():
        tensor = torch.randn(shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            tensor = (2.0 if ".self_attn" in name else 1.0) + 0.2 * tensor
        elif name.endswith(("modulation", "bias")):
            tensor = 0.2 * tensor
        else:
            tensor = tensor / tensor[0].numel() ** 0.5
        tensors[name] = tensor
    return tensors


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of the authors' class, by its attributes."""
    dim, ffn_dim = config["dim"], config["ffn_dim"]
    maps: dict[str, tuple[int, ...]] = {
        "patch_embedding": (dim, config["in_dim"], 1, 2, 2),
        "patch_embedding_pose": (dim, config["in_dim"], 1, 2, 2),
        "patch_embedding_mask": (dim, config["mask_dim"], 1, 2, 2),
        "text_embedding.0": (dim, config["text_dim"]),
        "text_embedding.2": (dim, dim),
        "time_embedding.0": (dim, config["freq_dim"]),
        "time_embedding.2": (dim, dim),
        "time_projection.1": (6 * dim, dim),
        "head.head": (4 * config["out_dim"], dim),
        "img_emb.proj.1": (1280, 1280),
        "img_emb.proj.3": (dim, 1280),
    }
    norms = {"img_emb.proj.0": 1280, "img_emb.proj.4": dim}
    shapes: dict[str, tuple[int, ...]] = {"head.modulation": (1, 2, dim)}
    for index in range(config["num_layers"]):
        block = f"blocks.{index}"
        shapes[f"{block}.modulation"] = (1, 6, dim)
        norms[f"{block}.norm3"] = dim
        for attention, names in (("self_attn", "qkvo"), ("cross_attn", ("q", "k", "v", "o", "k_img", "v_img"))):
            maps |= {f"{block}.{attention}.{name}": (dim, dim) for name in names}
            normed = ("norm_q", "norm_k", "norm_k_img") if attention == "cross_attn" else ("norm_q", "norm_k")
            shapes |= {f"{block}.{attention}.{name}.weight": (dim,) for name in normed}
        maps |= {f"{block}.ffn.0": (ffn_dim, dim), f"{block}.ffn.2": (dim, ffn_dim)}
    for name, shape in maps.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name, width in norms.items():
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return shapes
