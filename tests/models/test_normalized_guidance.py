"""Normalized attention guidance (NAG) in every family that reads a prompt, and in requests. Its formula is tested in
attention/test_normalized_guidance.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from recorded_capture import RecordedCapture
from tiny_families import WRITERS, given_to, small_request
from tiny_ltx2 import write_tiny_ltx2

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext
from diffusion_runtime.attention.normalized_guidance import NormalizedGuidance
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.errors import RequestError
from diffusion_runtime.loading import inspect_pipeline

pytestmark = pytest.mark.filterwarnings("ignore")
FolderOf = Callable[[str], Path]
NEGATIVE = "a star"
# Of requests that resolve.
SIZES = {
    "wan": {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 2},
    "hunyuan_video": {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 2},
    "ltx2": {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2},
}


def loaded(folder: Path) -> Pipeline:
    pipeline = load_pipeline(str(folder), device="cpu", dtype="float32")
    assert isinstance(pipeline, Pipeline)
    return pipeline


def request_of(pipeline: Pipeline, **values: Any) -> GenerationRequest:
    """A small request without guidance by a second branch, where the model has that."""
    embeds, guides_parts = pipeline.rules.sampling.embeds_guidance, pipeline.rules.sampling.guides_parts
    unguided: dict[str, Any] = {} if embeds else {"guidance_scale": 1.0 - pipeline.rules.sampling.guidance_offset}
    if guides_parts:
        unguided |= {"stg_scale": 0.0, "modality_scale": 1.0, "audio_guidance_scale": 1.0, "audio_modality_scale": 1.0}
    return dataclasses.replace(small_request(pipeline), **(unguided | values))


@pytest.mark.parametrize("family", ["wan", "flux1", "z_image", "qwen_image_21"])
def test_a_pass_with_two_texts(tiny_folder_of: FolderOf, family: str) -> None:
    """Text as keys, in blocks of two streams, behind filling, and as a prefix. With alpha 0 the velocity is that of the
    prompt alone: nothing of the negative text comes to the tokens in another way."""
    pipeline = loaded(tiny_folder_of(family))
    model, (latents, timestep, both) = pipeline.transformer, given_to(pipeline)
    if both.text.pooled is not None:
        both = dataclasses.replace(both, text=dataclasses.replace(both.text, pooled=both.text.pooled[:1].repeat(2, 1)))
    count = 1 if model.text_is_keys else 2
    latents, timestep = torch.cat([latents[:1]] * count), timestep[:1].repeat(count)

    def run(alpha: float) -> tuple[torch.Tensor, set[str]]:
        context = AttentionContext(guidance=NormalizedGuidance(4.0, 2.5, alpha, num_samples=1))
        out: torch.Tensor = model(latents, timestep, both, context)
        return out, {row.role for row in context.recorder.report().rows if row.is_guided}

    plain = model(latents[:1], timestep[:1], dataclasses.replace(both, text=both.text.take([0])), AttentionContext())
    (unguided, _), (guided, roles) = run(0.0), run(0.25)
    scale = plain.abs().max()
    assert (unguided[:1] - plain).abs().max() < 1e-5 * scale
    assert (guided[:1] - plain).abs().max() > 1e-3 * scale
    assert roles == model.text_roles == {"cross" if model.text_is_keys else "self"}


@pytest.mark.slow
def test_every_family_that_reads_a_prompt_is_guided(tiny_folder_of: FolderOf, tmp_path: Path) -> None:
    """Away from another text, not away from the prompt itself; in a batch as alone."""
    folders = {family: tiny_folder_of(family) for family in WRITERS if family != "seedvr2"}
    folders["ltx2.3"] = write_tiny_ltx2(tmp_path / "ltx2.3", is_ltx23=True)
    wrong = []
    for family, folder in folders.items():
        pipeline = loaded(folder)
        found: list[torch.Tensor] = []
        pipeline.hooks = dataclasses.replace(pipeline.hooks, on_latents=found.append)
        plain, away = request_of(pipeline), request_of(pipeline, negative_prompt=NEGATIVE, nag_scale=5.0)
        report = pipeline(plain).attention_report
        guided = pipeline(away).attention_report
        pipeline(dataclasses.replace(away, negative_prompt=plain.prompt))
        pipeline.generate([away, dataclasses.replace(away, prompt="a blue square moving", seed=9)])
        scale = float(found[0].abs().max())
        far, near, beside = (
            float((a - b).abs().max()) / scale
            for a, b in ((found[1], found[0]), (found[2], found[0]), (found[3][:1], found[1]))
        )
        roles = {row.role for row in guided.rows if row.is_guided}
        is_counted = roles == pipeline.transformer.text_roles and not any(row.is_guided for row in report.rows)
        if not (far > 1e-4 > 1e-5 > max(near, beside) and is_counted and guided.num_calls == report.num_calls):
            wrong.append((family, far, near, beside, is_counted))
    assert wrong == []


def test_what_a_request_says_of_it(tiny_folder_of: FolderOf, tmp_path: Path) -> None:
    rules = inspect_pipeline(RuntimeConfig(str(tiny_folder_of("flux1")), device="cpu")).rules
    plain = GenerationRequest("a red circle", height=64, width=64, num_inference_steps=2, seed=3)

    def asked(**values: Any) -> GenerationRequest:
        return rules.resolve(dataclasses.replace(plain, **values))

    found = asked(negative_prompt=NEGATIVE, nag_scale=5.0)
    assert (found.nag_tau, found.nag_alpha) == (2.5, 0.25)
    assert rules.settings(found).guidance.reads_negative
    assert not rules.is_guided(found)
    assert rules.unused(found) == ()
    # Both branches in one pass would be a batch of three texts.
    assert asked(negative_prompt=NEGATIVE, nag_scale=5.0, true_cfg_scale=2.0).guidance_mode == "two_pass"
    off = asked(negative_prompt=NEGATIVE, nag_scale=1.0, nag_tau=3.0)
    assert [each.partition(":")[0] for each in rules.unused(off)] == ["negative_prompt", "nag_tau"]
    assert "--nag-scale 5 would use it" in rules.unused(off)[0]
    for values, told in (
        ({"nag_scale": 5.0}, "nag_scale: guides away from the negative prompt, and the request has none"),
        ({"nag_scale": 0.5}, "nag_scale: expected"),
        ({"nag_alpha": 1.5}, "nag_alpha: expected"),
    ):
        with pytest.raises(RequestError, match=told):
            asked(**values)
    by_role = asked(negative_prompt=NEGATIVE, nag_scale="self=5,default=2", nag_tau={"self": 3.0})
    assert (by_role.nag_scale, by_role.nag_tau) == ((("self", 5.0), ("default", 2.0)), (("self", 3.0),))
    assert GenerationRequest(**by_role.to_dict()) == by_role
    assert not rules.settings(asked(nag_scale=(("self", 1.0),))).guidance.reads_negative
    for value, told in (
        ("slef=5", "no attention role 'slef'. Did you mean"),
        ("self=0.5", "nag_scale: self: expected a number from 1"),
        ("self=5,self=3", "expected each role once, got 'self' more than once"),
        ("self", "nag_scale: expected a number"),
        ([["self"]], "or numbers by attention role such as cross=5"),
    ):
        with pytest.raises(RequestError, match=told):
            asked(negative_prompt=NEGATIVE, nag_scale=value)
    video = tmp_path / "video.npy"
    numpy.save(video, numpy.zeros((5, 64, 64, 3), numpy.uint8))
    restoring = inspect_pipeline(RuntimeConfig(str(tiny_folder_of("seedvr2")), device="cpu")).rules
    with pytest.raises(RequestError, match="nag_scale: this model reads no prompt"):
        restoring.resolve(dataclasses.replace(plain, nag_scale=5.0, video_path=str(video)))


def test_a_role_that_attends_to_no_prompt_is_refused_before_the_weights_load(tiny_folder_of: FolderOf) -> None:
    """One of scale 1 is not, nor one by its category."""
    for family, roles, refused in (
        ("wan", "cross, default", "cross=5,self=3"),
        ("hunyuan_video", "self, default", "cross=3"),
        ("ltx2", "cross, ltx2.audio_cross, default", "ltx2.audio_to_video=3"),
    ):
        rules = inspect_pipeline(RuntimeConfig(str(tiny_folder_of(family)), device="cpu")).rules
        asked = GenerationRequest("a red circle", negative_prompt=NEGATIVE, **SIZES[family])
        first = roles.partition(",")[0]
        message = rf"nag_scale: \S+ attends to no prompt in this model; expected {roles} \(--nag-scale {first}=5\)"
        with pytest.raises(RequestError, match=message):
            rules.resolve(dataclasses.replace(asked, nag_scale=refused))
        for taken in (f"{first}=3", f"{first}=3,{'self' if first == 'cross' else 'cross'}=1", "default=5"):
            rules.resolve(dataclasses.replace(asked, nag_scale=taken))


def test_it_goes_with_guidance_by_a_second_branch(tiny_folder_of: FolderOf) -> None:
    """The conditional velocity is the guided one; with a step cache that reuses nothing, and in what is planned."""
    pipeline = loaded(tiny_folder_of("flux1"))
    found: list[torch.Tensor] = []
    pipeline.hooks = dataclasses.replace(pipeline.hooks, on_latents=found.append)
    both = dataclasses.replace(
        request_of(pipeline), num_inference_steps=1, negative_prompt=NEGATIVE, true_cfg_scale=3.0, nag_scale=5.0
    )
    reports = [
        pipeline(dataclasses.replace(both, **values)).attention_report
        for values in (
            {},
            {"true_cfg_scale": 1.0},
            {"nag_scale": None},
            {"true_cfg_scale": 1.0, "nag_scale": None},
            {"step_cache": "easycache:threshold=0,force=true"},
        )
    ]
    together, within, beside, plain, cached = found
    # One step is linear in the velocity: 3 * (cond - uncond) + uncond.
    uncond = (3.0 * plain - beside) / 2.0
    assert torch.allclose(together, 3.0 * within - 2.0 * uncond, atol=1e-4)
    assert torch.equal(cached, together)
    assert [[(row.is_guided, row.count) for row in report.rows] for report in reports[:3]] == [
        [(True, 4), (False, 4)],
        [(True, 4)],
        [(False, 4)],
    ]


def test_graphs_of_guided_passes_are_of_their_scale(tiny_folder_of: FolderOf) -> None:
    """Replayed passes equal eager ones, also after requests without guidance and with another scale."""
    pipeline = loaded(tiny_folder_of("flux1"))
    found: list[torch.Tensor] = []
    pipeline.hooks = dataclasses.replace(pipeline.hooks, on_latents=found.append)
    plain = dataclasses.replace(request_of(pipeline), num_inference_steps=5, negative_prompt=NEGATIVE)
    requests = [plain, *(dataclasses.replace(plain, nag_scale=scale) for scale in (5.0, 9.0))]
    eager = [pipeline(request).attention_report for request in requests]
    pipeline.parts = dataclasses.replace(pipeline.parts, graphs=ForwardGraphs(RecordedCapture()))
    replayed = [pipeline(request).attention_report for request in requests]
    assert all(map(torch.equal, found[:3], found[3:]))
    assert [report.graphs is not None and report.graphs.num_replayed for report in replayed] == [2, 2, 2]
    assert [report.rows for report in replayed] == [report.rows for report in eager]
