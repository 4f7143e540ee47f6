"""The key-value cache of causal video: windows, slots, plans, stores, and the attention layer that reads them."""

from __future__ import annotations

import random

import pytest
import torch
from dense_backends import SPARSE

from diffusion_runtime.attention import AttentionConfig, LocalAttention, TokenLayout
from diffusion_runtime.attention.backends.registry import available_names, find_backend
from diffusion_runtime.attention.cache.copies import put_tokens
from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.cache.plan import plan_forward
from diffusion_runtime.attention.cache.slots import FrameSlots
from diffusion_runtime.attention.cache.store import KeyStore
from diffusion_runtime.attention.cache.window import FrameWindow
from diffusion_runtime.attention.cached_calls import CACHED_KEYS
from diffusion_runtime.attention.context import AttentionContext, RequestCache
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.denoising.chunks import ChunkPlan
from diffusion_runtime.denoising.noise import ChunkNoise
from diffusion_runtime.errors import BackendUnavailableError, ConfigError
from diffusion_runtime.report.attention_report import AttentionRecorder

HEIGHT, WIDTH, HEADS, HEAD_DIM = 1, 2, 2, 8
PER_FRAME = HEIGHT * WIDTH


def rolled(chunks: list[range], sink: int, span: int | None) -> list[list[int]]:
    """The frames in sight of each chunk, by a buffer that rolls when it is full, as the authors' code keeps it."""
    buffer: list[int] = []
    seen = []
    for chunk in chunks:
        buffer += chunk
        if span is not None and len(buffer) > span:
            buffer = buffer[:sink] + buffer[sink:][-(span - sink) :]
        seen.append(list(buffer))
    return seen


@pytest.mark.parametrize(("chunk_frames", "first"), [(1, None), (3, None), (3, 1), (4, 1)])
def test_frames_in_sight_are_those_of_a_rolling_buffer(chunk_frames: int, first: int | None) -> None:
    chunks = [chunk.frames for chunk in ChunkPlan(chunk_frames, first, 23)]
    assert [frame for frames in chunks for frame in frames] == list(range(23))
    for sink, span in ((0, None), (0, 4), (2, 7), (3, 9), (3, 40)):
        slots = FrameSlots.of(FrameWindow(sink, span), 23)
        for frames, expected in zip(chunks, rolled(chunks, sink, span), strict=True):
            plan = plan_forward(slots, frames, PER_FRAME)
            assert sorted(plan.key_frames) == expected, (sink, span, frames)
            # The whole past is one run of the cache, and writing needs two copies at most.
            assert plan.read_run == slice(0, len(expected) * PER_FRAME)
            assert len(plan.write_copies) <= 2
            assert (
                dict(zip(plan.key_frames, plan.read, strict=True)).items()
                >= dict(zip(frames, plan.write, strict=True)).items()
            )


def layer_of(**keywords: object) -> LocalAttention:
    return LocalAttention(HEADS, HEAD_DIM, cached_keys=True, **keywords)  # type: ignore[arg-type]


def attend(
    layer: LocalAttention, state: RequestCache, slots: FrameSlots, frames: range, qkv: torch.Tensor
) -> torch.Tensor:
    """qkv: [3, batch, tokens of the frames, heads, head_dim]."""
    plan = plan_forward(slots, frames, PER_FRAME)
    context = AttentionContext(TokenLayout((len(frames), HEIGHT, WIDTH)), state=state, cache=FrameCache(plan))
    out: torch.Tensor = layer(*qkv.clone(), context)
    return out


def test_a_ring_equals_a_growing_cache_in_any_order_of_its_slots_and_never_grows() -> None:
    window, layer = FrameWindow(2, 6), layer_of()
    chunks = [chunk.frames for chunk in ChunkPlan(2, 1, 199)]
    order = tuple(random.Random(3).sample(range(6), 6))
    ring, growing = FrameSlots.of(window, None), FrameSlots(window, 199)
    states = [RequestCache() for _ in range(3)]
    addresses = set()
    generator = torch.Generator().manual_seed(0)
    for frames in chunks:
        qkv = torch.randn(3, 2, len(frames) * PER_FRAME, HEADS, HEAD_DIM, generator=generator)
        kept, expected, permuted = (
            attend(layer, state, slots, frames, qkv)
            for state, slots in zip(states, (ring, growing, FrameSlots(window, 6, order)), strict=True)
        )
        torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(permuted, expected, rtol=1e-5, atol=1e-5)
        (store,) = states[0].find_all(CACHED_KEYS)
        assert isinstance(store, KeyStore)
        addresses.add(store.keys_and_values.data_ptr())  # type: ignore[attr-defined]
        assert store.num_bytes == 2 * 2 * 6 * PER_FRAME * HEADS * HEAD_DIM * 4
    assert len(chunks) == 100
    assert len(addresses) == 1


def test_what_a_cache_refuses() -> None:
    with pytest.raises(ConfigError, match="sink 3 and span 3"):
        FrameWindow(3, 3)
    with pytest.raises(ConfigError, match="kv_window: a video without an end needs a window"):
        FrameSlots.of(FrameWindow(), None)
    with pytest.raises(ConfigError, match="frame 5 of a video of 5 latent frames"):
        plan_forward(FrameSlots.of(FrameWindow(), 5), range(3, 6), PER_FRAME)
    slots, qkv = FrameSlots.of(FrameWindow(), 6), torch.zeros(3, 1, 3 * PER_FRAME, HEADS, HEAD_DIM)
    of_two = FrameCache(plan_forward(slots, range(2), PER_FRAME))
    context = AttentionContext(TokenLayout((3, HEIGHT, WIDTH)), cache=of_two)
    with pytest.raises(ConfigError, match="expected a grid of 2 frames"):
        layer_of()(*qkv, context)


def test_sparse_backends_do_not_read_cached_keys() -> None:
    """A general choice passes over them, which the report says; one for the role is refused when the layer is made."""
    capable = {name for name in available_names() if "cached_keys" in _features(name)}
    assert {"torch_sdpa", "reference", "fa", "sage_attn", "flex_attn", "measured"} <= capable
    assert capable.isdisjoint(SPARSE)
    layer, recorder = layer_of(policy=AttentionPolicy(config=AttentionConfig.parse("vmoba_attn"))), AttentionRecorder()
    plan = plan_forward(FrameSlots.of(FrameWindow(), 3), range(3), PER_FRAME)
    context = AttentionContext(TokenLayout((3, HEIGHT, WIDTH)), recorder=recorder, cache=FrameCache(plan))
    layer(*torch.zeros(3, 1, 3 * PER_FRAME, HEADS, HEAD_DIM), context)
    assert recorder.report().rows[0].backend == "torch_sdpa"
    assert any("vmoba_attn not used" in note and "cached_keys" in note for note in recorder.report().notes)
    chosen = AttentionPolicy(config=AttentionConfig.parse({"per_role": {"self": "vmoba_attn"}}))
    with pytest.raises(BackendUnavailableError, match=r"vmoba_attn: cannot do cached_keys(.|\n)*torch_sdpa"):
        layer_of(policy=chosen)


def _features(name: str) -> frozenset[str]:
    backend = find_backend(name)
    assert backend is not None
    return backend.capability.features


def test_noise_depends_on_seed_chunk_and_draw_alone() -> None:
    one, several = ChunkNoise((2, 3, 4), [5]), ChunkNoise((2, 3, 4), [9, 5])
    assert torch.equal(one.draw(2, 3, 1)[0], several.draw(2, 3, 1)[1])
    drawn = [one.draw(*key) for key in ((0, 3, 0), (0, 3, 1), (1, 3, 0), (1, 3, 1), (0, 3, "commit"))]
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    # The first bytes of blake2b, as any other program can compute them.
    assert drawn[0][0, 0, 0, 0, 0] == pytest.approx(-1.9658882, abs=1e-6)


def test_tokens_are_put_at_an_index_whatever_their_strides() -> None:
    index = torch.tensor([5, 0, 3])
    fused = torch.randn(2, 3, 3, 2, 8, dtype=torch.bfloat16)
    for tokens in (fused[:, :, 1], fused[..., :6][:, :, 0], fused[..., 1:5][:, :, 2], fused[..., ::2][:, :, 0]):
        cached = torch.randn(2, 7, *tokens.shape[2:], dtype=torch.bfloat16)
        expected = cached.clone()
        expected[:, index] = tokens
        assert put_tokens(cached, index, tokens) is cached
        assert torch.equal(cached, expected)
    with pytest.raises(RuntimeError, match="index_copy_"):
        put_tokens(torch.zeros(2, 7, 2, 8, dtype=torch.float16), index, fused[:, :, 1])
