"""Drafts that are finished: to the bit what one whole run makes, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from saved_runs import assert_same, finished, saving
from tables import table

from diffusion_runtime import ConfigError, GenerationRequest, Pipeline, RequestError, load_pipeline
from diffusion_runtime.errors import DiffusionRuntimeError, OutputError
from diffusion_runtime.generation.saved_latents import SavedLatents, read_head, read_latents, write_latents
from diffusion_runtime.session.finishing import continued_request
from diffusion_runtime.weights.tensor_files import read_tensors, tensor_bytes

HALVED = "dct:A=3,beta=2.42,delta=0.1"


@pytest.fixture(scope="module")
def pipeline(tiny_wan_folder: Path) -> Pipeline:
    return load_pipeline(str(tiny_wan_folder), device="cpu")


def request(**values: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4, "seed": 1}
    return GenerationRequest("a red circle moving left", **(fields | {"guidance_scale": 4.0} | values))


@table(
    ("values", "stops"),
    [
        ({}, (1, 3, None)),
        ({"sampler": "er_sde", "guidance_mode": "two_pass"}, (3,)),
        ({"sampler": "dpmpp_sde", "guidance_scale": 1.0}, (2,)),
        ({"progressive_resolution": HALVED, "num_inference_steps": 8, "height": 64, "width": 64}, (1, 4, 7)),
        ({"step_cache": "easycache:force=true"}, (None,)),
    ],
)
def test_a_finished_draft_equals_a_whole_run(
    pipeline: Pipeline, tmp_path: Path, values: dict[str, Any], stops: tuple[int | None, ...]
) -> None:
    whole = pipeline(request(**values))
    for stop in stops:
        assert_same(finished(pipeline, request(**values), stop, tmp_path), whole)


def test_a_preview_shows_what_the_model_takes_for_the_data(pipeline: Pipeline, tmp_path: Path) -> None:
    whole, plain = pipeline(request()), pipeline(request(num_inference_steps=1, flow_shift=1.0))
    draft, (file,) = saving(pipeline, request(stop_after_step=3), tmp_path)
    assert "stop_after_step: 3 of 4 steps were made: a preview" in draft.attention_report.notes
    assert draft.recipe["request"]["stop_after_step"] == 3
    distances = [numpy.abs(each.frames.astype(float) - whole.frames).mean() for each in (draft, plain)]
    assert distances[0] < distances[1]
    recipe, progress = read_head(file)
    assert recipe["request"] == draft.recipe["request"]
    assert (progress["done"], progress["of"]) == (3, 4)


def test_nothing_changes_where_latents_are_kept(pipeline: Pipeline, tmp_path: Path) -> None:
    media, files = saving(pipeline, request(), tmp_path)
    assert_same(media, pipeline(request()))
    assert [file.name for file in files] == ["clip.latents.safetensors"]
    assert files[0].stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    import os

    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_batch_is_left_request_by_request(pipeline: Pipeline, tmp_path: Path) -> None:
    requests = [request(sampler="euler_ancestral", seed=seed) for seed in (1, 2)]
    kept: dict[int, SavedLatents] = {}
    with pipeline.hooks.holding("keep", kept.__setitem__):
        pipeline.generate([dataclasses.replace(each, stop_after_step=2) for each in requests])
    for index, each in enumerate(requests):
        file = write_latents(kept[index], tmp_path / "clip.mp4")
        assert_same(pipeline.finish(read_latents(file)), pipeline(each))
    assert file.name == "clip-2.latents.safetensors"


def test_more_steps_are_those_of_a_whole_run_with_these_noise_levels(pipeline: Pipeline, tmp_path: Path) -> None:
    asked = request(sampler="res_multistep", num_inference_steps=4)
    _, (file,) = saving(pipeline, dataclasses.replace(asked, stop_after_step=2), tmp_path)
    saved = read_latents(file)
    wanted = continued_request(saved, dataclasses.replace(asked, num_inference_steps=9), pipeline.rules)
    assert wanted.sigmas is not None
    assert wanted.sigmas[:3] == saved.levels
    assert len(wanted.sigmas) > 4
    found, whole = pipeline.finish(saved, wanted), pipeline(wanted)
    assert numpy.array_equal(found.frames, whole.frames)
    assert found.recipe["continued"] == {"after": 2, "made_with": {"request.num_inference_steps": 4}}
    _, (file,) = saving(pipeline, request(stop_after_step=2), tmp_path)
    with pytest.raises(RequestError, match="num_inference_steps: unipc spaces its own noise levels"):
        continued_request(read_latents(file), request(num_inference_steps=9), pipeline.rules)


def test_other_values_are_refused_unless_said(
    pipeline: Pipeline, tiny_wan_copy: Callable[[], Path], tmp_path: Path
) -> None:
    _, (file,) = saving(pipeline, request(stop_after_step=2), tmp_path)
    saved = read_latents(file)
    with pytest.raises(ConfigError, match=r"request.guidance_scale: 4.0 before, 2.0 now. .*--allow-changes"):
        pipeline.finish(saved, request(guidance_scale=2.0))
    media = pipeline.finish(saved, request(guidance_scale=2.0), allow_changes=True)
    assert media.recipe["continued"] == {"after": 2, "made_with": {"request.guidance_scale": 4.0}}
    folder = tiny_wan_copy()
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors, metadata = read_tensors(weights, "")
    weights.write_bytes(tensor_bytes({name: each + 0.25 for name, each in tensors.items()}, metadata))
    other = load_pipeline(str(folder), device="cpu")
    with pytest.raises(ConfigError, match=r"weights\.model_path: "):
        other.finish(saved)


@table(
    ("values", "told"),
    [
        ({"stop_after_step": 4}, "stop_after_step: expected 1 to 3, got 4"),
        (
            {"stop_after_step": 1, "step_cache": "easycache:force=true"},
            "step_cache: easycache keeps what earlier steps computed",
        ),
        ({"stop_after_step": 1, "cfg_gate": 0.5}, "cfg_gate: it keeps a difference"),
    ],
)
def test_what_is_not_saved_is_not_interrupted(pipeline: Pipeline, values: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        pipeline.resolve(request(**values))


def test_attention_that_goes_on_from_the_step_before_is_refused(tiny_wan_folder: Path) -> None:
    sparse = load_pipeline(str(tiny_wan_folder), device="cpu", attention="sparse_video_gen_2_attn")
    with pytest.raises(RequestError, match="sparse_video_gen_2_attn of self cannot be interrupted"):
        sparse.resolve(request(stop_after_step=3))


def _damaged(file: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]) -> Path:
    tensors, metadata = read_tensors(file, "")
    head = json.loads(metadata["diffusion_runtime"])
    change(tensors, head)
    other = file.with_name("damaged.latents.safetensors")
    other.write_bytes(tensor_bytes(tensors, {"diffusion_runtime": json.dumps(head)}))
    return other


def test_a_file_of_a_stranger_is_held_against_the_plan(pipeline: Pipeline, tmp_path: Path) -> None:
    _, (file,) = saving(pipeline, request(sampler="euler_ancestral", stop_after_step=2), tmp_path)
    latents = read_tensors(file, "")[0]["latents"]

    def progress(**values: Any) -> Callable[..., object]:
        return lambda _, head: head["progress"].update(values)

    cases: list[tuple[Callable[[dict[str, torch.Tensor], dict[str, Any]], object], type[DiffusionRuntimeError]]] = [
        (lambda tensors, _: tensors.update(latents=latents[..., :1].clone()), RequestError),
        (lambda tensors, _: tensors.update(latents=latents.to(torch.int64)), RequestError),
        (lambda tensors, _: tensors.update({"history.data": latents.clone()}), RequestError),
        (lambda tensors, _: tensors.update(other=latents.clone()), OutputError),
        (lambda tensors, _: tensors.pop("latents") is None or tensors.update({"history.a": latents}), OutputError),
        (progress(step=3), RequestError),
        (progress(step=10**9), RequestError),
        (progress(step=-1), OutputError),
        (progress(step="2"), OutputError),
        (progress(stage=1), RequestError),
        (progress(levels=[1.0, 0.9]), RequestError),
        (progress(levels="all"), OutputError),
        (progress(drawn=[[4, 2, 10**6, 10**6]]), RequestError),
        (progress(drawn=[[16, 2, 4, 4]] * 10_000), RequestError),
        (progress(drawn=7), OutputError),
        (lambda _, head: head.update(schema="other"), OutputError),
        (lambda _, head: head.update(recipe=[]), OutputError),
        (lambda _, head: head["recipe"].update(request=3), OutputError),
        (lambda _, head: head["recipe"]["request"].update(height="x"), OutputError),
    ]
    for change, kind in cases:
        damaged = _damaged(file, change)
        with pytest.raises(kind):
            pipeline.finish(read_latents(damaged))
    cut = file.with_name("cut.latents.safetensors")
    cut.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(OutputError, match="damaged"):
        read_latents(cut)
    with pytest.raises(RequestError, match="stop_after_step: expected more than the 2 steps that are done, got 1"):
        pipeline.finish(read_latents(file), request(sampler="euler_ancestral", stop_after_step=1))
