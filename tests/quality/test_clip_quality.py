"""Clips of a quality benchmark: each has its final latents, frames and verdict."""

from __future__ import annotations

from benchmarks.clip_quality import KINDS, generate_clips, quality_prompts
from diffusion_runtime import load_pipeline
from diffusion_runtime.quality.worlds import WORLDS


def test_clips_of_each_model_have_latents_and_are_judged() -> None:
    for name in ("shapes", "emoji"):
        prompts = quality_prompts(1, name)
        values = {"num_frames": 5, "height": 64, "width": 64, "num_inference_steps": 1}
        clips = generate_clips(load_pipeline(name, device="cpu"), prompts, values, judge=WORLDS[name].judge)
        assert len(clips.latents) == len(prompts) == len(KINDS)
        beside = clips.beside(clips)
        assert beside["latent_relative_l2"] == 0
        assert beside["psnr_db"] == 100
        # One step shows no thing.
        assert {beside["accuracy"][kind]["joint"]["total"] for kind in KINDS} == {1}
