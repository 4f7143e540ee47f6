"""Keys and values in fp8: element and attention error, bytes, scales of the first commit, positions after reading."""

from __future__ import annotations

import torch

from diffusion_runtime.attention import LocalAttention, TokenLayout
from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.cache.plan import CachePlan, plan_forward
from diffusion_runtime.attention.cache.quantised import Fp8Store
from diffusion_runtime.attention.cache.slots import FrameSlots
from diffusion_runtime.attention.cache.store import KeyStore, KeyStoreSize, RingStore
from diffusion_runtime.attention.cache.window import FrameWindow
from diffusion_runtime.attention.context import AttentionContext, RequestCache
from diffusion_runtime.core.step_info import StepInfo

BATCH, PER_FRAME, HEADS, HEAD_DIM = 2, 6, 4, 16
SLOTS = FrameSlots.of(FrameWindow(1, 5), None)


def drawn(num_frames: int, seed: int, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with a mean of their own per head, and values."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, num_frames * PER_FRAME, HEADS, HEAD_DIM)
    mean = 5 * torch.randn(1, 1, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    return spread * torch.randn(shape, generator=generator) + mean, spread * torch.randn(shape, generator=generator)


def plan_of(frames: range, phase: str) -> CachePlan:
    return plan_forward(SLOTS, frames, PER_FRAME, phase)


def store_of(kind: type, dtype: torch.dtype = torch.float32, heads: int = HEADS) -> KeyStore:
    store = kind(KeyStoreSize(BATCH, 5 * PER_FRAME, heads, HEAD_DIM, dtype, torch.device("cpu")))
    assert isinstance(store, KeyStore)
    return store


def passed(store: KeyStore, frames: range, phase: str, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    plan = plan_of(frames, phase)
    store.write(plan, k, v)
    return store.read(plan)


def test_the_past_is_within_a_sixteenth_and_the_chunk_itself_is_exact() -> None:
    store, exact = store_of(Fp8Store), store_of(RingStore)
    assert isinstance(store, Fp8Store)
    first, seen = range(2), []
    for frames in (first, range(2, 4), range(4, 6), range(6, 8)):
        noisy, clean = drawn(2, frames.start + 100), drawn(2, frames.start + 1)
        for phase, (k, v) in (("denoise", noisy), ("commit", clean)):
            found, expected = passed(store, frames, phase, k, v), passed(exact, frames, phase, k, v)
            plan = plan_of(frames, phase)
            own = torch.cat([torch.arange(place.start, place.stop) for _, place in plan.own_copies])
            past = torch.ones(plan.num_keys, dtype=torch.bool).index_fill(0, own, False)
            for index, (x, y) in enumerate(zip(found, expected, strict=True)):
                assert torch.equal(x[:, own], y[:, own])
                centred = (y - store.mean if index == 0 else y)[:, past]
                # Rounded to 3 bits behind the leading one; below the smallest normal number, to steps of 2^-9.
                bound = torch.maximum(2**-4 * centred.abs(), 2**-10 * store.scale[index]) * (1 + 1e-4) + 1e-6
                fits = centred.abs() <= 448 * store.scale[index]
                assert fits.sum() >= 0.99 * fits.numel()
                assert ((x - y)[:, past].abs() <= bound)[fits].all(), (frames, phase)
            seen.append(int(past.sum()))
    # With the sink and past the end of the ring.
    assert seen == [0, 0, 12, 12, 18, 18, 18, 18]
    largest = (drawn(2, 1)[1]).abs().amax(dim=(1, 3))
    torch.testing.assert_close(store.scale[1, :, 0, :, 0], 1.25 * largest / 448)
    before = store.num_saturated
    k, v = drawn(2, 9, spread=3.0)
    passed(store, range(8, 10), "commit", k, v)
    too_large = ((k - store.mean).abs() > 448 * store.scale[0]).sum() + (v.abs() > 448 * store.scale[1]).sum()
    assert store.num_saturated - before == int(too_large) > 0
    assert torch.isfinite(passed(store, range(10, 12), "denoise", k, v)[0]).all()


def test_bytes_and_heads() -> None:
    """Half of bfloat16; each process quantises its own heads to the same numbers."""
    for dtype in (torch.bfloat16, torch.float32):
        store, plain = store_of(Fp8Store, dtype), store_of(RingStore, dtype)
        assert isinstance(store, Fp8Store)
        assert store.codes.num_bytes * dtype.itemsize == plain.num_bytes
        # A scale per head, and a mean as large as one token's keys.
        k, v = (x.to(dtype) for x in drawn(2, 1))
        passed(store, range(2), "commit", k, v)
        keys, _ = passed(store, range(2, 4), "denoise", k, v)
        assert keys.dtype == dtype
        assert float((keys[:, : 2 * PER_FRAME] - k).norm() / (k - store.mean).norm()) < 0.04
        assert (
            store.num_bytes - store.codes.num_bytes == (2 * BATCH * HEADS + BATCH * HEADS * HEAD_DIM) * dtype.itemsize
        )
    k, v = drawn(2, 1)
    whole, half = store_of(Fp8Store), store_of(Fp8Store, heads=2)
    passed(whole, range(2), "commit", k, v)
    passed(half, range(2), "commit", k[:, :, 2:], v[:, :, 2:])
    k, v = drawn(2, 2)
    for x, y in zip(
        passed(whole, range(2, 4), "denoise", k, v),
        passed(half, range(2, 4), "denoise", k[:, :, 2:], v[:, :, 2:]),
        strict=True,
    ):
        assert torch.equal(x[:, :, 2:], y)


def test_attention_over_fp8_keys() -> None:
    """In the Frobenius norm, with positions before the cache and after it, in the order of a graph and without."""
    angles = torch.outer(torch.arange(5 * PER_FRAME) // PER_FRAME, 10.0 ** -torch.arange(HEAD_DIM // 2))
    rotations = torch.polar(torch.ones_like(angles), angles)
    for positions in ("absolute", "window"):
        outputs: dict[object, torch.Tensor] = {}
        for kind in (RingStore, Fp8Store):
            for is_indexed in (False, True):
                layer, state = LocalAttention(HEADS, HEAD_DIM, cached_keys=True), RequestCache()
                for frames, phase in ((range(2), "commit"), (range(2, 4), "commit"), (range(4, 6), "denoise")):
                    plan = plan_of(frames, phase)
                    if is_indexed and plan.is_full:
                        plan = plan.with_write_index(torch.device("cpu"))
                    cache = FrameCache(plan, positions, kind)
                    if positions == "window":
                        cache = cache.with_rotations(rotations[: 2 * PER_FRAME], rotations[: plan.num_keys])
                    step = StepInfo(phase=phase)  # type: ignore[arg-type]
                    context = AttentionContext(TokenLayout((2, 2, 3)), step, state, cache=cache)
                    k, v = drawn(2, frames.start + 1)
                    outputs[kind, is_indexed] = layer(drawn(2, frames.start + 50)[1], k, v, context)
        exact, found = outputs[RingStore, False], outputs[Fp8Store, False]
        assert torch.equal(found, outputs[Fp8Store, True])
        error = float((found - exact).norm() / exact.norm())
        assert 1e-3 < error < 0.04, (positions, error)
