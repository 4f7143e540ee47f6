"""Two stages of LTX-Video against diffusers' LTXConditionPipeline, LTXLatentUpsamplePipeline and LTXConditionPipeline
again, on tiny weights in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import LTXConditionPipeline, LTXLatentUpsamplePipeline
from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel
from family_parity import kept_after_steps, load_theirs
from tables import table
from tiny_ltx_video import CHANNELS, write_tiny_ltx_video

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.loading import inspect_pipeline

# diffusers hands a tensor of its schedule to numpy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@table("between", [{}, {"adain_factor": 1.0, "tone_map_compression_ratio": 0.6}])
def test_two_stages_equal_diffusers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: dict[str, float]) -> None:
    """Latents after every step of both stages, and frames; between: what upsampled latents become."""
    folder = write_tiny_ltx_video(tmp_path / "model", takes_conditions=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = LTXLatentUpsamplerModel(in_channels=CHANNELS, mid_channels=32, num_blocks_per_stage=1)
    network.save_pretrained(tmp_path / "upsampler")
    ours = load_pipeline(str(folder), device="cpu", upsampler_path=str(tmp_path / "upsampler"))
    assert isinstance(ours, Pipeline)
    sizes = {"height": 128, "width": 192, "num_frames": 9, "fps": 25}
    values: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 3.0, "seed": 5, "negative_prompt": "a star"}
    kept = kept_after_steps(monkeypatch)
    request = ours.resolve(GenerationRequest("a red circle", **sizes, **values, **between))
    # The last four of ten steps.
    assert request.second_stage_sigmas == pytest.approx((0.932, 0.807, 0.618, 0.341), abs=0.05)
    media = ours(request)
    theirs = load_theirs(LTXConditionPipeline, folder)
    generator = torch.Generator().manual_seed(5)
    expected: list[torch.Tensor] = []

    def keep(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        expected.append(tensors["latents"].clone())
        return {}

    common: dict[str, Any] = {
        "prompt": "a red circle",
        "negative_prompt": "a star",
        "num_frames": 9,
        "guidance_scale": 3.0,
        "guidance_rescale": request.guidance_rescale,
        "generator": generator,
        "callback_on_step_end": keep,
        "return_dict": False,
    }
    small = theirs(height=64, width=96, num_inference_steps=4, output_type="latent", **common)[0]
    larger = LTXLatentUpsamplePipeline(vae=theirs.vae, latent_upsampler=network)(
        latents=small, height=64, width=96, output_type="latent", return_dict=False, **between
    )[0]
    # The decoder's noise is the second draw of a generator in ours, whatever was drawn between.
    second = torch.Generator().manual_seed(5)
    torch.randn((1, CHANNELS, 2, 4, 6), generator=second)
    draws = [torch.randn((1, CHANNELS, 2, 4, 6), generator=each) for each in (generator, second)]
    with pytest.MonkeyPatch.context() as patched:
        module = "diffusers.pipelines.ltx.pipeline_ltx_condition.randn_tensor"
        patched.setattr(module, lambda *_, **__: draws.pop(0))
        frames = theirs(
            height=128,
            width=192,
            latents=larger,
            num_inference_steps=10,
            denoise_strength=0.4,
            decode_timestep=request.decode_timestep,
            decode_noise_scale=request.decode_noise_scale,
            output_type="np",
            **common,
        )[0]
    assert len(kept) == len(expected) == 8
    for found, other in zip(kept, expected, strict=True):
        mine = found.flatten(2).transpose(1, 2)
        assert (mine - other).norm() <= 1e-4 * other.norm()
    assert media.frames.shape == frames[0].shape
    assert numpy.abs(media.frames / 255 - frames[0]).max() <= 2 / 255
    assert frames.std() > 0.02


def test_a_distilled_model_has_levels_of_its_own(tmp_path: Path) -> None:
    folder = write_tiny_ltx_video(tmp_path / "ltx-video-0.9.8-13b-distilled", takes_conditions=True)
    LTXLatentUpsamplerModel(in_channels=CHANNELS, mid_channels=32, num_blocks_per_stage=1).save_pretrained(
        tmp_path / "upsampler"
    )
    rules = inspect_pipeline(RuntimeConfig(str(folder), upsampler_path=str(tmp_path / "upsampler"))).rules
    resolved = rules.resolve(GenerationRequest("a red circle", height=128, width=192, num_frames=9))
    assert resolved.second_stage_sigmas == (0.909, 0.725, 0.421)
    assert resolved.sigmas is not None
    assert resolved.num_inference_steps == 8
