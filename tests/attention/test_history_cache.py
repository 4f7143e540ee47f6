"""Compressed history: which tokens are in sight, and that they are those that were written."""

from __future__ import annotations

import pytest
import torch

from diffusion_runtime import GenerationRequest
from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.cache.history import CompressedHistory, HistoryPlan
from diffusion_runtime.attention.cache.store import RingStore
from diffusion_runtime.denoising.chunks import ChunkPlan, cache_passes, passes_of

# 3 x 2 tokens of a frame, and one of a large patch, which leaves out the last row.
LATENTS, GRID, PER_FRAME = (6, 4), (1, 3, 2), {False: 6, True: 1}
HEADS, HEAD_DIM = 2, 4


@pytest.mark.parametrize(
    ("plan", "full_chunks", "window", "sink"),
    [
        (ChunkPlan(3, 1, 21), 2, 0, 0),
        (ChunkPlan(3, 1, 40), 2, 14, 2),
        (ChunkPlan(2, None, 31), 1, 7, 0),
        (ChunkPlan(2, 3, 9), 3, 0, 1),
        (ChunkPlan(3, 3, 5), 2, 0, 0),
    ],
)
def test_what_is_in_sight(plan: ChunkPlan, full_chunks: int, window: int, sink: int) -> None:
    """A pass sees itself, the full chunks before it, and of those before these what the window keeps."""
    request = GenerationRequest("a", num_inference_steps=2, kv_window=window, kv_sink=sink)
    history, chunks = CompressedHistory(full_chunks, (1, 4, 4)), list(plan)
    assert plan.num_frames is not None
    passes = cache_passes(request, plan, GRID, history, (16, plan.num_frames, *LATENTS))
    max_full = min(plan.num_frames, (full_chunks + 1) * plan.largest)
    # Frames in large patches, the sink included.
    kept = window - max_full if window else chunks[max(0, len(chunks) - 1 - full_chunks)].frames.start
    assert (passes.num_slots, passes.num_compressed) == (kept + max_full, kept)
    generator, store = torch.Generator().manual_seed(0), None
    written: dict[tuple[int, bool], torch.Tensor] = {}
    kinds, newest = [], 0
    for frames, kind in passes_of(request, plan, history):
        found, is_large = passes.plan(frames, kind), kind == "compress"
        assert isinstance(found, HistoryPlan)
        assert (found.frames, found.phase) == (frames, "denoise" if kind == "denoise" else "commit")
        assert found.tokens_per_frame == PER_FRAME[is_large]
        keys = torch.randn(1, len(frames) * PER_FRAME[is_large], HEADS, HEAD_DIM, generator=generator)
        cache = FrameCache(found)
        store = cache.new_store(keys) if store is None else store
        store.write(found, keys, -keys)
        assert isinstance(store, RingStore)
        _, seen, values = cache.read(store, keys)
        assert torch.equal(values, -seen)
        for frame, of_frame in zip(frames, keys.split(PER_FRAME[is_large], dim=1), strict=True):
            written[frame, is_large] = of_frame
        newest = next(chunk.index for chunk in chunks if chunk.frames == frames) if kind == "denoise" else newest
        full_from = chunks[max(0, newest + (kind != "denoise") - full_chunks)].frames.start
        last = frames.stop if is_large else full_from
        large = [frame for frame in range(last) if frame < sink or frame >= last - (kept - sink)]
        in_sight = [(frame, True) for frame in large]
        in_sight += [(frame, False) for frame in range(full_from, frames.stop)] if not is_large else []
        assert sorted(found.key_frames) == sorted(frame for frame, _ in in_sight)
        whole = torch.cat([written[each] for each in in_sight], dim=1)
        assert found.num_keys == seen.shape[1] <= found.capacity
        # Keys have no order.
        in_order = [keys[0, keys[0, :, 0, 0].argsort()] for keys in (seen, whole)]
        assert torch.equal(*in_order)
        # In the order of the pass's tokens, for stores that keep its own keys apart.
        own = torch.cat([seen[:, place] for _, place in found.own_copies], dim=1)
        assert torch.equal(own, keys)
        past = [store.keys_and_values[0][:, run] for _, run in found.past_copies]
        rest = torch.cat([keys, *past], dim=1)
        assert torch.equal(rest[0, rest[0, :, 0, 0].argsort()], in_order[0])
        kinds.append(kind)
    assert isinstance(store, RingStore)
    assert store.num_bytes == 2 * passes.capacity * HEADS * HEAD_DIM * 4
    assert kinds.count("denoise") == 2 * len(chunks)
    assert kinds.count("compress") == max(0, len(chunks) - 1 - full_chunks)


def test_a_window_of_all_frames_keeps_all() -> None:
    history, plan = CompressedHistory(2, (1, 4, 4)), ChunkPlan(3, 1, 21)
    requests = [GenerationRequest("a", num_inference_steps=1, kv_window=window, kv_sink=0) for window in (0, 21, 30)]
    found = {cache_passes(request, plan, GRID, history, (16, 21, *LATENTS)).capacity for request in requests}
    # The last three chunks, 8 frames, are never compressed, and there is room for three of the longest.
    assert found == {13 + 9 * 6}
