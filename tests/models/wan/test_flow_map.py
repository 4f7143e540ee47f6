"""AnyFlow: our transformer and whole generation against diffusers' AnyFlowTransformer3DModel and AnyFlowPipeline on the
same weights, float32 on the CPU."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from denoiser_inputs import text_inputs
from diffusers import (
    AnyFlowFARTransformer3DModel,
    AnyFlowPipeline,
    AnyFlowTransformer3DModel,
    FlowMapEulerDiscreteScheduler,
)
from family_parity import assert_equal_runs, load_theirs, load_transformer, record_latents, relative
from tables import table
from tiny_models import TINY_SIZES, write_tiny_wan

from diffusion_runtime import GenerationRequest, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext, StepInfo
from diffusion_runtime.errors import ModelLoadError, RequestError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.loading import prepare
from diffusion_runtime.models.wan.family import FAMILY

AUTHORS = {"init_far_model": False, "init_flowmap_model": True, "chunk_partition": None, "full_chunk_limit": 3}


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def write_tiny_flow_map(folder: Path, **config: Any) -> Path:
    """A tiny Wan folder whose transformer is a flow map. config: further keys of it."""
    write_tiny_wan(folder)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AnyFlowTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=16,
            text_dim=32,
            freq_dim=32,
            ffn_dim=96,
            num_layers=2,
            rope_max_seq_len=64,
            **config,
        )
        for name, parameter in model.named_parameters():
            # Norm weights of exactly one, small cross-attentions and small embeddings of r would hide what is left out.
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if ".attn2.to_out" in name or name.startswith("proj_out") or "delta_embedder" in name:
                parameter.mul_(3.0)
    for old in (folder / "transformer").iterdir():
        old.unlink()
    model.save_pretrained(folder / "transformer")
    FlowMapEulerDiscreteScheduler(shift=5.0).save_pretrained(folder / "scheduler")
    change_json(
        folder / "model_index.json",
        _class_name="AnyFlowPipeline",
        transformer=["diffusers", "AnyFlowTransformer3DModel"],
        scheduler=["diffusers", "FlowMapEulerDiscreteScheduler"],
    )
    index = json.loads((folder / "model_index.json").read_text())
    kept = {key: value for key, value in index.items() if key not in ("transformer_2", "boundary_ratio")}
    (folder / "model_index.json").write_text(json.dumps({k: v for k, v in kept.items() if k != "expand_timesteps"}))
    return folder


def with_authors_names(folder: Path, **config: Any) -> Path:
    """The same folder as the authors' own code writes it. config: of the transformer."""
    change_json(folder / "transformer" / "config.json", _class_name="FAR_Wan_Transformer3DModel", **AUTHORS | config)
    change_json(folder / "scheduler" / "scheduler_config.json", _class_name="FlowMapDiscreteScheduler")
    change_json(folder / "scheduler" / "scheduler_config.json", weight_type="beta08")
    change_json(
        folder / "model_index.json",
        _class_name="WanAnyFlowPipeline",
        transformer=["far.models.transformer_far_wan_model", "FAR_Wan_Transformer3DModel"],
        scheduler=["far.schedulers.scheduling_flowmap_euler_discrete", "FlowMapDiscreteScheduler"],
    )
    return folder


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
    "causal": (
        lambda folder: with_authors_names(folder, init_far_model=True),
        "'init_far_model': expected false: causal .* `--backend diffusers` runs them, got True",
    ),
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
        "key 'use_karras_sigmas': True cannot be used: key 'use_karras_sigmas' is unknown to",
    ),
}


@table("name", REFUSALS)
def test_damaged_folders(tmp_path: Path, name: str) -> None:
    folder = write_tiny_flow_map(tmp_path / "tiny")
    change, message = REFUSALS[name]
    change(folder)
    with pytest.raises(ModelLoadError, match=message):
        prepare(RuntimeConfig(str(folder), device="cpu"), is_dry_run=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_causal_folder_runs_through_diffusers(tmp_path: Path) -> None:
    folder = write_tiny_flow_map(tmp_path / "far")
    for old in (folder / "transformer").iterdir():
        old.unlink()
    AnyFlowFARTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=32,
        text_dim=32,
        freq_dim=32,
        ffn_dim=96,
        num_layers=2,
        rope_max_seq_len=64,
        chunk_partition=(1, 1),
    ).save_pretrained(folder / "transformer")
    kept = ["diffusers", "AnyFlowFARTransformer3DModel"]
    change_json(folder / "model_index.json", _class_name="AnyFlowFARPipeline", transformer=kept)
    with pytest.raises(
        ModelLoadError, match=r"AnyFlowFARTransformer3DModel, .* With --backend diffusers, diffusers' own"
    ):
        prepare(RuntimeConfig(str(folder), device="cpu", backend="native"), is_dry_run=True)
    media = load_pipeline(str(folder), device="cpu")(request(num_inference_steps=1))
    assert media.frames.shape == (5, 32, 32, 3)
    assert media.frames.std() > 5
