"""Clips longer than trained, in whole pipelines: context windows with guidance, samplers, caches, sparse attention,
prompts of their own; RIFLEx in every family that has it; what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from several_processes import GENERATE, start
from tables import table
from tiny_families import WRITERS
from tiny_models import write_tiny_wan

from diffusion_runtime import AttentionConfig, GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.errors import RequestError
from diffusion_runtime.explanation.explanation import explain, inspected
from diffusion_runtime.loading import inspect_pipeline, prepare
from diffusion_runtime.loading.memory_planning import planned_batch
from diffusion_runtime.models.memory_demand import memory_demand

# 11 latent frames in windows of 4, which share 2 and 1: at 0, 2, 4 (5 with an even distance), 7.
WINDOWS: dict[str, Any] = {"context_frames": 13, "context_overlap": 8}


@pytest.fixture(scope="module")
def pipeline(tiny_wan_folder: Path) -> Pipeline:
    return load_pipeline(str(tiny_wan_folder), device="cpu")


def request(prompt: str = "a red circle moving left", **values: Any) -> GenerationRequest:
    sizes: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 41, "num_inference_steps": 3, "seed": 1}
    sizes |= {"guidance_scale": 4.0, "guidance_mode": "two_pass"}
    return GenerationRequest(prompt, **(sizes | values))


def frames_of_passes(pipeline: Pipeline, asked: GenerationRequest) -> tuple[torch.Tensor, Counter[int]]:
    """Return the latents, and how many forward passes there were by their latent frames."""
    seen = Counter[int]()
    hook = pipeline.transformer.register_forward_pre_hook(lambda _, given: seen.update([given[0].shape[2]]))
    try:
        return pipeline.latents(asked), seen
    finally:
        hook.remove()


def test_windows_run_at_every_prediction_and_the_report_and_dry_run_say_so(pipeline: Pipeline) -> None:
    asked = pipeline.resolve(request(**WINDOWS))
    latents, seen = frames_of_passes(pipeline, asked)
    # Two branches of guidance, three steps.
    num_windows = 5
    assert seen == {4: 2 * 3 * num_windows}
    assert latents.shape[2] == 11
    (remark,) = [each for each in pipeline.rules.unused(asked) if each.startswith("context windows: ")]
    plan = "context windows: 5 of 13 frames (4 of 11 latent frames), 2 or more latent frames shared"
    assert remark.startswith(f"{plan}, noise repeated in another order: 5 evaluations per prediction, 1.8 times")
    media = pipeline(asked)
    assert remark in str(media.attention_report)
    assert media.recipe["request"]["context_overlap"] == 8


def test_a_window_as_long_as_the_clip_changes_no_bit(pipeline: Pipeline) -> None:
    plain = pipeline.latents(request())
    for values in ({"context_frames": 41}, {"context_frames": 81, "context_noise": "repeated"}, {"riflex": "off"}):
        assert torch.equal(pipeline.latents(request(**values)), plain), values
    assert "is predicted at once" in pipeline.rules.unused(pipeline.resolve(request(context_frames=41)))[0]


def test_guidance_in_one_batch_batches_and_samplers_agree(pipeline: Pipeline) -> None:
    for sampler in ("unipc", "flow_match_euler"):
        alone = pipeline.latents(request(sampler=sampler, **WINDOWS))
        together = pipeline.latents(request(sampler=sampler, guidance_mode="batched", **WINDOWS))
        assert float((alone - together).abs().max()) < 1e-4, sampler
        assert not torch.equal(alone, pipeline.latents(request(sampler=sampler)))
    euler = {"sampler": "flow_match_euler", **WINDOWS}
    assert not torch.equal(alone, pipeline.latents(request(**euler, context_noise="random")))
    one, two = pipeline.generate([request(seed=seed, **euler) for seed in (1, 5)])
    for seed, media in ((1, one), (5, two)):
        single = pipeline(request(seed=seed, **euler)).frames
        assert abs(single.astype(int) - media.frames.astype(int)).max() <= 1, seed


def test_windows_may_have_prompts_of_their_own(pipeline: Pipeline) -> None:
    """Windows that do not see a prompt's frames begin the same: after one step of Euler, they are the same."""
    values = {"num_inference_steps": 1, "sampler": "flow_match_euler", **WINDOWS}
    switched = pipeline.resolve(request(prompt_switches=(("2s", "a blue star"),), fps=10, **values))
    assert switched.prompt_switches == ((20, "a blue star"),)
    plain, other = pipeline.latents(request(**values)), pipeline.latents(request("a blue star", **values))
    mixed = pipeline.latents(switched)
    # Middles: frames 6, 14, 20 (of latents 3 to 6), 26 and 34 of the video.
    assert torch.allclose(mixed[:, :, :3], plain[:, :, :3], atol=1e-5)
    assert torch.allclose(mixed[:, :, 7:], other[:, :, 7:], atol=1e-5)
    assert not torch.allclose(mixed[:, :, 3:7], plain[:, :, 3:7], atol=1e-3)
    assert "of 2 prompts" in pipeline.rules.unused(switched)[0]


@table("values", [{"step_cache": "easycache:threshold=0.9,warmup=0.2,force=true"}, {"cfg_gate": 0.4}])
def test_caches_of_whole_predictions_reuse_those_of_all_windows(pipeline: Pipeline, values: dict[str, Any]) -> None:
    asked = request(num_inference_steps=8, sampler="flow_match_euler", **WINDOWS, **values)
    _, seen = frames_of_passes(pipeline, asked)
    assert set(seen) == {4}
    assert 0 < seen[4] < 2 * 8 * 5
    assert seen[4] % 5 == 0


def test_sparse_attention_plans_for_windows_and_two_experts_keep_their_texts(tmp_path: Path) -> None:
    sparse = {
        "backend": "sparse_video_gen_2_attn",
        "extra": {"svg2_first_times_fp": 0.0, "svg2_first_layers_fp": 0.0, "svg2_num_k_centroids": 4},
    }
    folder = write_tiny_wan(tmp_path / "experts", boundary_ratio=0.7)
    attention = AttentionConfig.parse({"per_role": {"self": sparse}})
    pipeline = load_pipeline(str(folder), device="cpu", attention=attention)
    report = pipeline(request(**WINDOWS)).attention_report
    rows = [row for row in report.rows if row.role == "self"]
    assert {row.backend for row in rows} == {"sparse_video_gen_2_attn"}
    # Calls: layers, windows, branches, steps.
    assert sum(row.count for row in rows) == 2 * 5 * 2 * 3


@table("family", ["wan", "hunyuan_video", "hunyuan_video_15", "ltx_video"])
def test_families_predict_in_windows_and_lower_their_frequency(family: str, tmp_path: Path) -> None:
    pipeline = load_pipeline(str(WRITERS[family](tmp_path / family)), device="cpu")
    factor = pipeline.rules.sampling.geometry.temporal_factor
    sizes = {"num_frames": 10 * factor + 1, "num_inference_steps": 2}
    windows = {"context_frames": 3 * factor + 1, "context_overlap": 2 * factor}
    _, seen = frames_of_passes(pipeline, request(**sizes, **windows))
    assert set(seen) == {4}
    temporal = pipeline.rules.sampling.temporal
    if temporal is None:
        assert family == "ltx_video"
        return
    short = max(index for index in range(1, len(temporal) + 1) if temporal.period(index) < 11)
    asked = pipeline.resolve(request(**sizes, riflex="on", riflex_index=short))
    assert f"riflex: frequency {short} of {len(temporal)} in time is lowered" in str(pipeline.rules.unused(asked))
    plain = pipeline.latents(request(**sizes))
    assert not torch.allclose(pipeline.latents(asked), plain, atol=1e-4)
    assert pipeline.resolve(request(**sizes, riflex="on")).riflex_index is not None
    with pytest.raises(RequestError, match=f"riflex_index: expected 1 to {len(temporal)}, the frequencies"):
        pipeline.resolve(request(**sizes, riflex="on", riflex_index=99))


def test_explain_and_the_memory_plan_count_windows(tiny_wan_folder: Path) -> None:
    prepared = prepare(RuntimeConfig(str(tiny_wan_folder), device="cpu"))
    rules = inspected(prepared).rules
    whole, windows = (rules.resolve(request(height=256, width=256, **values)) for values in ({}, WINDOWS))
    explained = {name: explain(prepared, each) for name, each in (("whole", whole), ("windows", windows))}
    assert explained["whole"].num_forwards == 2 * 3
    assert explained["windows"].num_forwards == 2 * 3 * 5
    assert any(remark.startswith("context windows: 5 of 13") for remark in explained["windows"].remarks)
    # Attention of 11 frames among each other, and of five windows of 4.
    at_once, in_windows = (
        next(part for part in each.parts if part.name == "attention, self") for each in explained.values()
    )
    assert in_windows.operations == pytest.approx(at_once.operations * 5 * 16 / 121, rel=1e-6)
    model, transformer = inspected(prepared).model, inspected(prepared).transformer
    demands = [
        memory_demand(model, transformer, torch.float32, planned_batch(rules, [each])) for each in (whole, windows)
    ]
    # The sampler's latents are those of the whole clip.
    assert demands[1].step_activations < 0.8 * demands[0].step_activations


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("shapes", {"context_frames": 28}, "context_frames: expected a multiple of 4 plus 1, got 28; use 25 or 29"),
    ("shapes", {**WINDOWS, "context_overlap": 6}, "context_overlap: expected a multiple of 4, got 6; use 4 or 8"),
    ("shapes", {**WINDOWS, "context_overlap": 16}, "context_overlap: expected less than context_frames, 13, got 16"),
    ("shapes", {**WINDOWS, "riflex": "on"}, "riflex: positions in context windows are no longer than trained"),
    ("shapes", {**WINDOWS, "step_cache": "dbcache"}, "step_cache: dbcache compares a pass with the one before"),
    ("shapes", {"prompt_switches": (("1s", "a star"),)}, "this model makes a clip at once, of one prompt; leave --at"),
    ("shapes", {**WINDOWS, "prompt_switches": ((40, "a star"),)}, "no context window takes the prompt from frame 40"),
    ("shapes", {**WINDOWS, "prompt_switches": ((1, "a star"),)}, "no context window takes the prompt from frame 0"),
    ("shapes", {**WINDOWS, "prompt_switches": (("9m", "a star"),)}, "--at: expected a time behind the first frame"),
    ("shapes-causal", WINDOWS, "context_frames: context windows are of clips of pictures alone that are made at once"),
    ("shapes-causal", {"riflex": "on"}, "riflex: RIFLEx lowers a frequency of rotary positions that count frames"),
    ("ltx-2", WINDOWS, "context_frames: context windows are of clips of pictures alone"),
    ("ltx-video-0.9.1", {"riflex": "on"}, "riflex: RIFLEx lowers a frequency of rotary positions that count frames"),
    ("flux.1-dev", WINDOWS, "context_frames: context windows are of clips"),
]


@table("model, values, message", REFUSED)
def test_what_cannot_run_is_refused_before_the_weights_load(model: str, values: dict[str, Any], message: str) -> None:
    rules = inspect_pipeline(RuntimeConfig(model, device="cpu", offline=True)).rules
    frames = {} if model == "flux.1-dev" else {"num_frames": 41}
    with pytest.raises(RequestError) as caught:
        rules.resolve(GenerationRequest("a red circle", **frames, **values))
    assert message in str(caught.value)


def test_an_image_to_begin_with_is_refused(tmp_path: Path) -> None:
    rules = inspect_pipeline(RuntimeConfig(str(write_tiny_wan(tmp_path / "wan", takes_image=True)), device="cpu")).rules
    with pytest.raises(RequestError, match="context_frames: an image that the clip begins with is in one window alone"):
        rules.resolve(request(image_path="first.png", **WINDOWS))


def test_what_is_not_used_is_said(pipeline: Pipeline) -> None:
    asked = pipeline.resolve(request(context_overlap=8, context_noise="repeated", riflex_index=2))
    said = " ".join(pipeline.rules.unused(asked))
    for name in ("context_overlap: 8", "context_noise: repeated", "riflex_index: 2"):
        assert f"{name} is not used" in said


@pytest.mark.slow
def test_processes_share_the_tokens_of_every_window(tiny_wan_folder: Path, tmp_path: Path) -> None:
    import numpy

    windows = ("--model-path", str(tiny_wan_folder), *GENERATE, "--num-frames", "41")
    windows = (*windows, "--context-frames", "13", "--context-overlap", "8", "-o", "clip.npy")
    made = {}
    for name, several in (("one", ()), ("two", ("--num-gpus", "2", "--ulysses-degree", "2"))):
        result = start(tmp_path / name, *windows[2:], *windows[:2], *several).finish()
        assert result.code == 0, result.err
        made[name] = numpy.load(tmp_path / name / "clip.npy")
    assert abs(made["one"].astype(int) - made["two"].astype(int)).max() <= 1
