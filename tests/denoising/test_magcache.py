"""MagCache: decisions by its formula, calibrations measured on the model, and files that are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tables import table
from tiny_models import TINY_SIZES

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.core.block_stack import Streams, overwriting
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.step_cache.calibration import Calibration
from diffusion_runtime.denoising.step_cache.magcache import MagCache
from diffusion_runtime.denoising.step_cache.measurement import StackMeasurement, mean_ratios
from diffusion_runtime.errors import RequestError
from diffusion_runtime.profiling.calibration import calibrate
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.step_cache_options import MagCacheOptions

NUM_STEPS = 12
RATIOS = (1.0, 0.9, 0.95, 1.0, 0.98, 1.02, 0.99, 0.97, 0.99, 0.99, 0.99, 0.9)


def calibration(**changes: Any) -> Calibration:
    known = Calibration({"family": "wan", "config_sha256": "0"}, NUM_STEPS, {"cond": RATIOS}, ("a",), {}, {})
    return dataclasses.replace(known, **changes)


def add(amount: float) -> Any:
    def overwrite(x: torch.Tensor) -> None:
        x += amount

    return overwriting(overwrite)


def add_to_text(amount: float) -> Any:
    """Adds to the tokens behind a grid of 4, which the ratios leave out."""

    def overwrite(x: torch.Tensor) -> None:
        x[:, 4:] += amount

    return overwriting(overwrite)


def expected_steps(threshold: float, most: int, retention: int) -> list[int]:
    """The steps that the formula computes."""
    computed, scale, error, count = [], 1.0, 0.0, 0
    for index, ratio in enumerate(RATIOS):
        if index >= retention:
            scale, count = scale * ratio, count + 1
            error += abs(1 - scale)
            if error < threshold and count <= most:
                continue
        scale, error, count = 1.0, 0.0, 0
        computed.append(index)
    return computed


@table(("threshold", "most"), [(0.06, 3), (0.06, 1), (0.2, 10), (0.0, 3), (0.06, 0)])
def test_magcache_is_its_formula(threshold: float, most: int) -> None:
    recorder = AttentionRecorder()
    options = MagCacheOptions(file="x", threshold=threshold, K=most, retention=0.25)
    cache = MagCache(options, calibration(), NUM_STEPS, recorder)
    computed = expected_steps(threshold, most, 3)
    last = 0
    for index in range(NUM_STEPS):
        last = index if index in computed else last
        streams: Streams = (torch.full((1, 4, 2), float(index)),)
        blocks = [add(1.0), add(10.0 * index)]
        (made,) = cache.run(blocks, streams, StepInfo(index, NUM_STEPS), 4)
        # The residual of the last computed step.
        assert made.unique().tolist() == [index + 1 + 10.0 * last]
    [row] = recorder.report().steps
    assert (row.num_computed, row.num_reused) == (len(computed), NUM_STEPS - len(computed))


def test_another_expert_and_an_unknown_branch_are_computed() -> None:
    recorder = AttentionRecorder()
    cache = MagCache(MagCacheOptions(file="x", threshold=10, K=99, retention=0), calibration(), NUM_STEPS, recorder)
    for index in range(NUM_STEPS):
        for branch in ("cond", "uncond"):
            step = StepInfo(index, NUM_STEPS, branch=branch, expert=int(index > 6))
            cache.run([add(1.0)], (torch.zeros(1, 4, 2),), step, 4)
    rows = {(row.branch, row.expert): row.computed for row in recorder.report().steps}
    assert rows == {("cond", 0): "0", ("cond", 1): "7", ("uncond", 0): "0-6", ("uncond", 1): "7-11"}


@table("num_steps", [1, 2, 5, 12, 20, 50])
def test_other_numbers_of_steps_take_the_nearest_ratios(num_steps: int) -> None:
    """As nearest_interp of MagCache's repository does."""
    places = numpy.round(numpy.arange(num_steps) * (NUM_STEPS - 1) / max(1, num_steps - 1)).astype(int)
    of_both = calibration(ratios={"cond": RATIOS, "uncond": RATIOS[::-1]}).ratios_for(num_steps)
    assert of_both["cond"] == tuple(RATIOS[place] for place in places)
    assert of_both["uncond"] == tuple(RATIOS[::-1][place] for place in places)


def test_what_the_calibration_was_not_made_for_is_said() -> None:
    measured = calibration(request={"sampler": "unipc", "height": 480, "seed": 3, "sigmas": None})
    asked = {"num_inference_steps": NUM_STEPS, "sampler": "unipc", "height": 480, "seed": 4, "sigmas": None}
    assert measured.remarks(asked, ("cond",), "magcache", {}) == []
    others = asked | {"num_inference_steps": 20, "height": 720}
    remarks = measured.remarks(others, ("cond", "uncond"), "magcache", {"quantization": "fp8"})
    assert remarks == [
        "step_cache: magcache: calibrated with quantization 'none', run with 'fp8': the changes from step to step may "
        "differ",
        "step_cache: magcache: calibrated with 12 steps, run with 20: each step takes what the nearest one measured",
        "step_cache: magcache: calibrated with height 480 (here 720)",
        "step_cache: magcache: the calibration has no steps of uncond, which are all computed; calibrate with guidance",
    ]


def test_ratios_are_those_of_the_residuals() -> None:
    measured = StackMeasurement()
    # The last step is another expert's: a ratio of two models would say nothing.
    for index, (size, expert) in enumerate(((4.0, 0), (2.0, 0), (3.0, 0), (6.0, 1))):
        blocks = [add(size / 2), add_to_text(10.0 * index), add(size / 2)]
        measured.run(blocks, (torch.ones(1, 6, 2),), StepInfo(index, 4, expert=expert), 4)
    assert measured.ratios == {"cond": pytest.approx({0: 1.0, 1: 0.5, 2: 1.5, 3: 1.0})}


def test_ratios_are_means_over_the_prompts() -> None:
    of_first, of_second = StackMeasurement(), StackMeasurement()
    of_first.ratios = {"cond": {0: 1.0, 1: 0.5, 2: 0.25}, "uncond": {0: 1.0, 1: 0.75}}
    of_second.ratios = {"cond": {0: 1.0, 1: 1.5, 2: 0.75}, "uncond": {0: 1.0, 1: 0.25, 2: 0.5}}
    # A branch that did not run a step counts with 1.
    expected = {"cond": (1.0, 1.0, 0.5), "uncond": (1.0, 0.5, 0.75)}
    assert mean_ratios([of_first, of_second], 3) == expected


# --- files ------------------------------------------------------------------------------------------------------------


@table(
    ("changes", "message"),
    [
        ({"schema": "another"}, "expected a file that `diffusion-runtime calibrate` wrote"),
        ({"num_steps": "12"}, "its model, num_steps or ratios are missing"),
        ({"ratios": {}}, "its model, num_steps or ratios are missing"),
        ({"ratios": {"cond": [1.0]}}, "'ratios.cond': expected 12 numbers above 0"),
        ({"ratios": {"cond": [*RATIOS[:-1], "1"]}}, "'ratios.cond': expected 12 numbers above 0"),
        ({"ratios": {"cond": [*RATIOS[:-1], -1.0]}}, "'ratios.cond': expected 12 numbers above 0"),
        ({"ratios": {"\x1b[31m\n": []}}, r"'ratios.\\x1b\[31m\\n': expected 12 numbers above 0"),
        ({"spectrum": [1.0, 2.0]}, r"'spectrum': expected the numbers A and beta, got \[1.0, 2.0\]"),
        ({"spectrum": {"A": 1.0}}, "'spectrum': expected the numbers A and beta, got {'A': 1.0}"),
    ],
)
def test_files_that_are_no_calibration_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(calibration().to_dict() | changes))
    with pytest.raises(RequestError, match=message):
        Calibration.read(path, "magcache")


def test_a_file_that_is_missing_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"magcache.file"):
        Calibration.read(tmp_path / "no.json", "magcache")
    (tmp_path / "no.json").write_text("{")
    with pytest.raises(RequestError, match="is not valid JSON"):
        Calibration.read(tmp_path / "no.json", "magcache")
    with pytest.raises(RequestError, match="magcache:file=FILE; `diffusion-runtime calibrate`"):
        GenerationRequest("a", step_cache="magcache")


# --- a model ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipeline(tiny_wan_folder: Path) -> Pipeline:
    found = load_pipeline(str(tiny_wan_folder), device="cpu")
    assert isinstance(found, Pipeline)
    return found


def test_calibrate_generate_and_refuse(pipeline: Pipeline, tmp_path: Path) -> None:
    request = GenerationRequest("a red circle", **TINY_SIZES, num_inference_steps=NUM_STEPS, guidance_scale=4.0)
    found = calibrate(pipeline, [request, dataclasses.replace(request, prompt="a blue star", seed=1)])
    assert {branch: len(ratios) for branch, ratios in found.ratios.items()} == {"cond": NUM_STEPS, "uncond": NUM_STEPS}
    assert found.prompts == ("a red circle", "a blue star")
    path = tmp_path / "it's, a file.json"
    # The tiny latents are too small for a spectrum of their own.
    found = dataclasses.replace(found, spectrum={"A": 15.96, "beta": 2.022})
    path.write_text(json.dumps(found.to_dict()))
    assert Calibration.read(path, "magcache") == found
    quoted = json.dumps(str(path))

    def cached(options: str, **changes: Any) -> Any:
        values = {"step_cache": f"magcache:file={quoted},{options}", **changes}
        return pipeline(dataclasses.replace(request, **values))

    plain = pipeline(dataclasses.replace(request, guidance_mode="two_pass"))
    assert numpy.array_equal(cached("threshold=0").frames, plain.frames)
    media = cached("threshold=10,K=2")
    assert {row.reused_by for row in media.attention_report.steps} == {("magcache",)}
    assert {row.computed for row in media.attention_report.steps} == {"0-2,5,8,11"}
    longer = cached("threshold=10,K=2", num_inference_steps=20).attention_report
    assert any(
        f"calibrated with {NUM_STEPS} steps, run with 20: each step takes what the" in note for note in longer.notes
    )
    assert {row.computed for row in longer.steps} == {"0-3,6,9,12,15,18"}
    other = dataclasses.replace(found, model={**found.model, "config_sha256": "0" * 64})
    path.write_text(json.dumps(other.to_dict()))
    with pytest.raises(RequestError, match="for another model: config_sha256: expected"):
        cached("K=2")
