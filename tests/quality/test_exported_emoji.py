"""A folder of the world `emoji` in 8 bits, from untrained weights: what scripts and package read of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5EncoderModel

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.models.model_sources import EMBEDDED_FOLDERS
from scripts.train_embedded.architecture import build_text_encoder, build_tokenizer, build_transformer
from scripts.train_embedded.eight_bits import write_folder
from scripts.train_embedded.evaluate import Model, Setting
from scripts.train_embedded.export import build_scheduler, export_folder, load_component, load_vae
from scripts.train_embedded.sampling import SamplerSettings
from scripts.train_embedded.world import EMOJI

FOLDER = EMBEDDED_FOLDERS["emoji"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    transformer = build_transformer(EMOJI.sizes)
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.02)
    text_encoder = build_text_encoder(len(build_tokenizer(EMOJI.words())), EMOJI.sizes)
    place, vae = tmp_path_factory.mktemp("emoji") / "emoji", load_vae(FOLDER)
    scheduler, steps = build_scheduler("unipc", 12.0), {"num_inference_steps": 10}
    wide = place.with_name("wide")
    export_folder(wide, vae, transformer, text_encoder, scheduler, EMOJI, defaults=steps)
    write_folder(wide, place)
    assert sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) < 19.2e6
    return place


def test_the_package_makes_clips_of_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = load_pipeline(str(folder), device="cpu", dtype="float32")
    small = GenerationRequest("a whale jumping with a zebrafish", height=64, width=64, num_frames=5, seed=1)
    resolved = pipeline.resolve(small, preset="draft")
    assert (resolved.num_inference_steps, resolved.flow_shift, resolved.sampler) == (8, 12.0, "unipc")
    assert pipeline.resolve(small).num_inference_steps == 10
    with caplog.at_level(logging.WARNING):
        media = pipeline(GenerationRequest(**{**small.to_dict(), "num_inference_steps": 1}))
    assert media.frames.shape == (5, 64, 64, 3)
    assert "does not know 'zebrafish'" in caplog.text


def test_scripts_read_the_numbers_that_the_package_computes_with(folder: Path) -> None:
    pipeline = load_pipeline(str(folder), device="cpu", dtype="float32")
    transformer = load_component(folder, WanTransformer3DModel)
    feed_forward = transformer.blocks[0].ffn.net[0].proj.weight
    held = dict(pipeline.transformer.state_dict())
    assert any(value.shape == feed_forward.shape and torch.equal(value, feed_forward) for value in held.values())
    assert not load_component(folder, UMT5EncoderModel).training
    assert load_component(folder, AutoencoderKLWan).config.latents_mean == load_vae(folder).config.latents_mean
    values = json.loads((folder / "transformer" / "config.json").read_text())
    assert values["quantization_config"] == {"quant_method": "comfy_quant", "dequantize": True}


def test_what_is_judged_is_what_the_package_makes(folder: Path) -> None:
    """Guidance in a part of the steps too."""
    setting = Setting.parse("unipc:4:3:12:0.5")
    assert str(setting) == "unipc:4:3:12:0.5"
    assert Setting.parse("unipc:4:3:12") == Setting("unipc", 4, 3.0, 12.0)
    pipeline = load_pipeline(str(folder), device="cpu", dtype="float32")
    request = GenerationRequest("a fox on grass", seed=3, height=64, width=64, num_frames=5, guidance_scale=3.0,
                                num_inference_steps=4, guidance_stop=setting.guidance_stop)  # fmt: skip
    expected = torch.from_numpy(pipeline(request).frames).float()
    judged, everywhere = (
        Model(folder, "cpu", bf16=False)
        .frames(["a fox on grass"], [3], build_scheduler("unipc", 12.0), SamplerSettings(4, 3.0, 5, 64, 64, stop))[0]
        .float()
        for stop in (setting.guidance_stop, 1.0)
    )
    assert (judged - expected).abs().mean() < 0.01
    assert (everywhere - expected).abs().mean() > 0.1
