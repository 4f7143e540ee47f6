"""Causal Wan: chunks with a key-value cache against one pass under a block-causal mask, through the whole pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from recorded_capture import RecordedCapture
from tiny_models import write_tiny_wan

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionCall, AttentionResult, TokenLayout, register_backend
from diffusion_runtime.attention.backends.reference import ReferenceBackend
from diffusion_runtime.attention.backends.registry import unregister_backend
from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.cache.plan import CachePlan, plan_forward
from diffusion_runtime.attention.cache.slots import FrameSlots
from diffusion_runtime.attention.cache.window import FrameWindow
from diffusion_runtime.attention.cached_calls import CACHED_KEYS
from diffusion_runtime.attention.context import AttentionContext, RequestCache
from diffusion_runtime.attention.forward_plans import ForwardPlan, PlanLimits
from diffusion_runtime.attention.measured_error import ErrorSample
from diffusion_runtime.cli.report_remarks import remarks_of
from diffusion_runtime.core.kept_results import KeptResults
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.chunks import cached_tokens, passes_of
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.denoising.noise import ChunkNoise
from diffusion_runtime.errors import BackendUnavailableError, ConfigError, ModelLoadError, RequestError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.generation import chunked_denoiser
from diffusion_runtime.generation.chunked_denoiser import ChunkedDenoiser
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.memory_planning import planned_batch
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.media import GeneratedMedia
from diffusion_runtime.models.cache_memory import cache_bytes
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.models.memory_demand import step_demand
from diffusion_runtime.models.wan import transformer as wan_transformer
from diffusion_runtime.models.wan.transformer import WanTransformer
from diffusion_runtime.parallel.branches import BranchExchange
from diffusion_runtime.profiling.calibration import calibrate
from diffusion_runtime.request.prompt_switches import SWITCH_MODES
from diffusion_runtime.rules.batch_settings import BatchSettings

KEYS = {"num_frames_per_block": 3, "local_attn_size": 7, "sink_size": 2}
# 4 x 4 latents, 2 x 2 tokens per frame.
ROLLING = {"chunk_schedule": "rolling", "sampler": "dmd", "kv_window": 0}
REQUEST = GenerationRequest("a red circle", "a blue star", height=32, width=32, num_frames=45, seed=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_wan(tmp_path_factory.mktemp("wan") / "causal", causal=KEYS)


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Pipeline:
    return load_pipeline(str(folder), device="cpu")


@dataclasses.dataclass(frozen=True)
class Pass:
    """One forward pass of a transformer, as it was called."""

    latents: torch.Tensor
    timestep: torch.Tensor
    inputs: DenoiserInputs
    step: StepInfo
    plan: CachePlan
    velocity: torch.Tensor


@contextmanager
def recorded(pipeline: Pipeline) -> Iterator[list[Pass]]:
    passes: list[Pass] = []

    def record(_: Any, given: tuple[Any, ...], velocity: torch.Tensor) -> None:
        latents, timestep, inputs, context = given
        passes.append(Pass(latents, timestep, inputs, context.step, context.cache.plan, velocity))

    hook = pipeline.transformer.register_forward_hook(record)
    try:
        yield passes
    finally:
        hook.remove()


def expert_of(pipeline: Pipeline, index: int) -> WanTransformer:
    transformer: Any = pipeline.transformer
    return transformer.expert(index) if hasattr(transformer, "expert") else transformer


def under_mask(
    transformer: WanTransformer, latents: torch.Tensor, times: list[float], inputs: DenoiserInputs, mask: torch.Tensor
) -> torch.Tensor:
    """The velocity of one pass over all frames without a cache. times: of each frame; mask: bool [frames, frames]."""
    per_token = mask.repeat_interleave(4, 0).repeat_interleave(4, 1)[None, None]

    def masked(_: Any, given: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return given, {**keywords, "mask": per_token}

    hooks = [
        block.self_attention.attention.register_forward_pre_hook(masked, with_kwargs=True)
        for block in transformer.text_blocks()
    ]
    timestep = torch.tensor(times).repeat(len(latents), 1)
    velocity: torch.Tensor = transformer(latents, timestep, inputs, AttentionContext())
    for hook in hooks:
        hook.remove()
    return velocity


def block_causal(chunks: list[range], sink: int, span: int | None) -> torch.Tensor:
    """bool [frames, frames]: what each frame sees where the authors' buffer rolls when it is full."""
    mask = torch.zeros(chunks[-1].stop, chunks[-1].stop, dtype=torch.bool)
    buffer: list[int] = []
    for chunk in chunks:
        buffer += chunk
        if span is not None and len(buffer) > span:
            buffer = buffer[:sink] + buffer[sink:][-(span - sink) :]
        for frame in chunk:
            mask[frame, buffer] = True
    return mask


def assert_block_causal(pipeline: Pipeline, passes: list[Pass], sink: int, span: int | None) -> int:
    """Every denoising pass saw exactly the clean frames before its chunk and its own noisy ones. Their number."""
    clean = {given.plan.frames: given.latents for given in passes if given.step.phase == "commit"}
    chunks = list(dict.fromkeys(given.plan.frames for given in passes if given.step.phase == "denoise"))
    count = 0
    for given in passes:
        if given.step.phase == "commit":
            continue
        past = chunks[: chunks.index(given.plan.frames)]
        batch = len(given.latents)
        whole = torch.cat([*(clean[frames][:1].expand(batch, -1, -1, -1, -1) for frames in past), given.latents], 2)
        times = [0.0] * given.plan.first_frame + [float(given.timestep[0])] * given.plan.num_frames
        mask = block_causal([*past, given.plan.frames], sink, span)
        expected = under_mask(expert_of(pipeline, given.step.expert), whole, times, given.inputs, mask)
        own = expected[:, :, given.plan.first_frame :]
        assert own.std() > 0.1
        torch.testing.assert_close(given.velocity, own, rtol=1e-5, atol=1e-5)
        count += 1
    return count


@pytest.mark.parametrize(
    ("chunk_frames", "first", "span", "sink", "others"),
    [
        (3, None, 7, 2, {}),
        (2, 1, 0, 0, {"guidance_scale": 3.0, "sampler": "unipc", "num_inference_steps": 3}),
        (1, None, 4, 1, {"guidance_scale": 3.0, "guidance_mode": "two_pass", "num_inference_steps": 2}),
    ],
)
def test_cached_chunks_are_the_block_causal_model(
    pipeline: Pipeline, chunk_frames: int, first: int | None, span: int, sink: int, others: dict[str, Any]
) -> None:
    few = {"sigmas": (1.0, 0.6)} if others.get("num_inference_steps") == 2 else {}
    request = dataclasses.replace(
        REQUEST, chunk_frames=chunk_frames, first_chunk_frames=first, kv_window=span, kv_sink=sink, **others, **few
    )
    with recorded(pipeline) as passes:
        media = pipeline(request)
    assert media.frames.shape == (45, 32, 32, 3)
    num_steps = others.get("num_inference_steps", 4)
    num_chunks = -(-(12 - (first or chunk_frames)) // chunk_frames) + 1
    per_step = 2 if others.get("guidance_mode") == "two_pass" else 1
    assert assert_block_causal(pipeline, passes, sink, span or None) == num_chunks * num_steps * per_step
    cache = media.attention_report.cache
    assert cache is not None
    samples = 2 if others else 1
    assert cache.num_bytes == samples * 2 * 2 * (span or 12) * 4 * 4 * 16 * 4
    planned = cache_bytes([pipeline.transformer], pipeline.resolve(request), 4 * (span or 12), samples, torch.float32)
    assert planned == cache.num_bytes
    assert str(cache) in remarks_of([media.attention_report.to_dict()])
    assert (cache.window_frames, cache.sink_frames, cache.num_commits) == (span or None, sink, num_chunks - 1)


def test_the_first_chunk_has_steps_and_guidance_of_its_own(pipeline: Pipeline) -> None:
    """More of both; later chunks go on from the conditional branch's keys, and see what they should."""
    request = dataclasses.replace(
        REQUEST,
        sampler="unipc",
        num_inference_steps=2,
        guidance_scale=3.0,
        chunk_frames=3,
        kv_window=7,
        kv_sink=2,
        first_chunk_steps=5,
        guided_chunks=1,
    )
    with recorded(pipeline) as passes:
        media = pipeline(request)
    made = [(given.plan.first_frame, given.step.phase, given.step.branch) for given in passes]
    first = [(0, "denoise", "cond"), (0, "denoise", "uncond")] * 5 + [(0, "commit", "cond")]
    later = [
        (frame, phase, "cond")
        for frame in (3, 6, 9)
        for phase in ("denoise", "denoise", "commit")
        if (frame, phase) != (9, "commit")
    ]
    assert made == first + later
    assert [given.step.num_steps for given in passes] == [5] * 11 + [2] * 8
    assert assert_block_causal(pipeline, passes, 2, 7) == 16
    resolved = pipeline.resolve(request)
    assert resolved.guidance_mode == "two_pass"
    settings = BatchSettings.of([resolved], pipeline.rules.sampling)
    assert settings.chunking.num_steps_of_video == 5 + 3 * 2
    # Passes of both branches are one pass of a plan.
    planned = list(passes_of(resolved, settings.chunking.plan))
    assert planned == [(given.plan.frames, given.step.phase) for given in passes if given.step.branch == "cond"]
    all_guided = pipeline(dataclasses.replace(request, guided_chunks=4)).frames
    unnamed = pipeline(dataclasses.replace(request, guided_chunks=None, guidance_mode="two_pass")).frames
    assert (all_guided == unnamed).all()
    assert (all_guided != media.frames).any()


@pytest.mark.slow
def test_a_new_prompt_is_guided_from_the_keys_of_the_conditional_branch(pipeline: Pipeline, folder: Path) -> None:
    request = dataclasses.replace(
        REQUEST,
        sampler="unipc",
        num_inference_steps=2,
        guidance_scale=3.0,
        chunk_frames=3,
        kv_window=7,
        kv_sink=2,
        guided_chunks=1,
        guided_switch_chunks=1,
        prompt_switches=((21, "a star"),),
        switch_mode="keep",
    )
    # Every text the same, so that one pass over all frames is what both branches must be: with the whole past.
    alike = dataclasses.replace(request, prompt="a star", negative_prompt="a star")
    with recorded(pipeline) as passes:
        pipeline(alike)
    both, alone = [("denoise", "cond"), ("denoise", "uncond")] * 2, [("denoise", "cond")] * 2
    made: dict[int, list[tuple[str, str]]] = {}
    for given in passes:
        made.setdefault(given.plan.first_frame, []).append((given.step.phase, given.step.branch))
    commit = [("commit", "cond")]
    assert made == {0: both + commit, 3: alone + commit, 6: both + commit, 9: alone}
    assert assert_block_causal(pipeline, passes, 2, 7) == 12
    # Of other texts: that of the negative prompt, which no new prompt changes; and as many bytes as without.
    with recorded(pipeline) as passes:
        media = pipeline(request)
    first, new = (
        next(each.inputs.text for each in passes if (each.plan.first_frame, each.step.branch) == (frame, "uncond"))
        for frame in (0, 6)
    )
    assert torch.equal(first.embeddings, new.embeddings)
    without = pipeline(dataclasses.replace(request, guided_switch_chunks=None))
    assert media.attention_report.cache == without.attention_report.cache
    assert (media.frames[:21] == without.frames[:21]).all()
    assert (media.frames[21:33] != without.frames[21:33]).any()
    # Where both branches have keys of their own, it says nothing.
    own = dataclasses.replace(request, guided_chunks=3)
    assert (pipeline(own).frames == pipeline(dataclasses.replace(own, guided_switch_chunks=0)).frames).all()
    everywhere = pipeline.resolve(dataclasses.replace(own, guided_chunks=None))
    assert any("guided_switch_chunks: 1 is not used" in remark for remark in pipeline.rules.unused(everywhere))
    # A prompt before the first chunk is the video's own, and one that a request has twice begins anew in a stream too.
    twice = dataclasses.replace(request, guided_switch_chunks=2, prompt_switches=((21, REQUEST.prompt),))
    for given, typed in ((twice, None), (dataclasses.replace(request, guided_switch_chunks=2), "a ring")):
        with pipeline.stream(given, keeps_frames=True) as stream:
            if typed is not None:
                stream.prompt(typed)
            list(stream)
            again = GenerationRequest.from_dict(stream.recipe["request"])
            assert (pipeline(again).frames == stream.media().frames).all()
    # Texts alike, guidance changes nothing, however keys are kept. The shift is given: that of the sampling preset goes
    # with its guidance alone.
    for values in (
        {"page_size": 4},
        {"kv_cache_dtype": "fp8_e4m3", "switch_mode": "recache"},
        {"positions": "window", "switch_mode": "recache_at_once"},
    ):
        each = dataclasses.replace(alike, guided_switch_chunks=1_000_000, flow_shift=3.0, **values)
        assert (pipeline(each).frames == pipeline(dataclasses.replace(each, guidance_scale=1.0)).frames).all(), values
    prepared = prepare(RuntimeConfig(model_path=str(folder), device="cpu"))
    assert explain(prepared, pipeline.resolve(request)).num_forwards == len(passes)
    # Typed while the video is made, and in another stream that goes on from the one before.
    with pipeline.stream(dataclasses.replace(request, prompt_switches=None)) as stream:
        next(stream), next(stream)
        with stream.fork() as fork:
            for each in (stream, fork):
                each.prompt("a star")
                frames = numpy.concatenate([chunk.frames for chunk in each])
                assert (frames == media.frames[21:]).all()


class RoundedBackend(ReferenceBackend):
    name = "rounded_attn"
    lossless = False
    error_bound = 0.1


class OneOfTwo(BranchExchange):
    """One process in place of two, and whether it asks the other one now."""

    is_asking = False

    @contextmanager
    def ending_alike(self, step: StepInfo, branches: Sequence[str], device: torch.device) -> Iterator[None]:
        type(self).is_asking = self.measures(step, branches)
        yield

    def exchange(self, velocity: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return velocity, velocity


def test_processes_of_two_branches_know_when_layers_are_measured_under_a_new_prompt(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the commits again of the frames in sight, too."""
    monkeypatch.setattr(BranchExchange, "of", lambda mesh, measures: OneOfTwo(mesh.branch, measures))
    register_backend(RoundedBackend)
    measured, check = [], ErrorSample.check
    try:
        pipeline = load_pipeline(str(folder), device="cpu", attention={"per_role": {"self": "rounded_attn"}})

        def checked(sample: ErrorSample, *others: Any) -> None:
            step = sample._context.step
            measured.append((step.phase, step.chunk, sample._layer.index))
            assert OneOfTwo.is_asking, measured[-1]
            check(sample, *others)

        monkeypatch.setattr(ErrorSample, "check", checked)
        values: dict[str, Any] = {"prompt_switches": ((33, "a star"),), "switch_mode": "recache"}
        pipeline.latents(dataclasses.replace(REQUEST, guidance_scale=3.0, **values))
    finally:
        unregister_backend(RoundedBackend.name)
    # The last layer attends to nothing in commits. The frames in sight are those of two chunks before.
    of_prompt = [("denoise", 0, 0), ("denoise", 0, 1), ("commit", 0, 0)]
    assert measured == [*of_prompt, ("commit", 1, 0), ("denoise", 3, 0), ("denoise", 3, 1)]


def test_the_first_chunk_has_a_sampler_of_its_own(pipeline: Pipeline) -> None:
    """It is sampled as by that one alone, and the later chunks by the other one, whose first steps see its frames."""
    request = dataclasses.replace(REQUEST, num_inference_steps=3, sampler="unipc", sigmas_before_shift=None)
    levels = {}
    for name, values in {
        "unipc": {},
        "dmd": {"sampler": "dmd"},
        "mixed": {"first_chunk_sampler": "dmd"},
        "other": {"sampler": "dmd", "first_chunk_sampler": "unipc"},
    }.items():
        with recorded(pipeline) as passes:
            pipeline(dataclasses.replace(request, **values))
        denoising = [given for given in passes if given.step.phase == "denoise"]
        levels[name] = (
            [(given.step.sigma, given.latents) for given in denoising if given.step.chunk == 0],
            [given.step.sigma for given in denoising if given.step.chunk > 0],
        )
    for mixed, first, later in (("mixed", "dmd", "unipc"), ("other", "unipc", "dmd")):
        assert [level for level, _ in levels[mixed][0]] == [level for level, _ in levels[first][0]]
        assert all(torch.equal(x, y) for (_, x), (_, y) in zip(levels[mixed][0], levels[first][0], strict=True))
        assert levels[mixed][1] == levels[later][1]
    assert any(not torch.equal(x, y) for (_, x), (_, y) in zip(levels["dmd"][0], levels["unipc"][0], strict=True))


def test_the_branch_without_guidance_is_kept_for_the_guided_chunks_alone(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames are those of a cache that keeps both branches whole, under other prompts too; a plan has its bytes."""
    request = dataclasses.replace(
        REQUEST, sampler="unipc", num_inference_steps=2, guidance_scale=3.0, chunk_frames=3, kv_window=7, kv_sink=2
    )
    per_frame = 2 * 2 * 4 * 4 * 16 * 4
    for values, slots in (
        ({"guided_chunks": 1}, 3),
        ({"guided_chunks": 2, "page_size": 4, "prompt_switches": ((9, "a blue ring"), (33, "a star"))}, 6),
        ({"guided_chunks": 3, "kv_cache_dtype": "fp8_e4m3", "switch_mode": "recache_at_once"}, 7),
    ):
        given = dataclasses.replace(request, **values)
        with pipeline.stream(given, keeps_frames=True) as stream:
            num_bytes = [(next(stream), stream.cache_bytes)[1] for _ in range(4)]
        media, num_guided = stream.media(), given.guided_chunks
        one = pipeline(dataclasses.replace(given, guidance_scale=1.0)).attention_report.cache
        assert num_guided is not None
        assert one is not None
        assert media.attention_report.cache is not None
        both = num_bytes[0]
        assert num_bytes == [both] * num_guided + [one.num_bytes] * (4 - num_guided)
        assert media.attention_report.cache.num_bytes == both
        resolved = pipeline.resolve(given)
        settings = BatchSettings.of([resolved], pipeline.rules.sampling)
        tokens = cached_tokens(settings.chunking.cache_passes(), resolved, settings.chunking.plan, is_guided=True)
        assert tokens == 4 * (7 + slots)
        if num_guided == 1:
            assert both == (7 + slots) * per_frame
            assert cache_bytes([pipeline.transformer], resolved, tokens, 1, torch.float32) == both
        with monkeypatch.context() as patch:
            patch.setattr(chunked_denoiser, "guided_frames", lambda *_: None)
            patch.setattr(chunked_denoiser._FrameForward, "_end_guidance", lambda _: None)
            whole = pipeline(given)
        assert whole.attention_report.cache is not None
        assert whole.attention_report.cache.num_bytes == 2 * one.num_bytes
        assert (whole.frames == media.frames).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**ROLLING, "first_chunk_steps": 3}, "first_chunk_steps: rolling denoises.*use --first-chunk-steps 4,"),
        ({**ROLLING, "first_chunk_flow_shift": 2.0}, "first_chunk_flow_shift: rolling .*--first-chunk-flow-shift 5.0,"),
        ({**ROLLING, "first_chunk_sampler": "unipc"}, "first_chunk_sampler: rolling .*--first-chunk-sampler dmd,"),
        (
            {"sigmas": (1.0, 0.5), "first_chunk_sampler": "unipc"},
            "first_chunk_sampler: sigmas: unipc spaces its own noise levels.*--first-chunk-sampler dmd,",
        ),
        ({**ROLLING, "guided_chunks": 3, "guidance_scale": 3.0}, "guided_chunks: rolling .*use --guided-chunks 4,"),
        ({"sigmas": (1.0, 0.5), "first_chunk_steps": 3}, "first_chunk_steps: sigmas .* use --first-chunk-steps 2"),
    ],
)
def test_a_first_chunk_that_cannot_differ(pipeline: Pipeline, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pipeline.resolve(dataclasses.replace(REQUEST, **values))


def test_a_rolling_window_takes_first_chunks_like_the_others(pipeline: Pipeline) -> None:
    """A folder's defaults may say something of the first chunk, which a request can change and not leave out."""
    alike = {"first_chunk_steps": 4, "first_chunk_flow_shift": 5.0, "first_chunk_sampler": "dmd"}
    for guided in ({"guided_chunks": 1}, {"guided_chunks": 4, "guidance_scale": 3.0}):
        resolved = pipeline.resolve(dataclasses.replace(REQUEST, **ROLLING, **alike, **guided))
        assert {name: getattr(resolved, name) for name in alike} == alike


def test_two_experts_have_a_cache_each(tmp_path: Path) -> None:
    pipeline = load_pipeline(str(write_tiny_wan(tmp_path / "experts", causal=KEYS, boundary_ratio=0.875)), device="cpu")
    with recorded(pipeline) as passes:
        media = pipeline(dataclasses.replace(REQUEST, num_frames=33))
    assert {given.step.expert for given in passes} == {0, 1}
    # As FastVideo's A14B: eight steps, and a first chunk of one frame.
    assert media.recipe["sampling_preset"] == "self-forcing-8"
    assert [len(frames) for frames in dict.fromkeys(given.plan.frames for given in passes)] == [1, 3, 3, 2]
    assert assert_block_causal(pipeline, passes, 2, 7) == 4 * 8
    cache = media.attention_report.cache
    assert cache is not None
    assert cache.num_bytes == 2 * 2 * 2 * 7 * 4 * 4 * 16 * 4
    # A first chunk that the expert for high noise makes alone leaves keys for the other one as well.
    short = dataclasses.replace(
        REQUEST, num_frames=33, sampler="unipc", num_inference_steps=4, first_chunk_steps=1, sigmas_before_shift=None
    )
    with recorded(pipeline) as passes:
        pipeline(short)
    made = [(given.step.expert, given.step.phase) for given in passes if given.plan.first_frame == 0]
    assert made == [(0, "denoise"), (0, "commit"), (1, "commit")]
    assert assert_block_causal(pipeline, passes, 2, 7) == 1 + 3 * 4


@pytest.mark.parametrize(
    "scales", [{}, {"guidance_scale": 3.0, "guidance_scale_2": 1.0}, {"guidance_scale": 1.0, "guidance_scale_2": 3.0}]
)
def test_explain_counts_the_passes_of_both_experts(tmp_path: Path, scales: dict[str, float]) -> None:
    config = RuntimeConfig(str(write_tiny_wan(tmp_path, causal=KEYS, boundary_ratio=0.875)), device="cpu")
    request = dataclasses.replace(REQUEST, num_frames=33, guidance_mode="two_pass", **scales)
    prepared = prepare(config)
    with recorded(pipeline := load_pipeline(config)) as passes:
        pipeline(request)
    assert explain(prepared, prepared.rules.resolve(request)).num_forwards == len(passes)


def test_the_cache_and_the_prompt_of_both_experts_are_planned_for(folder: Path, tmp_path: Path) -> None:
    def planned(where: Path) -> tuple[int, int, int]:
        """Activations of a step, those of the cache, and what one expert keeps of the prompt."""
        prepared = prepare(RuntimeConfig(str(where), device="cpu", dtype="float32"))
        assert isinstance(prepared, PreparedModel)
        request = prepared.rules.resolve(REQUEST)
        model, batch = prepared.model, planned_batch(prepared.rules, [request])
        found = prepared._largest_demand(prepared.transformer, [request])
        assert found is not None
        modules = model.modules(prepared.transformer)
        shapes = model.family.text.shapes(model.folder, model.config)
        given = (model, modules["transformer"], shapes, torch.float32, batch)
        kept = step_demand(*given, num_others=1).total - step_demand(*given).total
        return found.demand.step_activations, cache_bytes(modules.values(), request, 4 * 7, 1, torch.float32), kept

    one, cache, kept = planned(folder)
    two, caches, _ = planned(write_tiny_wan(tmp_path / "experts", causal=KEYS, boundary_ratio=0.875))
    assert kept > 0
    assert caches == 2 * cache
    assert two == one + cache + kept


def test_a_rolling_window(pipeline: Pipeline) -> None:
    """Every pass over its chunks, each at a noise level of its own; then the first one's keys, and fresh noise."""
    levels, shift = (1.0, 0.6, 0.3), 5.0
    sigmas = [shift * t / (1 + (shift - 1) * t) for t in levels]
    request = dataclasses.replace(
        REQUEST, num_frames=25, chunk_frames=1, chunk_schedule="rolling", sigmas_before_shift=levels, kv_sink=0
    )
    with recorded(pipeline) as passes:
        pipeline(dataclasses.replace(request, kv_window=0))
    denoised = [given for given in passes if given.step.phase == "denoise"]
    # 7 chunks in a window of 3, which fills and empties.
    spans = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 5), (3, 6), (4, 7), (5, 7), (6, 7)]
    assert [given.plan.frames for given in denoised] == [range(*span) for span in spans]
    clean = {given.plan.first_frame: given.latents for given in passes if given.step.phase == "commit"}
    assert sorted(clean) == [0, 1, 2, 3, 4, 5]
    resolved = pipeline.resolve(dataclasses.replace(request, kv_window=0))
    planned = passes_of(resolved, BatchSettings.of([resolved], pipeline.rules.sampling).chunking.plan)
    assert list(planned) == [(given.plan.frames, given.step.phase) for given in passes]
    noise = ChunkNoise((16, 4, 4), [4])
    for window, given in enumerate(denoised):
        first, stop = spans[window]
        steps = [window - chunk for chunk in range(first, stop)]
        torch.testing.assert_close(given.timestep, torch.tensor([[1000 * sigmas[step] for step in steps]]))
        whole = torch.cat([*(clean[frame] for frame in range(first)), given.latents], dim=2)
        mask = torch.ones(stop, stop, dtype=torch.bool).tril()
        mask[first:] = True
        times = [0.0] * first + given.timestep[0].tolist()
        expected = under_mask(expert_of(pipeline, 0), whole, times, given.inputs, mask)[:, :, first:]
        torch.testing.assert_close(given.velocity, expected, rtol=1e-5, atol=1e-5)
        for place, (chunk, step) in enumerate(zip(range(first, stop), steps, strict=True)):
            after = given.latents[:, :, place] - sigmas[step] * given.velocity[:, :, place]
            if step == len(levels) - 1:
                found = clean.get(chunk, after[:, :, None])[:, :, 0]
            else:
                after = (1 - sigmas[step + 1]) * after + sigmas[step + 1] * noise.draw(chunk, 1, step + 1)[:, :, 0]
                found = denoised[window + 1].latents[:, :, chunk - spans[window + 1][0]]
            torch.testing.assert_close(found, after, rtol=1e-5, atol=1e-5)
    with recorded(pipeline) as passes:
        pipeline(dataclasses.replace(request, kv_window=5, kv_sink=1))
    for given in passes:
        # The sink, and of the rest the last 4: noisy ones, or where the first of them is committed clean ones.
        stop = given.plan.frames.stop
        assert sorted(given.plan.key_frames) == sorted({*range(min(1, stop)), *range(max(1, stop - 4), stop)})


def test_a_video_is_the_beginning_of_a_longer_one(pipeline: Pipeline) -> None:
    few = {"sigmas": (1.0, 0.5), "chunk_frames": 1, "kv_window": 4, "kv_sink": 1, "commit_noise": 0.1}
    whole = pipeline(dataclasses.replace(REQUEST, num_frames=4 * 19 + 1, **few)).frames
    half = pipeline(dataclasses.replace(REQUEST, num_frames=4 * 9 + 1, **few)).frames
    assert (whole[: len(half)] == half).all()
    assert whole.std() > 5


def run(
    transformer: WanTransformer,
    state: RequestCache,
    plan: CachePlan,
    latents: torch.Tensor,
    inputs: DenoiserInputs,
    timestep: float,
    positions: str = "absolute",
) -> torch.Tensor:
    context = AttentionContext(state=state, cache=FrameCache(plan, positions))
    velocity: torch.Tensor = transformer(latents, torch.tensor([timestep]), inputs, context)
    return velocity


@pytest.fixture(scope="module")
def inputs(pipeline: Pipeline) -> DenoiserInputs:
    with recorded(pipeline) as passes:
        pipeline(dataclasses.replace(REQUEST, num_frames=9))
    return passes[0].inputs


def test_a_commit_leaves_nothing_of_the_noise(pipeline: Pipeline, inputs: DenoiserInputs) -> None:
    """Whatever the denoising passes wrote."""
    transformer, slots = expert_of(pipeline, 0), FrameSlots.of(FrameWindow(2, 7), None)
    clean = torch.randn(4, 1, 16, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    states = RequestCache(), RequestCache()
    for index, latents in enumerate(clean):
        frames = range(3 * index, 3 * index + 3)
        for timestep in (1000.0, 500.0):
            run(transformer, states[0], plan_forward(slots, frames, 4), torch.randn_like(latents), inputs, timestep)
        for state in states:
            run(transformer, state, plan_forward(slots, frames, 4, "commit"), latents, inputs, 0.0)
    stores = [list(state.find_all(CACHED_KEYS)) for state in states]
    assert len(stores[0]) == 2
    for noisy, fresh in zip(*stores, strict=True):
        assert torch.equal(noisy.keys_and_values, fresh.keys_and_values)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"positions": "window", "guidance_scale": 3.0, "prompt_switches": [[21, "a dog"]]},
        {"kv_cache_dtype": "fp8_e4m3", "page_size": 2},
    ],
)
def test_what_a_commit_leaves_out_changes_no_frame(
    pipeline: Pipeline, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: of the last layer its keys and values, and nothing that follows."""
    ran = []
    last = expert_of(pipeline, 0).text_blocks()[-1]
    parts = last.feed_forward, expert_of(pipeline, 0).out
    hooks = [part.register_forward_hook(lambda *_: ran.append(1)) for part in parts]
    request = dataclasses.replace(REQUEST, **values)
    with recorded(pipeline) as passes:
        media = pipeline(request)
    commits = [given for given in passes if given.step.phase == "commit"]
    assert len(ran) == 2 * (len(passes) - len(commits)) > 0
    assert not any(bool(given.velocity.any()) for given in commits)
    monkeypatch.setattr(wan_transformer, "_is_commit", lambda _: False)
    whole = pipeline(request)
    for hook in hooks:
        hook.remove()
    assert len(ran) == 2 * (len(passes) - len(commits)) + 2 * len(passes)
    assert numpy.array_equal(media.frames, whole.frames)

    def calls(made: GeneratedMedia) -> int:
        return sum(row.count for row in made.attention_report.rows if row.phase == "commit")

    # Of two layers, each with a self-attention and one to the text.
    assert calls(whole) == 2 * calls(media) == 4 * len(commits)


def test_positions_among_the_frames_in_sight(folder: Path, inputs: DenoiserInputs, tmp_path: Path) -> None:
    """In a model of one layer, keys depend on their frame alone: a chunk is the last of a clip of what it sees."""
    other = load_pipeline(str(write_tiny_wan(tmp_path / "one", causal=KEYS, num_layers=1)), device="cpu")
    transformer, slots = expert_of(other, 0), FrameSlots.of(FrameWindow(2, 7), None)
    latents = torch.randn(1, 16, 18, 4, 4, generator=torch.Generator().manual_seed(0))
    found = {}
    for positions in ("window", "absolute"):
        state = RequestCache()
        for start in range(0, 18, 3):
            plan, own = plan_forward(slots, range(start, start + 3), 4), latents[:, :, start : start + 3]
            found[positions] = run(transformer, state, plan, own, inputs, 300.0, positions)
    seen = torch.cat([latents[:, :, :2], latents[:, :, 13:]], 2)
    expected = under_mask(transformer, seen, [300.0] * 7, inputs, torch.ones(7, 7, dtype=torch.bool))[:, :, 4:]
    torch.testing.assert_close(found["window"], expected, rtol=1e-5, atol=1e-5)
    assert (found["absolute"] - expected).abs().max() > 1e-3


def test_another_prompt_from_the_next_chunk_on(pipeline: Pipeline) -> None:
    """The keys of the frames in sight are computed anew under it; without, they stay."""
    request = pipeline.resolve(dataclasses.replace(REQUEST, kv_window=0, kv_sink=0, num_frames=33))
    texts = [{"cond": encoded(pipeline, prompt)} for prompt in (REQUEST.prompt, "a green ring moving left")]
    after = {}
    for mode in SWITCH_MODES:
        settings = BatchSettings.of([request], pipeline.rules.sampling)
        stream = ChunkedDenoiser(denoiser_of(pipeline, settings)).stream(settings.chunking.plan, texts[0], [4])
        with recorded(pipeline) as passes, torch.inference_mode():
            next(stream), next(stream)
            stream.switch_text(texts[1], mode)
            num_before = len(passes)
            next(stream)
        given = passes[num_before:]
        assert all(each.inputs.text.embeddings is texts[1]["cond"].embeddings for each in given)
        commits = [each for each in passes if each.step.phase == "commit"]
        if mode == "recache":
            # Two of the first prompt, the same two of the second; those are what the chunk saw.
            assert [each.plan.frames for each in commits] == [range(3), range(3, 6)] * 2
            assert_block_causal(pipeline, [*commits, *passes[:1], passes[5], *given], 0, None)
        after[mode] = given[0].velocity
    assert len({tensor.sum().item() for tensor in after.values()}) == 3


def encoded(pipeline: Pipeline, prompt: str) -> Any:
    from diffusion_runtime.generation.prompt_encoding import encode_prompts
    from diffusion_runtime.report.attention_report import AttentionRecorder

    batch = [pipeline.resolve(dataclasses.replace(REQUEST, prompt=prompt))]
    kept = KeptResults(0)
    made = encode_prompts(
        pipeline.text_encoder, batch, AttentionRecorder(), pipeline.device, pipeline.dtype, kept, reads_negative=False
    )
    return made.conditions["cond"]


def denoiser_of(pipeline: Pipeline, settings: BatchSettings) -> Any:
    from diffusion_runtime.generation.latent_denoiser import LatentDenoiser
    from diffusion_runtime.report.attention_report import AttentionRecorder

    return LatentDenoiser(
        transformer=pipeline.transformer,
        image_conditioner=lambda: pytest.fail("no image"),
        latent_encoder=lambda: pytest.fail("no picture to start from"),
        settings=settings,
        mesh=pipeline.mesh,
        device=pipeline.device,
        dtype=pipeline.dtype,
        model={},
        recorder=AttentionRecorder(),
    )


@dataclasses.dataclass(frozen=True)
class KeysInSight:
    """How many keys a pass has, on the device."""

    number: torch.Tensor


class PlanningBackend(ReferenceBackend):
    """The reference, on as many keys as its plan says."""

    name = "planning_attn"
    aliases = ()
    prepares = True
    not_replayed = None
    reserved: ClassVar[list[PlanLimits]] = []
    prepared: ClassVar[list[tuple[str, int, int]]] = []
    runs: ClassVar[list[tuple[int, int]]] = []

    def reserve(self, limits: PlanLimits) -> KeysInSight:
        self.reserved.append(limits)
        return KeysInSight(torch.zeros(1, dtype=torch.int32, device=limits.device))

    def prepare(self, plan: ForwardPlan, into: KeysInSight | None = None) -> KeysInSight:
        assert plan.cache is not None
        if into is None:
            # Of a pass that is watched before it is captured.
            into = KeysInSight(torch.zeros(1, dtype=torch.int32))
        self.prepared.append((plan.step.phase, plan.step.chunk, plan.cache.num_keys))
        into.number.fill_(plan.cache.num_keys)
        return into

    def run(self, call: AttentionCall) -> AttentionResult:
        self.runs.append((call.prepared.number.data_ptr(), call.k.shape[1]))
        assert call.prepared.number.item() == call.k.shape[1]
        return super().run(call)


def test_backends_plan_once_per_pass_in_buffers_that_are_reserved_once(folder: Path) -> None:
    """Not once per layer; and every plan lies where the first one lay."""
    register_backend(PlanningBackend)
    try:
        pipeline = load_pipeline(str(folder), device="cpu", attention={"per_role": {"self": "planning_attn"}})
        with recorded(pipeline) as passes:
            pipeline(dataclasses.replace(REQUEST, num_frames=57))
    finally:
        unregister_backend(PlanningBackend.name)
    phases = [("denoise", chunk) for chunk in range(5) for _ in range(4)]
    expected = [*phases[:4], ("commit", 0), *phases[4:8], ("commit", 1), *phases[8:12], ("commit", 2)]
    expected += [*phases[12:16], ("commit", 3), *phases[16:]]
    # 3 frames, 6, and then the window of 7, of 4 tokens.
    keys = [12, 24, 28, 28, 28]
    assert PlanningBackend.prepared == [(phase, chunk, keys[chunk]) for phase, chunk in expected]
    assert len(passes) == len(expected) == 5 * 4 + 4
    # Of two layers, the last of which attends to nothing in commits.
    assert len(PlanningBackend.runs) == 2 * 5 * 4 + 4
    assert len({address for address, _ in PlanningBackend.runs}) == 1
    (limits,) = PlanningBackend.reserved
    assert (limits.num_queries, limits.num_keys, limits.layout) == (12, 28, TokenLayout((7, 2, 2)))


@pytest.mark.parametrize(
    ("positions", "others"),
    [
        ("absolute", {"guidance_scale": 3.0}),
        ("window", {}),
    ],
)
def test_a_full_cache_is_replayed_from_cuda_graphs(folder: Path, positions: str, others: dict[str, Any]) -> None:
    """On the CPU, where recorded operators stand for a graph: where a chunk's keys go and its positions are data."""
    register_backend(PlanningBackend)
    try:
        pipeline = load_pipeline(str(folder), device="cpu", attention={"per_role": {"self": "planning_attn"}})
        request = dataclasses.replace(REQUEST, num_frames=81, positions=positions, **others)
        expected = pipeline(request).frames
        PlanningBackend.reserved.clear()
        pipeline.parts = dataclasses.replace(pipeline.parts, graphs=ForwardGraphs(RecordedCapture(), is_probed=False))
        media = pipeline(request)
    finally:
        unregister_backend(PlanningBackend.name)
    graphs = media.attention_report.graphs
    assert graphs is not None
    assert graphs.num_replayed >= 12
    assert sum(graphs.eager.values()) + graphs.num_replayed == graphs.num_forwards
    assert any("the key-value cache is not full" in reason for reason in graphs.eager)
    assert abs(media.frames.astype(int) - expected).max() <= 1
    # Of the passes that run eagerly, and of each graph: no replay makes another.
    assert len(PlanningBackend.reserved) == 1 + graphs.num_graphs
    # A graph holds the keys of its video, which ends with it.
    assert pipeline.parts.graphs.num_graphs == 0


def test_graphs_of_the_branch_without_guidance_end_with_the_guided_chunks(folder: Path) -> None:
    register_backend(PlanningBackend)
    try:
        pipeline = load_pipeline(str(folder), device="cpu", attention={"per_role": {"self": "planning_attn"}})
        request = dataclasses.replace(REQUEST, num_frames=81, guidance_scale=3.0, guided_chunks=5)
        expected = pipeline(request).frames
        graphs = ForwardGraphs(RecordedCapture(), is_probed=False)
        pipeline.parts = dataclasses.replace(pipeline.parts, graphs=graphs)
        with pipeline.stream(request, keeps_frames=True) as stream:
            held = [{form.branch for form in graphs._forms.values() if form.graph} for _ in stream]
        frames = stream.media().frames
    finally:
        unregister_backend(PlanningBackend.name)
    assert held == [set()] * 2 + [{"cond", "uncond"}] * 3 + [{"cond"}] * 2
    assert abs(frames.astype(int) - expected).max() <= 1


@pytest.mark.slow
def test_guidance_of_a_new_prompt_is_not_replayed(folder: Path) -> None:
    register_backend(PlanningBackend)
    try:
        pipeline = load_pipeline(str(folder), device="cpu", attention={"per_role": {"self": "planning_attn"}})
        request = dataclasses.replace(
            REQUEST,
            num_frames=117,
            guidance_scale=3.0,
            guided_chunks=5,
            guided_switch_chunks=2,
            prompt_switches=((69, "a star"), (93, "a ring")),
        )
        expected = pipeline(request).frames
        pipeline.parts = dataclasses.replace(pipeline.parts, graphs=ForwardGraphs(RecordedCapture(), is_probed=False))
        media = pipeline(request)
    finally:
        unregister_backend(PlanningBackend.name)
    graphs = media.attention_report.graphs
    assert graphs is not None
    assert {reason: count for reason, count in graphs.eager.items() if "of a new prompt" in reason} == {
        "guidance of a new prompt goes on from the keys of the conditional branch, for a few passes": 2 * 2 * 4
    }
    assert abs(media.frames.astype(int) - expected).max() <= 1


def test_explain_counts_every_pass_and_the_keys_it_has_in_sight(pipeline: Pipeline, folder: Path) -> None:
    request = dataclasses.replace(REQUEST, num_frames=41)
    with recorded(pipeline) as passes:
        media = pipeline(request)
    prepared = prepare(RuntimeConfig(model_path=str(folder), device="cpu"))
    explained = explain(prepared, pipeline.resolve(request))
    assert explained.num_forwards == len(passes)
    (attention,) = [part for part in explained.parts if part.name == "attention, self"]
    # 2 layers of 4 heads of 16, one of them in commits.
    layers = [1 if given.step.phase == "commit" else 2 for given in passes]
    pairs = sum(
        num * given.plan.num_frames * given.plan.tokens_per_frame * given.plan.num_keys
        for num, given in zip(layers, passes, strict=True)
    )
    assert attention.operations == pytest.approx(4.0 * pairs * 4 * 16)
    counts = [row.count for row in media.attention_report.rows if row.role == "self"]
    assert sum(counts) == sum(layers)


def test_what_is_refused(pipeline: Pipeline, folder: Path, tmp_path: Path) -> None:
    for values, message in (
        ({"kv_window": 4}, r"kv_window: expected 5 latent frames or more, a sink of 2 and a chunk of 3, got 4"),
        ({"kv_sink": 5}, r"kv_window: expected 8 latent frames"),
        ({"step_cache": "easycache"}, r"step_cache: this model makes a video chunk by chunk"),
        (
            {"chunk_schedule": "rolling"},
            r"kv_window: expected 14 latent frames or more, a sink of 2 and 4 chunks of 3 at once",
        ),
        ({"chunk_schedule": "rolling", "kv_window": 0, "sampler": "unipc"}, r"chunk_schedule: .* expected sampler dmd"),
        ({"positions": "relative"}, r"positions: unknown value"),
        ({"commit_noise": 1.0}, r"commit_noise: expected a number from 0 to 0.999"),
    ):
        with pytest.raises(RequestError, match=message):
            pipeline.resolve(dataclasses.replace(REQUEST, **values))
    with pytest.raises(ConfigError, match="calibrate: this model makes a video chunk by chunk"):
        calibrate(pipeline, [REQUEST])
    with pytest.raises(BackendUnavailableError, match="vmoba_attn: cannot do cached_keys"):
        load_pipeline(str(folder), device="cpu", attention={"per_role": {"self": "vmoba_attn"}})
    plain = load_pipeline("shapes", device="cpu")
    for name, value in (("kv_window", 9), ("kv_sink", 0), ("chunk_frames", 2), ("positions", "window")):
        with pytest.raises(RequestError, match=f"{name}: this model makes a clip at once, without a key-value cache"):
            plain.resolve(GenerationRequest("a red circle", **{name: value}))  # type: ignore[arg-type]
    for keys, message in (
        ({"sink_size": 7}, "'sink_size': expected a number of latent frames from 0 to 6"),
        ({"local_attn_size": 0}, "'local_attn_size'"),
        ({"rope_cache_policy": "other"}, "'rope_cache_policy': expected 'absolute' or 'relativistic'"),
    ):
        changed = write_changed(folder, tmp_path / "changed", keys)
        with pytest.raises(ModelLoadError, match=message):
            load_pipeline(str(changed), device="cpu")


def write_changed(folder: Path, target: Path, keys: dict[str, Any]) -> Path:
    import json
    import shutil

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    path = target / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    return target
