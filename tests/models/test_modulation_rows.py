"""Rows of modulation that are computed for all steps of a request at once: those of each step's own pass."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from offloaded_pipelines import StrictTransfers, load_offloaded
from PIL import Image
from recorded_capture import RecordedCapture
from staged_sampling import sample_in_stages
from tables import table
from tiny_families import WRITERS, given_to, small_request
from tiny_flux1 import write_tiny_flux1
from tiny_hunyuan_video import write_tiny_hunyuan_video
from tiny_hunyuan_video_15 import write_tiny_hunyuan_video_15

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext, RequestCache, StepInfo
from diffusion_runtime.denoising.cuda_graphs.captured_forward import ForwardPass
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.denoising.progressive_resolution import plan_stages, stage_samplers
from diffusion_runtime.denoising.registry import build_sampler
from diffusion_runtime.denoising.schedule_loop import ScheduleSampler
from diffusion_runtime.layers import modulation_rows
from diffusion_runtime.layers.modulation import BlockModulation, Modulation
from diffusion_runtime.layers.modulation_rows import plan_steps, table_bytes
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.memory_planning import planned_batch, takes_more
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.samplers import SAMPLERS

pytestmark = pytest.mark.filterwarnings("ignore")
FolderOf = Callable[[str], Path]
NUM_STEPS = 4
STEPS = tuple(
    StepInfo(index, NUM_STEPS, timestep=900.0 - 200 * index, next_timestep=700.0 - 200 * index)
    for index in range(NUM_STEPS)
)
STAR = GenerationRequest("a star", height=64, width=64, seed=1)
FAMILIES = ("flux1", "qwen_image", "hunyuan_video", "hunyuan_video_15", "meanflow", "z_image")


def load(folder_of: FolderOf, tmp_path: Path, family: str) -> Pipeline:
    folder = (
        write_tiny_hunyuan_video_15(tmp_path / "meanflow", use_meanflow=True)
        if family == "meanflow"
        else folder_of(family)
    )
    pipeline = load_pipeline(str(folder), device="cpu", dtype="float32")
    assert isinstance(pipeline, Pipeline)
    return pipeline


def velocities(pipeline: Pipeline, *, is_planned: bool) -> tuple[list[torch.Tensor], RequestCache, Counter[str]]:
    """Of a conditional and an unconditional pass at each step, what the request keeps, and how often each projection of
    a block ran."""
    latents, _, inputs = given_to(pipeline)
    pooled = inputs.text.pooled
    other = dataclasses.replace(inputs.text, pooled=None if pooled is None else pooled.flip(0))
    counts: Counter[str] = Counter()
    handles = [
        module.projection.register_forward_hook(lambda *_, name=name: counts.update([name]))
        for name, module in pipeline.transformer.named_modules()
        if isinstance(module, BlockModulation)
    ]
    state, out = RequestCache(), []
    if is_planned:
        plan_steps(state, STEPS)
    branches = {"cond": inputs, "uncond": dataclasses.replace(inputs, text=other)}
    with torch.inference_mode():
        for step in STEPS:
            assert step.timestep is not None
            for branch, given in branches.items():
                context = AttentionContext(step=dataclasses.replace(step, branch=branch), state=state)
                out.append(pipeline.transformer(latents, torch.full((2,), step.timestep), given, context))
    for handle in handles:
        handle.remove()
    return out, state, counts


@table("family", FAMILIES)
def test_rows_of_all_steps_at_once_are_those_of_each_step(
    family: str, tiny_folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU to the bit, where each timestep is a product of its own, but for samples that share a row; in one
    product, as on a GPU, within float32's rounding."""
    pipeline = load(tiny_folder_of, tmp_path, family)
    expected, state, counts = velocities(pipeline, is_planned=False)
    assert table_bytes(state) == 0
    has_pooled = family in ("flux1", "hunyuan_video")
    num_tables = 2 if has_pooled else 1
    assert set(counts.values()) == {2 * NUM_STEPS}
    found, state, counts = velocities(pipeline, is_planned=True)
    assert set(counts.values()) == {num_tables * NUM_STEPS}
    assert max(map(relative, found, expected)) < 1e-6
    if has_pooled:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    # Of both samples where each has a pooled text, and of both branches; one row where they are the same.
    modulations = [each for each in pipeline.transformer.modules() if isinstance(each, BlockModulation)]
    numbers = sum(each.projection.out_features for each in (*modulations, pipeline.transformer.out_modulation))
    assert table_bytes(state) == NUM_STEPS * numbers * 4 * (2 * 2 if has_pooled else 1)
    monkeypatch.setattr(modulation_rows, "ROW_BY_ROW", ())
    found, _, counts = velocities(pipeline, is_planned=True)
    assert set(counts.values()) == {num_tables}
    assert max(map(relative, found, expected)) < 1e-6


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_a_step_that_was_not_planned_computes_its_own(tiny_folder_of: FolderOf, tmp_path: Path) -> None:
    """As does one whose timestep comes twice with two that follow, in a model that reads both."""
    pipeline = load(tiny_folder_of, tmp_path, "meanflow")
    latents, timestep, inputs = given_to(pipeline)
    timestep = torch.full_like(timestep, 500.0)

    def velocity(state: RequestCache, after: float) -> torch.Tensor:
        context = AttentionContext(step=StepInfo(timestep=500.0, next_timestep=after), state=state)
        out: torch.Tensor = pipeline.transformer(latents, timestep, inputs, context)
        return out

    expected = {after: velocity(RequestCache(), after) for after in (0.0, 250.0)}
    assert not torch.equal(expected[0.0], expected[250.0])
    state = RequestCache()
    plan_steps(state, STEPS)
    assert torch.equal(velocity(state, 0.0), expected[0.0])
    plan_steps(state, [StepInfo(timestep=500.0, next_timestep=after) for after in (0.0, 250.0)])
    for after, known in expected.items():
        assert torch.equal(velocity(state, after), known)
    assert table_bytes(state) == 0


def test_rows_of_another_timestep_than_the_step_says_are_not_read(tiny_folder_of: FolderOf, tmp_path: Path) -> None:
    pipeline = load(tiny_folder_of, tmp_path, "flux1")
    latents, timestep, inputs = given_to(pipeline)
    state = RequestCache()
    plan_steps(state, STEPS)
    context = AttentionContext(step=STEPS[0], state=state)
    with pytest.raises(IndexError):
        pipeline.transformer(latents, torch.full_like(timestep, 1.5), inputs, context)


CASES: dict[str, Callable[[Path], Path]] = {
    "flux1": write_tiny_flux1,
    "image": lambda folder: write_tiny_hunyuan_video(folder, image_condition="token_replace"),
}


@table("case", CASES)
def test_a_generation_says_what_it_computed_and_makes_the_same(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tokens at a timestep of their own, too: those of an image that stays as it is."""
    pipeline = load_pipeline(str(CASES[case](tmp_path / case)), device="cpu")
    assert isinstance(pipeline, Pipeline)
    Image.fromarray(numpy.full((64, 64, 3), 90, numpy.uint8)).save(tmp_path / "image.png")
    request = small_request(pipeline, 3)
    if case == "image":
        request = dataclasses.replace(request, image_path=str(tmp_path / "image.png"))
    media = pipeline(request)
    parts = {"transformer"} if case == "flux1" else {"transformer", "image"}
    said = [note for note in media.attention_report.notes if note.startswith("modulation, ")]
    assert {note.removeprefix("modulation, ").split(":")[0].split(",")[0] for note in said} == parts
    assert any("rows of 3 timesteps computed at once, " in note for note in said)
    monkeypatch.setattr("diffusion_runtime.generation.latent_denoiser.plan_steps", lambda *_: None)
    plain = pipeline(request)
    assert not any(note.startswith("modulation, ") for note in plain.attention_report.notes)
    assert (abs(plain.frames - media.frames)).max() < 1e-6


@table("name", SAMPLERS)
def test_every_sampler_says_its_steps_before_it_runs(name: str) -> None:
    sampler, ran = build_sampler(name, 5, 3.0, {}), []

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        ran.append(step)
        return latents

    noise = torch.ones(1, 1, 1, 2, 2)
    sampler.sample(noise, predict, draw_noise=lambda: noise)
    assert sampler.steps(noise.device) == tuple(ran)
    assert {step.index for step in ran} == set(range(5))
    assert len(ran) <= 5 * SAMPLERS[name].num_predictions_per_step


def test_steps_of_several_sizes_are_known_before_they_run() -> None:
    """With the noise levels that a growth leads back to."""
    sampler, ran = build_sampler("flow_match_euler", 8, 3.0, {}), []
    assert isinstance(sampler, ScheduleSampler)
    stages = plan_stages(sampler.scheduler(torch.device("cpu")).sigmas[:8].tolist(), [0.95, 0.8])
    assert len(stages) == 3

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        ran.append(step)
        return latents

    noise = torch.ones(1, 1, 1, 2, 2)
    sample_in_stages(sampler, stages, noise, [predict] * 3, lambda shape: torch.ones(1, *shape))
    assert [step for each in stage_samplers(sampler, stages) for step in each.steps(noise.device)] == ran


def test_streamed_blocks_leave_their_modulation_where_it_waits_but_once_a_request(tiny_folder_of: FolderOf) -> None:
    folder, transfers = str(tiny_folder_of("flux1")), StrictTransfers()
    pipeline = load_offloaded(folder, "layers", {"transformer": 0}, transfers)
    assert pipeline.parts.offloading is not None
    (part,) = (each for each in pipeline.parts.offloading.parts if each.name == "transformer")
    for each in pipeline.parts.offloading.parts:
        transfers.hide(each.arena.bytes)
    modulations = [each for each in pipeline.transformer.modules() if isinstance(each, BlockModulation)]
    assert part.stream is not None
    largest = max(sum(p.nbytes for p in m.parameters()) for m in pipeline.transformer.double_blocks)
    assert part.stream.device_bytes < 2 * largest
    for num_steps in (1, 3):
        before = transfers.num_copies, part.stream.num_copies
        # A text of its own: the encodings of an earlier request are kept, and its encoders stay where they are.
        pipeline(dataclasses.replace(small_request(pipeline, num_steps), prompt=f"a star, {num_steps}"))
        total, streamed = transfers.num_copies - before[0], part.stream.num_copies - before[1]
        # Beside the blocks: the text encoders, what is no block, and each modulation.
        assert total - streamed == len(modulations) + len(pipeline.parts.offloading.parts)
    pipeline.close()


def test_plans_count_the_rows_and_do_not_stream_their_weights(tiny_folder_of: FolderOf) -> None:
    prepared = prepare(RuntimeConfig(model_path=str(tiny_folder_of("flux1")), device="cpu", memory_limit="1GB"))
    assert isinstance(prepared, PreparedModel)

    def demand(num_steps: int) -> Any:
        request = dataclasses.replace(STAR, num_inference_steps=num_steps)
        plan = prepared.planned_for([prepared.rules.resolve(request)]).description.memory
        assert plan is not None
        return plan

    few, many = demand(2), demand(1000)
    modulations = [each for each in prepared.transformer.modules() if isinstance(each, Modulation)]
    rows = sum(each.projection.out_features for each in modulations)
    itemsize = prepared.policy.dtype.itemsize
    assert few.demand.modulation_rows == 2 * rows * itemsize
    assert many.demand.modulation_rows == 1000 * rows * itemsize
    assert many.demand.step_activations - few.demand.step_activations >= 990 * rows * itemsize
    (part,) = few.demand.transformers
    held = [each for each in modulations if isinstance(each, BlockModulation)]
    assert part.read_once == sum(p.nbytes for each in held for p in each.parameters())
    small, large = (
        planned_batch(prepared.rules, [prepared.rules.resolve(dataclasses.replace(STAR, num_inference_steps=number))])
        for number in (2, 3)
    )
    assert takes_more(prepared.rules, large, small, keeps_rows=True)
    assert not takes_more(prepared.rules, small, large, keeps_rows=True)
    assert not takes_more(prepared.rules, large, small, keeps_rows=False)
    assert "modulation rows computed before the first step" in dict(many.rows())["activations, step"]
    assert many.to_dict()["modulation_rows"] == many.demand.modulation_rows


def test_a_graph_serves_planned_steps_alone(tiny_folder_of: FolderOf) -> None:
    """A step that was not planned finds no row in a graph's table."""
    pipeline = load_pipeline(str(tiny_folder_of("flux1")), device="cpu", dtype="float32")
    assert isinstance(pipeline, Pipeline)
    latents, _, inputs = given_to(pipeline)
    graphs, recorder, state = ForwardGraphs(RecordedCapture(), is_probed=False), AttentionRecorder(), RequestCache()
    forward = graphs.of_generation(pipeline.transformer, recorder)
    plan_steps(state, STEPS)
    with torch.inference_mode():
        for timestep in (*(step.timestep for step in STEPS), 123.0):
            assert timestep is not None
            step = next((each for each in STEPS if each.timestep == timestep), StepInfo(timestep=timestep))
            context = AttentionContext(step=step, state=state, recorder=recorder)
            given = ForwardPass(latents, torch.full((2,), timestep), inputs, context)
            alone = dataclasses.replace(given, context=AttentionContext(step=step))
            assert torch.equal(forward(given), alone.run(pipeline.transformer)), timestep
    forward.report()
    counted = recorder.report().graphs
    assert counted is not None
    assert (counted.num_forwards, counted.num_replayed) == (5, 2)


@pytest.mark.gpu
def test_on_a_gpu_rows_of_one_product_err_no_more_than_those_of_each_step(tiny_folder_of: FolderOf) -> None:
    for family in WRITERS:
        pipeline = load_pipeline(str(tiny_folder_of(family)), device="cuda", dtype="bfloat16", offload="none")
        assert isinstance(pipeline, Pipeline)
        for each in (m for m in pipeline.transformer.modules() if isinstance(m, BlockModulation)):
            dim = each.projection.in_features
            given = torch.randn(50, dim, device="cuda", dtype=torch.bfloat16)
            weights = [p.double() for p in each.projection.parameters()]
            exact = torch.nn.functional.linear(given.double(), *weights)
            alone = torch.cat([each.projection(row[None]) for row in given])
            together = each.projection(given)
            assert relative(together.double(), exact) <= 1.1 * relative(alone.double(), exact)
