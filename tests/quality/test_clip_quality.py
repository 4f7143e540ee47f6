"""Clips of a quality benchmark: each has its final latents, frames and verdict."""

from __future__ import annotations

from benchmarks.clip_quality import generate_clips, quality_prompts
from diffusion_runtime import load_pipeline
from diffusion_runtime.quality.shapes.prompts import PROMPT_KINDS
from diffusion_runtime.quality.worlds import WORLDS


def test_clips_of_each_model_have_latents_and_are_judged() -> None:
    for name in ("shapes", "emoji"):
        prompts = quality_prompts(1, name, PROMPT_KINDS)
        values = {"num_frames": 5, "height": 64, "width": 64, "num_inference_steps": 1}
        pipeline, judge = load_pipeline(name, device="cpu"), WORLDS[name].judge
        clips = generate_clips(pipeline, prompts, values, judge=judge, kinds=PROMPT_KINDS)
        assert len(clips.latents) == len(prompts) == len(PROMPT_KINDS)
        beside = clips.beside(clips)
        assert beside["latent_relative_l2"] == 0
        assert beside["psnr_db"] == 100
        # One step shows no thing.
        assert {beside["accuracy"][kind]["joint"]["total"] for kind in PROMPT_KINDS} == {1}
