"""Keys in pages: the contiguous cache to the bit in any order of pages, forks that share them, what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import pytest
import torch
from recorded_capture import RecordedCapture
from tiny_models import write_tiny_wan

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.attention.cache.kinds import StoreKind
from diffusion_runtime.attention.cache.pages import PagedStore, best_page_size, check_page_size
from diffusion_runtime.attention.cache.plan import CachePlan, plan_forward
from diffusion_runtime.attention.cache.slots import FrameSlots
from diffusion_runtime.attention.cache.store import KeyStore, KeyStoreSize
from diffusion_runtime.attention.cache.window import FrameWindow
from diffusion_runtime.cli.report_remarks import remarks_of
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.cache_memory import cache_bytes

BATCH, PER_FRAME, HEADS, HEAD_DIM = 2, 6, 2, 8
# A sink of 1 and a ring of 4.
SLOTS = FrameSlots.of(FrameWindow(1, 5), None)
SIZE = KeyStoreSize(BATCH, 5 * PER_FRAME, HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
# Three times around the ring, chunks of two frames, each denoised and committed.
PASSES = [(range(at, at + 2), phase) for at in range(0, 14, 2) for phase in ("denoise", "commit")]


def drawn(num_frames: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, BATCH, num_frames * PER_FRAME, HEADS, HEAD_DIM)
    keys, values = torch.randn(shape, generator=generator)
    return keys, values


def plan_of(frames: range, phase: str = "denoise", oldest: int = 0) -> CachePlan:
    return plan_forward(SLOTS, frames, PER_FRAME, phase, oldest)


def assert_equal(one: KeyStore, other: KeyStore, plan: CachePlan) -> None:
    for x, y in zip(one.read(plan), other.read(plan), strict=True):
        assert torch.equal(x, y), plan


def paged(page_size: int = 2) -> PagedStore:
    return PagedStore(SIZE, page_size)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_pages_in_any_order_hold_what_a_row_holds(is_fp8: bool) -> None:
    """Window and sink past the end of the ring, in plain passes and in those whose places are on the device."""
    for page_size, is_indexed in itertools.product((1, 2, 3, 6), (False, True)):
        row, pages = StoreKind(is_fp8)(SIZE), StoreKind(is_fp8, page_size)(SIZE)
        pool = (pages.codes if is_fp8 else pages).pool  # type: ignore[attr-defined]
        random.Random(page_size).shuffle(pool.free)
        for seed, (frames, phase) in enumerate(PASSES):
            plan = plan_of(frames, phase)
            plan = plan.with_write_index(SIZE.device) if is_indexed and plan.is_full else plan
            k, v = drawn(2, seed)
            for store in (row, pages):
                store.write(plan, k, v)
            assert_equal(row, pages, plan)
        # As a commit under a new prompt, which sees the sink and a part of the ring.
        part = plan_of(range(12, 14), oldest=11)
        assert part.read_run is None
        for store in (row, pages):
            store.write(part, *drawn(2, 99))
        assert_equal(row, pages, part)
        assert pool.num_pages == BATCH * 5 * PER_FRAME // page_size
        assert pages.num_bytes - row.num_bytes == 4 * pool.num_pages


def test_a_fork_shares_pages_until_either_is_written_to() -> None:
    store, alone = paged(), paged()
    for seed, (frames, phase) in enumerate(PASSES[:4]):
        for each in (store, alone):
            each.write(plan_of(frames, phase), *drawn(2, seed))
    before, table = store.num_bytes, store.block_table.nbytes
    fork, pool, last = store.fork(), store.pool, plan_of(range(2, 4), "commit")
    assert_equal(store, fork, last)
    # Four of five frames are shared, and so is the room for the fifth: together they take what one took.
    assert pool.num_pages == len(pool.free) + 4 * 3 * BATCH == 30
    assert fork.num_bytes + store.num_bytes - table == before
    assert fork.num_shared_bytes == store.num_shared_bytes == (before - table) * 4 // 5
    # Written in the fork: the sink and the first frames of the ring stay shared.
    plan = plan_of(range(4, 6))
    fork.write(plan, *drawn(2, 50))
    assert_equal(store, alone, last)
    alone.write(plan, *drawn(2, 50))
    assert_equal(fork, alone, plan)
    shared = [pool.num_references(page) for page in store.block_table[:, : 4 * 3].flatten().tolist()]
    assert sorted(shared) == [1] * 3 * BATCH + [2] * 9 * BATCH
    # Written in the store it was made from: the fork keeps its own. Pools grow by what is missing, here two frames.
    store.write(plan, *drawn(2, 60))
    assert pool.num_pages == 30 + 2 * 3 * BATCH == sum(each.num_bytes - table for each in (store, fork)) / (2 * 128)
    assert_equal(fork, alone, plan)
    assert not torch.equal(store.read(plan)[0], fork.read(plan)[0])
    in_use = pool.num_pages - len(pool.free)
    fork.release()
    assert in_use - (pool.num_pages - len(pool.free)) == 2 * 3 * BATCH
    kept = store.read(plan)
    store.release()
    assert len(pool.free) == len(set(pool.free)) == pool.num_pages
    assert store.num_bytes == 0
    assert torch.isfinite(kept[0]).all()


def test_page_sizes() -> None:
    assert [best_page_size(tokens) for tokens in (1560, 880, 3600, 256, 64, 6)] == [120, 88, 120, 128, 64, 6]
    check_page_size(120, 1560)
    for size in (128, 3120, 0):
        with pytest.raises(RequestError, match=rf"1560 tokens.*divides it \(.*520, 780, 1560\), got {size}.* 120$"):
            check_page_size(size, 1560)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = {"num_frames_per_block": 3, "local_attn_size": 7, "sink_size": 2}
    return write_tiny_wan(tmp_path_factory.mktemp("wan") / "causal", causal=keys)


def test_a_video_in_pages_is_the_video(folder: Path) -> None:
    """Frames to the bit, planned bytes, the report, CUDA graphs' recorded operators, another prompt on the way."""
    pipeline = load_pipeline(str(folder), device="cpu")
    # 2 x 2 tokens per frame.
    plain = GenerationRequest("a red circle", height=32, width=32, num_frames=45, seed=4)
    for values in (
        {},
        {"positions": "window", "prompt_switches": ((24, "a blue star"),)},
        {"kv_cache_dtype": "fp8_e4m3"},
    ):
        request = dataclasses.replace(plain, **values)  # type: ignore[arg-type]
        in_pages = dataclasses.replace(request, page_size=2)
        expected, media = pipeline(request), pipeline(in_pages)
        assert (media.frames == expected.frames).all(), values
        cache, row = media.attention_report.cache, expected.attention_report.cache
        tables = 2 * 7 * 2 * 4
        assert (cache.page_size, cache.num_bytes - row.num_bytes) == (2, tables)
        remarks = remarks_of([media.attention_report.to_dict()])
        assert any(line == str(cache) and line.endswith("in pages of 2 tokens") for line in remarks)
        # torch's kernels take no block table.
        copied = {row.keys for row in media.attention_report.rows if row.role == "self"}
        assert copied == {"read back" if "kv_cache_dtype" in values else "gathered"}
        assert all(row.keys is None for row in media.attention_report.rows if row.role == "cross")
        planned = [
            cache_bytes([pipeline.transformer], pipeline.resolve(x), 4 * 7, 1, torch.float32)
            for x in (request, in_pages)
        ]
        # What one of two layers gathers: as many bytes as it stores.
        stored = 1 if "kv_cache_dtype" in values else 4
        assert planned[1] - planned[0] == 2 * 7 * 4 * 4 * 16 * stored
    eager = pipeline(dataclasses.replace(plain, num_frames=81, page_size=2))
    pipeline.parts = dataclasses.replace(pipeline.parts, graphs=ForwardGraphs(RecordedCapture(), is_probed=False))
    replayed = pipeline(dataclasses.replace(plain, num_frames=81, page_size=2))
    assert replayed.attention_report.graphs.num_replayed >= 12
    assert abs(replayed.frames.astype(int) - eager.frames).max() <= 1


def test_what_is_refused(folder: Path) -> None:
    request = GenerationRequest("a red circle", height=32, width=32, num_frames=21, page_size=3)
    with pytest.raises(
        RequestError, match=r"page_size: a latent frame has 4 tokens.*\(1, 2, 4\), got 3; use --page-size 4"
    ):
        load_pipeline(str(folder), device="cpu").resolve(request)
    with pytest.raises(
        RequestError,
        match="page_size: this model makes a clip at once, without a key-value cache; leave it out or use --model-path",
    ):
        load_pipeline("shapes", device="cpu").resolve(GenerationRequest("a red circle", page_size=4))
