"""Animations against diffusers' modular pipeline on tiny weights: latents within 1e-4, frames alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

# What importing diffusers' modular pipelines says about packages that are not here, and its eager FlexAttention.
pytestmark = pytest.mark.filterwarnings("ignore")


def theirs_of(folder: Path, scale: float) -> Any:
    import diffusers
    from diffusers.modular_pipelines.wan_animate_2 import WanAnimate2Blocks, WanAnimate2ModularPipeline
    from diffusers.modular_pipelines.wan_animate_2.video_processor import WanAnimate2VideoProcessor
    from transformers import AutoTokenizer, CLIPVisionModel, UMT5EncoderModel

    settings = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    scheduler = getattr(diffusers, settings["_class_name"])
    pipeline = WanAnimate2ModularPipeline(blocks=WanAnimate2Blocks())
    pipeline.update_components(
        text_encoder=UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        image_encoder=CLIPVisionModel.from_pretrained(folder / "image_encoder", dtype=torch.float32),
        vae=diffusers.AutoencoderKLWan.from_pretrained(folder / "vae"),
        transformer=diffusers.WanAnimate2Transformer3DModel.from_pretrained(folder / "transformer"),
        scheduler=scheduler.from_pretrained(folder / "scheduler"),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=scale),
        image_processor=WanAnimate2VideoProcessor(resample="bicubic"),
        video_processor=WanAnimate2VideoProcessor(resample="bilinear"),
    )
    return pipeline
