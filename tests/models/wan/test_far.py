"""AnyFlow-FAR: our transformer and whole generation against diffusers' AnyFlowFARTransformer3DModel and
AnyFlowFARPipeline on the same weights, float32 on the CPU.

Diffusers pads the queries and keys of a denoising pass to a multiple of 128 tokens and attends to the zeros, which the
authors' own code does not, nor do we. It is compared as it is where a chunk needs none, and elsewhere without those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import AnyFlowFARPipeline
from diffusers.models.transformers import transformer_anyflow_far
from family_parity import RecordingSampler, load_theirs
from offloaded_pipelines import StrictTransfers, load_offloaded
from safetensors.torch import save_file
from tables import table
from tiny_flow_maps import change_json, with_authors_names, write_tiny_flow_map

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.denoising.chunks import passes_of
from diffusion_runtime.denoising.noise import ChunkNoise
from diffusion_runtime.errors import BackendUnavailableError, ModelLoadError, RequestError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.loading import inspect_pipeline, prepare
from diffusion_runtime.models.cache_memory import cache_bytes
from diffusion_runtime.rules.batch_settings import BatchSettings

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")

# 2 x 3 tokens of a frame; a large patch leaves out a third of them.
REQUEST = GenerationRequest(
    "a red circle moving left", "a yellow square", height=32, width=48, num_frames=41, num_inference_steps=2, seed=5
)
PARTITION = (1, 3, 3, 3, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_flow_map(tmp_path_factory.mktemp("far") / "tiny", is_far=True, chunk_partition=PARTITION)


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Pipeline:
    return load_pipeline(str(folder), device="cpu")


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Denoising passes of diffusers without the zeros behind the keys; gets their numbers."""
    attend, numbers = transformer_anyflow_far.dispatch_attention_fn, []

    def without_zeros(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **others: Any) -> torch.Tensor:
        if others["attn_mask"] is None and others["backend"] == "flex":
            num_kept = int(key.ne(0).flatten(2).any(2).any(0).sum())
            assert not key[:, num_kept:].any()
            numbers.append(key.shape[1] - num_kept)
            key, value = key[:, :num_kept], value[:, :num_kept]
        return attend(query, key, value, **others)

    monkeypatch.setattr(transformer_anyflow_far, "dispatch_attention_fn", without_zeros)
    return numbers


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Gets our latents after every step of every chunk."""
    latents: list[torch.Tensor] = []
    build = BatchSettings.build_sampler

    def recorded(*given: Any, **named: Any) -> RecordingSampler:
        return RecordingSampler(build(*given, **named), latents)

    monkeypatch.setattr(BatchSettings, "build_sampler", recorded)
    return latents


def run_theirs(
    folder: Path, ours: Pipeline, request: GenerationRequest, partition: Sequence[int], **others: Any
) -> tuple[list[torch.Tensor], numpy.ndarray]:
    """Their latents after every step of every chunk, in our shape, and their frames in [0, 1]."""
    found = ours.resolve(request)
    settings = BatchSettings.of([found], ours.rules.sampling)
    shape = settings.sizes.sample_shape(settings.size)
    noise = ChunkNoise((shape[0], *shape[2:]), [request.seed])
    drawn = torch.cat([noise.draw(index, size, 0) for index, size in enumerate(partition)], dim=2)
    latents: list[torch.Tensor] = []

    def keep(pipeline: object, step: int, timestep: object, tensors: dict[str, Any]) -> dict[str, Any]:
        latents.append(tensors["latents"].transpose(1, 2).clone())
        return {}

    frames = load_theirs(AnyFlowFARPipeline, folder)(
        **{
            "prompt": found.prompt,
            "negative_prompt": found.negative_prompt,
            "height": found.height,
            "width": found.width,
            "num_frames": found.num_frames,
            "num_inference_steps": found.num_inference_steps,
            "guidance_scale": found.guidance_scale,
            "latents": drawn,
            "max_sequence_length": ours.text_encoder.max_tokens,
            "chunk_partition": list(partition),
            "callback_on_step_end": keep,
            "output_type": "np",
            **others,
        }
    ).frames
    return latents, frames[0]


def assert_alike(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize(
    ("config", "values", "partition"),
    [
        ({}, {"guidance_scale": 3.0}, PARTITION),
        (
            {"full_chunk_limit": 2, "deltatime_type": "t-r", "compressed_patch_size": (1, 2, 4)},
            {"num_inference_steps": 1, "chunk_frames": 2, "first_chunk_frames": 2, "num_frames": 29},
            (2, 2, 2, 2),
        ),
    ],
    ids=["guided", "one full chunk"],
)
def test_generation_equals_diffusers(
    tmp_path: Path,
    kept: list[torch.Tensor],
    dropped: list[int],
    config: dict[str, Any],
    values: dict[str, Any],
    partition: tuple[int, ...],
) -> None:
    folder = write_tiny_flow_map(tmp_path / "tiny", is_far=True, **config)
    ours, request = load_pipeline(str(folder), device="cpu"), dataclasses.replace(REQUEST, **values)
    media = ours(request)
    latents, frames = run_theirs(folder, ours, request, partition)
    # Latents after every step, to what the comparison of single forward passes is held to.
    assert_alike(kept, latents)
    assert numpy.abs(media.frames / 255 - frames).max() <= 2 / 255
    assert frames.std() > 0.02
    assert set(dropped) == {128 - 6 * size for size in partition}


def test_as_it_is_where_no_keys_are_padded(folder: Path, kept: list[torch.Tensor]) -> None:
    ours = load_pipeline(str(folder), device="cpu")
    request = dataclasses.replace(
        REQUEST, height=128, width=256, num_frames=13, chunk_frames=1, first_chunk_frames=1, num_inference_steps=1
    )
    media = ours(request)
    latents, frames = run_theirs(folder, ours, request, (1, 1, 1, 1))
    assert_alike(kept, latents)
    assert numpy.abs(media.frames / 255 - frames).max() <= 2 / 255


def test_another_prompt_on_the_way_equals_a_video_that_goes_on(
    folder: Path, kept: list[torch.Tensor], dropped: list[int]
) -> None:
    """With recache the past is encoded anew under the new prompt, as where diffusers goes on from given latents."""
    ours = load_pipeline(str(folder), device="cpu")
    request = dataclasses.replace(REQUEST, prompt_switches=[["25f", "a blue star"]], switch_mode="recache")
    ours(request)
    # The last step of chunks 0 to 2.
    before = torch.cat([kept[index] for index in (1, 3, 5)], dim=2).transpose(1, 2)
    latents, _ = run_theirs(folder, ours, REQUEST, PARTITION, prompt="a blue star", video_latents=before)
    assert_alike(kept[6:], latents)
    again = [each.clone() for each in kept[6:]]
    kept.clear()
    ours(dataclasses.replace(request, switch_mode="keep"))
    assert (kept[0] - again[0]).abs().max() > 0.01 or (kept[-1] - again[-1]).abs().max() > 0.01


def test_the_folders_say_how_a_video_is_cut(pipeline: Pipeline, folder: Path, tmp_path: Path) -> None:
    found = pipeline.resolve(GenerationRequest("a red circle"))
    assert (found.chunk_frames, found.first_chunk_frames, found.kv_window) == (3, 1, 0)
    assert (found.sampler, found.num_inference_steps, found.guidance_scale) == ("flow_map_euler", 4, 1.0)
    assert (found.flow_shift, found.num_frames) == (5.0, 81)
    authors = with_authors_names(write_tiny_flow_map(tmp_path / "tiny", is_far=True), init_far_model=True)
    frames = [each(REQUEST).frames for each in (pipeline, load_pipeline(str(authors), device="cpu"))]
    assert numpy.array_equal(*frames)


def test_streams_of_any_length(pipeline: Pipeline) -> None:
    """A stream gives a generation's frames, a window bounds what is kept, and longer videos begin as shorter ones."""
    whole = pipeline(REQUEST)
    with pipeline.stream(REQUEST, keeps_frames=True) as stream:
        assert [len(chunk.frames) for chunk in stream] == [1, 12, 12, 12, 4]
    assert numpy.array_equal(stream.media().frames, whole.frames)
    with pipeline.stream(REQUEST, keeps_frames=True) as stream:
        next(stream), next(stream), next(stream)
        with stream.fork("a blue star") as fork, stream.fork() as same:
            next(fork), list(same), list(fork)
    assert numpy.array_equal(same.media().frames, whole.frames)
    recipe = GenerationRequest.from_dict(fork.recipe["request"])
    assert numpy.array_equal(fork.media().frames, pipeline(recipe).frames)
    assert not numpy.array_equal(fork.media().frames, whole.frames)
    cache = whole.attention_report.cache
    assert cache is not None
    # 9 frames of 6 tokens, and 4 of one.
    assert (cache.cached_frames, cache.compressed_frames, cache.window_frames) == (13, 4, None)
    assert cache.num_bytes == 2 * 2 * (9 * 6 + 4) * 4 * 16 * 4
    assert "for 13 frames, 4 of them in larger patches" in str(cache)
    # A chunk; then those that are full, again; then also one in large patches.
    assert cache.num_commits == 1 + 2 + 3 + 3
    bounded = dataclasses.replace(REQUEST, num_frames=81, kv_window=14, kv_sink=1, num_inference_steps=1)
    with pipeline.stream(bounded, endless=True, keeps_frames=True) as stream:
        sizes = [(next(stream), stream.cache_bytes)[1] for _ in range(8)]
    assert len(set(sizes)) == 1
    assert sizes[0] == 2 * 2 * (9 * 6 + 5) * 4 * 16 * 4
    found = [pipeline(dataclasses.replace(bounded, kv_window=window)).frames for window in (14, 0)]
    assert numpy.array_equal(stream.media().frames[: 7 * 12 - 11], found[0][: 7 * 12 - 11])
    # Five frames in large patches are in sight until the sixth chunk, and then fewer than all.
    differs = (found[0] != found[1]).reshape(81, -1).any(1)
    assert not differs[: 1 + 4 * 12].any()
    assert differs[-1]


def test_planned_and_explained(pipeline: Pipeline, folder: Path) -> None:
    prepared = prepare(RuntimeConfig(str(folder), device="cpu"), is_dry_run=True)
    request = prepared.rules.resolve(dataclasses.replace(REQUEST, guidance_scale=3.0), None)
    settings = BatchSettings.of([request], prepared.rules.sampling)
    passes, kinds = settings.chunking.cache_passes(), []
    pairs = 0
    for frames, kind in passes_of(request, settings.chunking.plan, prepared.model.sampling.history):
        plan = passes.plan(frames, kind)
        # Commits leave out the second layer of two.
        num_layers = 2 if kind == "denoise" else 1
        pairs += num_layers * plan.num_frames * plan.tokens_per_frame * plan.num_keys
        kinds.append(kind)
    explained = explain(prepared, request)
    # Both branches in one pass.
    assert explained.num_forwards == len(kinds) == 5 * 2 + 9
    (attention,) = [part for part in explained.parts if part.name == "attention, self"]
    assert attention.operations == pytest.approx(2 * 4.0 * pairs * 4 * 16)
    media = pipeline(dataclasses.replace(REQUEST, guidance_scale=3.0))
    counts = [row.count for row in media.attention_report.rows if row.role == "self"]
    assert sum(counts) == 2 * 10 + 9
    planned = cache_bytes([prepared.transformer], request, passes.capacity, 2, torch.float32)
    assert planned == media.attention_report.cache.num_bytes


def test_stored_in_8_bits_and_offloaded(folder: Path, pipeline: Pipeline) -> None:
    plain = pipeline(REQUEST)
    small = pipeline(dataclasses.replace(REQUEST, kv_cache_dtype="fp8_e4m3"))
    rows = [media.attention_report.cache for media in (plain, small)]
    assert rows[1].num_bytes < 0.4 * rows[0].num_bytes
    assert 0 < numpy.abs(plain.frames.astype(float) - small.frames).mean() < 6
    transfers = StrictTransfers()
    streamed = load_offloaded(str(folder), "layers", {"transformer": 1}, transfers)
    assert streamed.parts.offloading is not None
    for part in streamed.parts.offloading.parts:
        transfers.hide(part.arena.bytes)
    assert numpy.array_equal(streamed(REQUEST).frames, plain.frames)


def test_attention_of_its_roles(folder: Path) -> None:
    """Sparse backends lay out one grid: passed over, and refused where they were asked for by name."""
    config = {"default": "sliding_tile_attn"}
    passed_over = inspect_pipeline(RuntimeConfig(str(folder), device="cpu", attention=config)).attention
    (chosen,) = [row.decision for row in passed_over if row.role == "self"]
    assert chosen.backend == "torch_sdpa"
    assert any("cached_keys" in why for name, why in chosen.rejected if name == "sliding_tile_attn")
    with pytest.raises(BackendUnavailableError, match="cached_keys"):
        inspect_pipeline(
            RuntimeConfig(str(folder), device="cpu", attention={"per_role": {"self": "sliding_tile_attn"}})
        )


def test_a_lora_of_the_large_patches(folder: Path, pipeline: Pipeline, tmp_path: Path) -> None:
    """Of the causal checkpoints alone, under both spellings of its name."""
    path = tmp_path / "lora.safetensors"
    name = "diffusion_model.far_patch_embedding"
    factors = {"lora_A": torch.randn(2, 16, 1, 4, 4), "lora_B": torch.randn(64, 2, 1, 1, 1)}
    save_file({f"{name}.{factor}.weight": tensor for factor, tensor in factors.items()}, path)
    changed = load_pipeline(str(folder), device="cpu", lora=[str(path)])(REQUEST).frames
    plain = pipeline(REQUEST).frames
    # Large patches are first read for the fourth chunk.
    assert numpy.array_equal(changed[:25], plain[:25])
    assert not numpy.array_equal(changed[25:], plain[25:])


@table(
    "values, message",
    [
        (
            {"kv_window": 8},
            "kv_window: expected 11 latent frames or more, a sink of 0 and 3 chunks token by token, and",
        ),
        ({"chunk_schedule": "rolling"}, "chunk_schedule: the older frames .* use sequential"),
        ({"positions": "window"}, "positions: the older frames .* expected absolute, got window"),
        ({"page_size": 2}, "page_size: the older frames .* leave it out"),
        ({"switch_mode": "recache_at_once"}, "switch_mode: the older frames .* use recache or keep"),
        ({"height": 16}, "height, width: the older frames .* of 32 x 32 pixels; .* got 16 x 48"),
        ({"sampler": "dmd"}, "sampler: dmd does not integrate"),
    ],
)
def test_what_is_refused(pipeline: Pipeline, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pipeline.resolve(dataclasses.replace(REQUEST, **values))


@table(
    "config, message",
    [
        ({"full_chunk_limit": 1}, "'full_chunk_limit': expected 2 or more"),
        ({"compressed_patch_size": [1, 3, 4]}, "'compressed_patch_size': expected one frame, and 1 to 6 times"),
        ({"compressed_patch_size": [2, 4, 4]}, "'compressed_patch_size': expected one frame"),
        ({"chunk_partition": [1, 3, 2, 3]}, "'chunk_partition': expected a first chunk, chunks of one size"),
        ({"chunk_partition": [1, 0]}, "'chunk_partition': expected a list of numbers"),
        ({"num_frames_per_block": 3}, "num_frames_per_block"),
    ],
)
def test_damaged_folders(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    folder = write_tiny_flow_map(tmp_path / "tiny", is_far=True)
    change_json(folder / "transformer" / "config.json", **config)
    with pytest.raises(ModelLoadError, match=message):
        prepare(RuntimeConfig(str(folder), device="cpu"), is_dry_run=True)


def test_the_pipeline_is_of_its_transformer(tmp_path: Path) -> None:
    folder = write_tiny_flow_map(tmp_path / "tiny", is_far=True)
    change_json(folder / "model_index.json", _class_name="AnyFlowPipeline")
    with pytest.raises(ModelLoadError, match="AnyFlowFARPipeline belongs to one AnyFlowFARTransformer3DModel"):
        prepare(RuntimeConfig(str(folder), device="cpu"), is_dry_run=True)
