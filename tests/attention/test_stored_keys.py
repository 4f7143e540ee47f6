"""Keys read where they are stored: pages by their table, and codes of 8 bits under an exact present."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny_wan

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.attention import AttentionConfig, AttentionSpec, LocalAttention, TokenLayout
from diffusion_runtime.attention.backends.fa4 import FlashAttention4
from diffusion_runtime.attention.backends.flash_attention import codes_refusal
from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.cache.kinds import StoreKind
from diffusion_runtime.attention.cache.plan import plan_forward
from diffusion_runtime.attention.cache.quantised import Fp8Store
from diffusion_runtime.attention.cache.slots import FrameSlots
from diffusion_runtime.attention.cache.stored import PageFormat
from diffusion_runtime.attention.cache.window import FrameWindow
from diffusion_runtime.attention.cached_calls import CACHED_KEYS
from diffusion_runtime.attention.context import AttentionContext, RequestCache
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.report.attention_report import AttentionRecorder

BATCH, PER_FRAME, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 4, 2, 16
SLOTS = FrameSlots.of(FrameWindow(1, 5), None)


def drawn(seed: int, heads: int = KV_HEADS) -> torch.Tensor:
    """Of two frames, with a mean of their own per head."""
    generator = torch.Generator().manual_seed(seed)
    mean = 3 * torch.randn(1, 1, heads, HEAD_DIM, generator=torch.Generator().manual_seed(heads))
    return torch.randn(BATCH, 2 * PER_FRAME, heads, HEAD_DIM, generator=generator) + mean


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """In float64."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=2).transpose(1, 2) for x in (k, v))
    weights = torch.softmax(q.double().transpose(1, 2) @ k.transpose(-1, -2) / HEAD_DIM**0.5, dim=-1)
    return (weights @ v).transpose(1, 2)


@pytest.mark.parametrize("page_size", [None, 2])
def test_a_past_in_8_bits_is_merged_with_an_exact_present(page_size: int | None) -> None:
    """Of the error against float64 nothing but the rounding of codes is left, and the present has none of it."""
    policy = AttentionPolicy(config=AttentionConfig(default=AttentionSpec("reference")))
    layer = LocalAttention(HEADS, HEAD_DIM, KV_HEADS, cached_keys=True, policy=policy)
    state, recorder, seen = RequestCache(), AttentionRecorder(), {}
    for first in (0, 2, 4, 6):
        for phase in ("denoise", "commit"):
            plan = plan_forward(SLOTS, range(first, first + 2), PER_FRAME, phase)
            k, v = (drawn(10 * first + index + (5 if phase == "commit" else 0)) for index in range(2))
            q = drawn(first + 77, HEADS)
            step = StepInfo(phase=phase)  # type: ignore[arg-type]
            cache = FrameCache(plan, "absolute", StoreKind(is_fp8=True, page_size=page_size))
            context = AttentionContext(TokenLayout((2, 2, 3)), step, state, recorder, cache=cache)
            found = layer(q, k, v, context)
            (store,) = state.find_all(CACHED_KEYS)
            assert isinstance(store, Fp8Store)
            past = [frame for frame in plan.key_frames if frame not in plan.frames]
            rows = [[x[0][:, (frame % 2) * PER_FRAME :][:, :PER_FRAME] for x in seen[frame]] for frame in past]
            exact = [torch.cat([*(row[index] for row in rows), own], dim=1) for index, own in enumerate((k, v))]
            scale, mean = store.scale, store.mean
            rounded = [
                torch.cat([_rounded(torch.cat([row[index] for row in rows], 1), scale[index], each), own], dim=1)
                if rows
                else own
                for index, (own, each) in enumerate(((k, mean), (v, torch.zeros_like(mean))))
            ]
            assert float((found - attended(q, *rounded)).norm() / found.norm()) < 2e-6, (first, phase)
            error = float((found - attended(q, *exact)).norm() / found.norm())
            assert error < (0.04 if past else 2e-6), (first, phase, error)
            if phase == "commit":
                seen.update(dict.fromkeys(plan.frames, ((k,), (v,))))
    copied = {row.keys for row in recorder.report().rows}
    assert copied == {"in place"}
    assert any("merged by log-sum-exp" in row.implementation for row in recorder.report().rows)


def _rounded(x: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    codes = ((x - mean) / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.float() * scale + mean


def test_videos_whose_pages_are_read_in_place(tmp_path: Path) -> None:
    """The reference takes the block table: the video in a row, and the report says how its keys were read."""
    keys = {"num_frames_per_block": 3, "local_attn_size": 7, "sink_size": 2}
    folder = write_tiny_wan(tmp_path / "causal", causal=keys)
    pipeline = load_pipeline(str(folder), device="cpu", attention="reference")
    plain = {"height": 32, "width": 32, "num_frames": 45, "seed": 4}
    row = pipeline(GenerationRequest("a red circle", **plain))
    pages = pipeline(GenerationRequest("a red circle", page_size=2, **plain))
    assert abs(row.frames.astype(int) - pages.frames).max() <= 1
    assert {each.keys for each in pages.attention_report.rows if each.role == "self"} == {"in place"}
    codes = pipeline(GenerationRequest("a red circle", page_size=2, kv_cache_dtype="fp8_e4m3", **plain))
    assert 0 < abs(row.frames.astype(int) - codes.frames).max() < 40
    # Keys that are rotated where they are read are not attended to as they are stored.
    moved = pipeline(GenerationRequest("a red circle", page_size=2, positions="window", **plain))
    assert {each.keys for each in moved.attention_report.rows if each.role == "self"} == {"gathered"}


def test_what_kernels_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, plain = PageFormat(120, torch.float8_e4m3fn), PageFormat(120, torch.bfloat16)
    assert codes_refusal(plain) is None
    assert "8 bits" in str(codes_refusal(codes))
    for capability, expected in (((9, 0), None), ((10, 0), None), ((12, 0), "no kernel for pages on sm_120")):
        hardware = Hardware(platform="cuda", capability=capability)
        monkeypatch.setattr("diffusion_runtime.attention.backends.fa4.detect_hardware", lambda _, h=hardware: h)
        refusal = FlashAttention4().stored_refusal(plain, torch.device("cpu"))
        assert refusal is None if expected is None else expected in str(refusal)
