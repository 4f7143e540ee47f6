"""TeaCache: its formula in float64, its published coefficients and the models they are for, and calibrations."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from published_configs import PUBLISHED
from tables import table
from tiny_models import TINY_SIZES

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.core.block_stack import ModulatedInput, RunBlock, Streams, overwriting
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.step_cache.calibration import Calibration
from diffusion_runtime.denoising.step_cache.measurement import StackMeasurement, fit_polynomials
from diffusion_runtime.denoising.step_cache.teacache import TeaCache, polynomial_of
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.sampling_presets import FewSteps, presets_of
from diffusion_runtime.models.teacache import published_polynomials, read_polynomials
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.profiling.calibration import calibrate
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.step_cache_options import (
    StepCacheSettings,
    TeaCacheOptions,
    TeaCachePolynomial,
    TeaCachePolynomials,
)
from diffusion_runtime.rules.presets import PresetRules
from diffusion_runtime.rules.request_rules import RequestRules

NUM_STEPS, NUM_TOKENS, DIM = 20, 6, 8
# Of a model whose output changes 1.5 times as much as what is compared, about; one is negative where little changes.
COEFFICIENTS = {"straight": (0.0, 0.0, 0.0, 1.5, 0.0), "bent": (300.0, -80.0, 9.0, 1.2, -0.004)}


def blocks() -> list[RunBlock]:
    def block(index: int) -> RunBlock:
        def overwrite(*streams: torch.Tensor) -> None:
            for stream in streams:
                stream += 0.2 * torch.sin(stream * (1 + 0.3 * index) + index)

        return overwriting(overwrite)

    return [block(index) for index in range(4)]


def entering(index: int, dtype: torch.dtype) -> Streams:
    """Streams of a step, which change quickly at first and in the middle."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, NUM_TOKENS + 2, DIM, generator=generator, dtype=torch.float64)
    text = torch.randn(1, 4, DIM, generator=generator, dtype=torch.float64)
    time = math.exp(-0.4 * index) + 0.2 * math.tanh(index - 11)
    return (x * (1 + time)).to(dtype), (text + time).to(dtype)


def modulated(index: int, streams: Streams, branch: str = "cond") -> ModulatedInput:
    """Rows past the tokens, which padding fills, must not count."""
    shift = math.sin(0.2 * index) + (branch == "uncond") * 0.1 * index
    values = streams[0] * (2 + shift)
    values[:, NUM_TOKENS:] = 1e6 * index
    return ModulatedInput(values, (values[:, :1] + shift**2).repeat(1, 1, 3))


def formula(
    coefficients: tuple[float, ...], threshold: float, use_ret_steps: bool
) -> tuple[list[torch.Tensor], list[int]]:
    """TeaCache in float64: the whole output of every step, and the computed steps."""
    outputs, computed = [], []
    error, before, residual = 0.0, None, torch.zeros(())
    for index in range(NUM_STEPS):
        x = entering(index, torch.float64)
        signal = modulated(index, x)
        m = signal.projection if use_ret_steps else signal.values[:, :NUM_TOKENS]
        assert m is not None
        always = index < (5 if use_ret_steps else 1) or index == NUM_STEPS - 1
        if not always:
            assert before is not None
            change = float((m - before).abs().mean() / before.abs().mean())
            error += sum(c * change**power for c, power in zip(coefficients, (4, 3, 2, 1, 0), strict=True))
        before = m
        whole = torch.cat(x, dim=1)
        if not always and error < threshold:
            outputs.append(whole + residual)
            continue
        error = 0.0
        streams = tuple(stream.clone() for stream in x)
        for block in blocks():
            streams = block(streams)
        residual = torch.cat(streams, dim=1) - whole
        outputs.append(torch.cat(streams, dim=1))
        computed.append(index)
    return outputs, computed


def cache(
    recorder: AttentionRecorder, coefficients: tuple[float, ...] = COEFFICIENTS["straight"], **options: Any
) -> TeaCache:
    polynomial = TeaCachePolynomial(coefficients, 0.1)
    return TeaCache(TeaCacheOptions(**options), polynomial, RankGroup(), recorder)


@table("use_ret_steps", [False, True])
@table("shape", COEFFICIENTS)
@table("threshold", [0.1, 0.4, 0.8])
def test_teacache_is_its_formula(shape: str, threshold: float, use_ret_steps: bool) -> None:
    expected, computed = formula(COEFFICIENTS[shape], threshold, use_ret_steps)
    assert len(computed) < NUM_STEPS, "the case reuses nothing"
    recorder = AttentionRecorder()
    tested = cache(recorder, COEFFICIENTS[shape], threshold=threshold, use_ret_steps=use_ret_steps)
    for index in range(NUM_STEPS):
        streams = entering(index, torch.float32)
        signal = modulated(index, streams)
        step = StepInfo(index, NUM_STEPS, branch="cond")
        made = tested.run(blocks(), streams, step, NUM_TOKENS, lambda signal=signal: signal)  # type: ignore[misc]
        torch.testing.assert_close(torch.cat(made, dim=1).double(), expected[index], atol=1e-5, rtol=1e-5)
    [row] = recorder.report().steps
    assert (row.num_computed, row.num_reused) == (len(computed), NUM_STEPS - len(computed))
    assert row.reused_by == ("teacache",)


def test_the_cases_differ_in_what_they_compute() -> None:
    computed = {
        (shape, threshold, ret): tuple(formula(COEFFICIENTS[shape], threshold, ret)[1])
        for shape in COEFFICIENTS
        for threshold in (0.1, 0.4)
        for ret in (False, True)
    }
    assert len(set(computed.values())) >= len(computed) - 1, computed


def test_branches_and_experts_share_nothing_and_a_request_starts_anew() -> None:
    for _ in range(2):
        recorder = AttentionRecorder()
        tested = cache(recorder, threshold=10)
        for index in range(8):
            for branch in ("cond", "uncond"):
                streams = entering(index, torch.float32)
                signal = modulated(index, streams, branch)
                step = StepInfo(index, 8, branch=branch, expert=int(index > 4))
                tested.run(blocks(), streams, step, NUM_TOKENS, lambda signal=signal: signal)  # type: ignore[misc]
        rows = {(row.branch, row.expert): row.computed for row in recorder.report().steps}
        assert rows == {
            (branch, expert): "5,7" if expert else "0" for branch in ("cond", "uncond") for expert in (0, 1)
        }


def test_what_is_not_a_number_is_computed() -> None:
    recorder = AttentionRecorder()
    tested = cache(recorder, threshold=10)
    for index, value in enumerate((1.0, float("nan"), 1.0, 0.0, 1.0, 1.0, 1.0, 1.0)):
        signal = ModulatedInput(torch.full((1, NUM_TOKENS, DIM), value))
        streams = entering(index, torch.float32)
        tested.run(blocks(), streams, StepInfo(index, 8), NUM_TOKENS, lambda signal=signal: signal)  # type: ignore[misc]
    [row] = recorder.report().steps
    # A change from 1 to NaN, from NaN to 1, and from 0 to 1 has no size; one from 1 to 0 has.
    assert row.computed == "0-2,4,7"


# --- published coefficients -------------------------------------------------------------------------------------------

# By TeaCache's repository, the highest power first: plain, and with use_ret_steps; the smallest documented threshold.
TABLE: dict[str, tuple[tuple[float, ...], tuple[float, ...] | None, float | None]] = {
    "FLUX.1 [dev]": ((498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861), None, 0.25),
    "HunyuanVideo": ((733.226126, -401.131952, 67.5869174, -3.149878, 0.0961237896), None, 0.1),
    "Wan 2.1 T2V 1.3B": (
        (2396.76752, -1311.10545, 201.331979, -8.29855975, 0.137887774),
        (-52186.2437, 9230.41404, -528.275948, 13.6987616, -0.0499875664),
        0.05,
    ),
    "Wan 2.1 T2V 14B": (
        (-5784.54975374, 5449.50911966, -1811.16591783, 256.27178429, -13.02252404),
        (-303318.725, 49053.7029, -2655.30556, 58.7365115, -0.315583525),
        0.14,
    ),
    "Wan 2.1 I2V 14B 480P": (
        (-302.33167, 223.948934, -52.546397, 5.8734844, -0.201973289),
        (257151.496, -35422.9917, 1402.86849, -13.5890334, 0.132517977),
        None,
    ),
    "Wan 2.1 I2V 14B 720P": (
        (-114.36346466, 65.26524496, -18.82220707, 4.91518089, -0.23412683),
        (8107.0546, 2133.93892, -372.934672, 16.6203073, -0.0417769401),
        None,
    ),
}


def test_the_published_coefficients_are_those_of_their_source() -> None:
    found = {
        each.polynomials.models: (
            each.polynomials.plain.coefficients,
            None if each.polynomials.of_ret_steps is None else each.polynomials.of_ret_steps.coefficients,
            each.polynomials.plain.threshold,
        )
        for each in published_polynomials()
    }
    assert found == TABLE


def _folder(path: Path, files: dict[str, dict[str, Any]]) -> Path:
    for name, values in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps(values))
    return path


def _changed(name: str, **changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A published folder's files with other values in them. changes: by the folder of the file, `index` for its own."""
    names = {"index": "model_index.json", "transformer": "transformer/config.json"}
    names["scheduler"] = "scheduler/scheduler_config.json"
    files = dict(PUBLISHED[name])
    for place, values in changes.items():
        files[names[place]] = {**files[names[place]], **values}
    return files


_WAN = "Wan2.1-T2V-1.3B-Diffusers"
_WAN_14B = {"ffn_dim": 13824, "num_attention_heads": 40, "num_layers": 40}
_WAN_I2V = {"index": {"_class_name": "WanImageToVideoPipeline"}, "transformer": {**_WAN_14B, "in_channels": 36}}
_WAN_I2V["transformer"]["image_dim"] = 1280
RECOGNISED: list[tuple[str, dict[str, dict[str, Any]], str | None]] = [
    ("Wan 1.3B", PUBLISHED[_WAN], "Wan 2.1 T2V 1.3B"),
    ("Wan 14B", _changed(_WAN, transformer=_WAN_14B), "Wan 2.1 T2V 14B"),
    ("Wan I2V 480P", _changed(_WAN, **_WAN_I2V, scheduler={"flow_shift": 3.0}), "Wan 2.1 I2V 14B 480P"),
    ("Wan I2V 720P", _changed(_WAN, **_WAN_I2V, scheduler={"flow_shift": 5.0}), "Wan 2.1 I2V 14B 720P"),
    ("FastWan", _changed(_WAN, index={"_class_name": "WanDMDPipeline"}), None),
    ("Wan of another width", _changed(_WAN, transformer={"ffn_dim": 8961}), None),
    *((name, PUBLISHED[name], None) for name in PUBLISHED if "Wan2.2" in name or "Qwen" in name or "Z-Image" in name),
    *((name, PUBLISHED[name], "HunyuanVideo") for name in PUBLISHED if name == "HunyuanVideo"),
    *((name, PUBLISHED[name], "FLUX.1 [dev]") for name in PUBLISHED if name == "FLUX.1-dev"),
    ("FLUX.1 without guidance", _changed("FLUX.1-dev", transformer={"guidance_embeds": False}), None),
]


@table(("name", "files", "expected"), RECOGNISED)
def test_they_are_for_their_models_alone(
    name: str, files: dict[str, dict[str, Any]], expected: str | None, tmp_path: Path
) -> None:
    found = read_polynomials(_folder(tmp_path / name.replace(" ", "_"), files))
    assert (None if found is None else found.models) == expected


def test_every_set_is_recognised_somewhere() -> None:
    assert {expected for _, _, expected in RECOGNISED} - {None} == set(TABLE)


@table(
    ("options", "published", "message"),
    [
        ({}, None, "expected coefficients of this very model.*calibrate PROMPT.*teacache:file=FILE; or use easycache"),
        ({"use_ret_steps": True}, "FLUX.1 [dev]", "the coefficients of FLUX.1 .dev. have none; leave it out"),
    ],
)
def test_what_has_no_coefficients_says_what_to_type(options: dict[str, Any], published: str, message: str) -> None:
    known = {each.polynomials.models: each.polynomials for each in published_polynomials()}.get(published)
    with pytest.raises(RequestError, match=message):
        polynomial_of(TeaCacheOptions(**options), None, known)


# --- calibrations -----------------------------------------------------------------------------------------------------


@table("spread", [0.3, 0.01])
def test_coefficients_are_those_of_least_squares(spread: float) -> None:
    generator = numpy.random.default_rng(1)
    x = generator.uniform(0.001, spread, 40)
    bent = sum(c * x**power for c, power in zip((300.0, -80.0, 9.0, 1.2, 0.05), (4, 3, 2, 1, 0), strict=True))
    y = bent + 1e-4 * generator.standard_normal(len(x))
    measured = [StackMeasurement(), StackMeasurement()]
    measured[0].changes = {"plain": [*zip(x[:25].tolist(), y[:25].tolist(), strict=True), (math.inf, 1.0)]}
    measured[1].changes = {"plain": list(zip(x[25:].tolist(), y[25:].tolist(), strict=True))}
    found = fit_polynomials(measured)["plain"]
    expected = numpy.linalg.lstsq(numpy.vander(x / spread, 5), y, rcond=None)[0] / spread ** numpy.arange(4, -1, -1)
    numpy.testing.assert_allclose(found, expected, rtol=1e-6)
    polynomial = TeaCachePolynomial(found, 0.1)
    assert max(abs(polynomial(each) - value) for each, value in zip(x, bent, strict=True)) < 3e-4


def test_too_few_steps_make_no_coefficients() -> None:
    measured = StackMeasurement()
    measured.changes = {"plain": [(0.1 * index, 0.2) for index in range(5)] * 3}
    assert fit_polynomials([measured]) == {}


def test_a_measurement_runs_every_block_and_compares_branch_by_branch() -> None:
    measured = StackMeasurement()
    for index in range(3):
        for branch, factor in (("cond", 1.0), ("uncond", 3.0)):
            streams = (torch.full((1, NUM_TOKENS + 2, DIM), factor * 2.0**index),)
            signal = ModulatedInput(torch.full((1, NUM_TOKENS + 2, DIM), factor + index))

            def double(x: torch.Tensor) -> None:
                x *= 2

            step = StepInfo(index, 3, branch=branch)
            made = measured.run([overwriting(double)] * 2, streams, step, NUM_TOKENS, lambda signal=signal: signal)  # type: ignore[misc]
            assert made[0].unique().tolist() == [4 * factor * 2.0**index]
    # The output doubles from step to step; what is compared goes from 1 to 2 to 3, and from 3 to 4 to 5.
    expected = [(1.0, 1.0), (1 / 3, 1.0), (1 / 2, 1.0), (1 / 4, 1.0)]
    assert measured.changes["plain"] == [pytest.approx(each) for each in expected]
    assert measured.ratios["cond"] == pytest.approx({0: 1.0, 1: 2.0, 2: 2.0})


@pytest.fixture(scope="module")
def pipeline(tiny_wan_folder: Path) -> Pipeline:
    found = load_pipeline(str(tiny_wan_folder), device="cpu")
    assert isinstance(found, Pipeline)
    return found


def test_calibrate_generate_and_refuse(pipeline: Pipeline, tmp_path: Path) -> None:
    request = GenerationRequest("a red circle", **TINY_SIZES, num_inference_steps=12, guidance_scale=4.0)
    found = calibrate(pipeline, [request, dataclasses.replace(request, prompt="a blue star", seed=1)])
    # Wan's are of the time embedding, and of what is projected of it.
    assert set(found.coefficients) == {"plain", "of_ret_steps"}
    assert found.prompts == ("a red circle", "a blue star")
    path = tmp_path / "file.json"
    path.write_text(json.dumps(found.to_dict()))
    assert Calibration.read(path, "teacache").coefficients == found.coefficients

    def cached(options: str, **changes: Any) -> Any:
        text = f"teacache:file={json.dumps(str(path))}{options}"
        return pipeline(dataclasses.replace(request, step_cache=text, **changes))

    plain = pipeline(dataclasses.replace(request, guidance_mode="two_pass"))
    assert numpy.array_equal(cached(",threshold=0").frames, plain.frames)
    media = cached(",threshold=0.4", guidance_mode="batched")
    assert {row.reused_by for row in media.attention_report.steps} == {("teacache",)}
    assert len({row.computed for row in media.attention_report.steps}) == 1
    assert media.recipe["request"]["guidance_mode"] == "two_pass"
    assert "threshold=0.1," in cached("").recipe["request"]["step_cache"]
    ret = cached(",threshold=10,use_ret_steps=true")
    assert {row.computed for row in ret.attention_report.steps} == {"0-4,11"}
    assert numpy.array_equal(pipeline(GenerationRequest.from_dict(ret.recipe["request"])).frames, ret.frames)
    other = cached("", num_inference_steps=20)
    assert any("calibrated with 12 steps, run with 20" in note for note in other.attention_report.notes)
    with pytest.raises(RequestError, match="expected more than 8 steps, got 4"):
        cached("", num_inference_steps=4)
    path.write_text(json.dumps(dataclasses.replace(found, model={**found.model, "family": "flux1"}).to_dict()))
    with pytest.raises(RequestError, match="teacache: this calibration is for another model: family: expected 'wan'"):
        pipeline.resolve(dataclasses.replace(request, step_cache=f"teacache:file={json.dumps(str(path))}"))
    path.write_text(json.dumps(dataclasses.replace(found, coefficients={}).to_dict()))
    with pytest.raises(RequestError, match="this calibration has no coefficients: its 12 steps were too few"):
        pipeline.resolve(dataclasses.replace(request, step_cache=f"teacache:file={json.dumps(str(path))}"))


def with_published(rules: RequestRules, published: TeaCachePolynomials) -> RequestRules:
    return dataclasses.replace(rules, step_caches=dataclasses.replace(rules.step_caches, teacache=published))


def test_published_coefficients_are_taken_where_the_model_is_known(pipeline: Pipeline) -> None:
    request = GenerationRequest("a red circle", **TINY_SIZES, num_inference_steps=12)
    published = TeaCachePolynomials("a model", "a source", TeaCachePolynomial((0.0,) * 5, 0.25))
    known = with_published(pipeline.rules, published)
    resolved = known.resolve(dataclasses.replace(request, step_cache="teacache"))
    assert resolved.step_cache == 'teacache:file="",threshold=0.25,use_ret_steps=false,force=false'
    assert resolved.guidance_mode == "two_pass"
    with pytest.raises(RequestError, match="none were published for it"):
        pipeline.resolve(dataclasses.replace(request, step_cache="teacache"))
    # Distilled to few steps, it is another model than the coefficients were measured on.
    distilled = dataclasses.replace(
        known, preset_rules=PresetRules(few_steps=FewSteps(presets_of("wan")[:1], "by its name"))
    )
    with pytest.raises(RequestError, match="none were published for it"):
        distilled.resolve(dataclasses.replace(request, step_cache="teacache"))
    undocumented = dataclasses.replace(published, plain=TeaCachePolynomial((0.0,) * 5, None))
    with pytest.raises(RequestError, match=r"no threshold is documented.*teacache:threshold=0.1"):
        with_published(known, undocumented).resolve(dataclasses.replace(request, step_cache="teacache"))


@table(
    ("text", "message"),
    [
        ("teacache:threshold=-1", "threshold: expected a number from 0 to 10, got -1"),
        ("teacache:threshold=nan", "teacache.threshold: expected"),
        ("teacache:use_ret_steps=5", "teacache.use_ret_steps: expected bool, got 5"),
        ("teacache:ret_steps=true", "unknown option 'ret_steps'.*'use_ret_steps'"),
        ("teacache:file=3", "teacache.file: expected str, got 3"),
    ],
)
def test_settings_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StepCacheSettings.parse(text)
