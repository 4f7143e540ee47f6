"""Tiny Wan-Animate 2 folders with random weights, of diffusers' and transformers' own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_models import sensitive_to_images, tiny_scheduler, tiny_text_encoder, tiny_tokenizer, tiny_vae

# 3 x 2 tokens per frame, 2 frames and the reference image's.
TINY_SIZES: dict[str, int] = {"height": 48, "width": 32, "num_frames": 5}
MAX_TEXT_TOKENS = 16


def write_tiny_wan_animate_2(
    folder: Path,
    *,
    scheduler: str = "dpmpp_2m",
    num_layers: int = 2,
    has_image_encoder: bool = False,
    distilled: bool = False,
    vae: str = "plain",
    **config: Any,
) -> Path:
    """Write a whole folder and return its path; its weights depend on nothing but the arguments. Its index is that of
    the ordinary pipeline which the modular one is opened as. config: of the transformer. has_image_encoder: 20 MB more,
    as its width is fixed."""
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = {
            "tokenizer": tiny_tokenizer(),
            "text_encoder": tiny_text_encoder(),
            "transformer": tiny_transformer(num_layers, use_img_emb=has_image_encoder, **config),
            "vae": sensitive_to_images(tiny_vae(vae)),
            "scheduler": tiny_scheduler(scheduler, 5.0),
            **({"image_encoder": tiny_image_encoder()} if has_image_encoder else {}),
        }
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    index = {
        name: ["transformers" if name in ("tokenizer", "text_encoder", "image_encoder") else "diffusers", made_by]
        for name, made_by in ((name, type(part).__name__) for name, part in parts.items())
    }
    name = "WanAnimate2DistilledPipeline" if distilled else "WanAnimate2Pipeline"
    (folder / "model_index.json").write_text(json.dumps({"_class_name": name, **index}))
    return folder


def tiny_transformer(num_layers: int, **config: Any) -> Any:
    import torch
    from diffusers import WanAnimate2Transformer3DModel

    sizes = {"text_len": MAX_TEXT_TOKENS, "dim": 64, "num_heads": 4, "ffn_dim": 96, "freq_dim": 32, "text_dim": 32}
    model = WanAnimate2Transformer3DModel(**{**sizes, "num_layers": num_layers, **config})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights of exactly one and small cross-attentions would hide a norm or a prompt that is left out.
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if ".cross_attn.to_out" in name or name.startswith("head.head"):
                parameter.mul_(3.0)
            # Attention that tells tokens apart, so that positions and the driving video's frames count.
            if ".self_attn.norm_" in name:
                parameter.mul_(2.0)
    return model.eval()


def tiny_image_encoder() -> Any:
    """65 tokens of an image."""
    import torch
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=1280,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=16,
        image_size=224,
        patch_size=28,
    )
    return CLIPVisionModel(config).eval().to(torch.bfloat16)
