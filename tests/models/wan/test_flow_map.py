"""AnyFlow: our transformer and whole generation against diffusers' AnyFlowTransformer3DModel and AnyFlowPipeline on the
same weights, float32 on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from denoiser_inputs import text_inputs
from diffusers import (
    AnyFlowPipeline,
    AnyFlowTransformer3DModel,
)
from family_parity import assert_equal_runs, load_theirs, load_transformer, record_latents, relative
from tables import table
from tiny_flow_maps import change_json, with_authors_names, write_tiny_flow_map
from tiny_models import TINY_SIZES

from diffusion_runtime import GenerationRequest, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext, StepInfo
from diffusion_runtime.errors import ModelLoadError, RequestError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.loading import prepare
from diffusion_runtime.models.wan.family import FAMILY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_flow_map(tmp_path_factory.mktemp("anyflow") / "tiny")


def request(**values: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"prompt": "a red circle moving left", "negative_prompt": "a yellow square", "seed": 5}
    return GenerationRequest(**(fields | TINY_SIZES | values))


@table("config", [{}, {"deltatime_type": "t-r", "gate_value": 0.6}], ids=["r", "t - r"])
def test_forward_equals_diffusers(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_tiny_flow_map(tmp_path / "tiny", **config)
    ours, theirs = load_transformer(FAMILY, folder), AnyFlowTransformer3DModel.from_pretrained(folder / "transformer")
    generator = torch.Generator().manual_seed(1)
    outputs = []
    for shape, batch in (((1, 2, 2), 1), ((3, 10, 14), 2)):
        latents = torch.randn(batch, 16, *shape, generator=generator)
        text, timestep = torch.randn(batch, 7, 32, generator=generator), torch.linspace(937.3, 12.0, batch + 1)[:batch]
        for target in (0.0, 312.5):
            context = AttentionContext(step=StepInfo(timestep=None, next_timestep=target))
            out = ours(latents, timestep, text_inputs(text), context)
            of_frames = [each[:, None].repeat(1, shape[0]) for each in (timestep, torch.full_like(timestep, target))]
            with torch.no_grad():
                expected = theirs(latents.transpose(1, 2), *of_frames, text, return_dict=False)[0].transpose(1, 2)
            assert relative(out, expected) < 1e-5
            outputs.append(out)
    # The target is an input that matters.
    assert relative(outputs[2], outputs[3]) > 1e-2


@table("values", [{"num_inference_steps": 1}, {"num_inference_steps": 3, "guidance_scale": 4.0}], ids=["1", "guided"])
def test_generation_equals_diffusers(folder: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]) -> None:
    kept = record_latents(monkeypatch)
    ours, theirs = load_pipeline(str(folder), device="cpu"), load_theirs(AnyFlowPipeline, folder)
    assert ours.defaults["sampler"] == "flow_map_euler"
    assert (ours.defaults["flow_shift"], ours.defaults["num_inference_steps"]) == (5.0, 4)
    run = functools.partial(run_theirs, theirs, max_tokens=ours.text_encoder.max_tokens)
    assert_equal_runs(ours, [request(**values)], kept, run)


def run_theirs(
    theirs: AnyFlowPipeline, requests: list[GenerationRequest], noise: torch.Tensor, max_tokens: int
) -> tuple[list[torch.Tensor], numpy.ndarray]:
    latents: list[torch.Tensor] = []

    def keep(pipeline: object, step: int, timestep: object, tensors: dict[str, Any]) -> dict[str, Any]:
        latents.append(tensors["latents"].transpose(1, 2).clone())
        return {}

    first = requests[0]
    frames = theirs(
        prompt=[request.prompt for request in requests],
        negative_prompt=[request.negative_prompt for request in requests],
        height=first.height,
        width=first.width,
        num_frames=first.num_frames,
        num_inference_steps=first.num_inference_steps,
        guidance_scale=first.guidance_scale,
        latents=noise.clone(),
        max_sequence_length=max_tokens,
        callback_on_step_end=keep,
        output_type="np",
    ).frames
    return latents, frames


def test_the_authors_names_make_the_same_video(folder: Path, tmp_path: Path) -> None:
    other = with_authors_names(write_tiny_flow_map(tmp_path / "authors"))
    frames = [load_pipeline(str(path), device="cpu")(request()).frames for path in (folder, other)]
    assert numpy.array_equal(*frames)


def test_explained_and_captured(folder: Path) -> None:
    prepared = prepare(RuntimeConfig(str(folder), device="cpu"), is_dry_run=True)
    rules = prepared.rules
    explanation = explain(prepared, rules.resolve(request(), None))
    assert explanation.schedule
    transformer = load_transformer(FAMILY, folder)
    assert "flow map" in (transformer.replay_refusal() or "")


@table("sampler", ["unipc", "dmd", "rcm"])
def test_samplers_that_need_the_velocity_at_t_are_refused(folder: Path, sampler: str) -> None:
    rules = prepare(RuntimeConfig(str(folder), device="cpu"), is_dry_run=True).rules
    with pytest.raises(RequestError, match=f"sampler: {sampler} does not integrate .* set flow_map_euler or"):
        rules.resolve(request(sampler=sampler), None)


REFUSALS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no flow map": (
        lambda folder: with_authors_names(folder, init_flowmap_model=False),
        "'init_flowmap_model': expected true",
    ),
    "share": (
        lambda folder: change_json(folder / "transformer" / "config.json", gate_value=1.5),
        "'gate_value': expected a number from 0 to 1, got 1.5",
    ),
    "target": (
        lambda folder: change_json(folder / "transformer" / "config.json", deltatime_type=["r"]),
        "'deltatime_type': expected 'r' or 't-r', got",
    ),
    "pipeline": (
        lambda folder: change_json(folder / "model_index.json", _class_name="WanPipeline"),
        "'_class_name': AnyFlowPipeline belongs to one AnyFlowTransformer3DModel",
    ),
    "two experts": (
        lambda folder: change_json(folder / "model_index.json", expand_timesteps=True),
        "'_class_name': AnyFlowPipeline belongs .* expand_timesteps True",
    ),
    "scheduler": (
        lambda folder: change_json(folder / "scheduler" / "scheduler_config.json", use_karras_sigmas=True),
        "key 'use_karras_sigmas': True is not supported by the sampler flow_map_euler",
    ),
}


@table("name", REFUSALS)
def test_damaged_folders(tmp_path: Path, name: str) -> None:
    folder = write_tiny_flow_map(tmp_path / "tiny")
    change, message = REFUSALS[name]
    change(folder)
    with pytest.raises(ModelLoadError, match=message):
        prepare(RuntimeConfig(str(folder), device="cpu"), is_dry_run=True)
