"""Attention in 8-bit floats: the reference's error from float64, what it makes even, Triton's passes against it."""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import table
from triton_interpreter import interpret, needs_triton

from diffusion_runtime.attention.backends.reference import reference_attention
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.fp8_attention import reference
from diffusion_runtime.kernels.fp8_attention.api import fp8_attention
from diffusion_runtime.kernels.fp8_attention.cudnn_graph import GraphForm, described_graph
from diffusion_runtime.kernels.fp8_attention.triton import LaunchShape, fp8_attention_triton, prepare

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def draw(
    num_q: int, num_k: int, head_dim: int, heads: int = 2, kv_heads: int = 1, dtype: torch.dtype = torch.float32
) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_q, heads), (num_k, kv_heads), (num_k, kv_heads))
    q, k, v = (torch.randn(1, *shape, head_dim, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def with_outliers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """One channel in 16 of queries and keys four times as large."""
    large = torch.where(torch.arange(q.shape[3]) % 16 == 0, 4.0, 1.0)
    return q * large, k * large, v


@table("head_dim", [64, 128])
def test_the_error_on_normal_inputs(head_dim: int) -> None:
    q, k, v = draw(128, 3000, head_dim)
    exact, exact_lse = reference_attention(q.double(), k.double(), v.double())
    result = fp8_attention(q, k, v, return_lse=True)
    assert result.implementation == "reference"
    assert 0.04 < error(result.out, exact) < 0.065
    assert result.lse is not None
    assert float((result.lse - exact_lse).abs().max()) < 0.03
    assert fp8_attention(q, k, v).lse is None


def test_offsets_cost_nothing_and_outliers_little() -> None:
    """An offset of all keys changes no weight, one of all values moves the result; a rotation spreads outliers."""
    q, k, v = draw(64, 500, 64)
    k_offset, v_offset = torch.full((64,), 20.0), torch.linspace(-30, 30, 64)
    exact, exact_lse = reference_attention(q.double(), k.double() + k_offset, v.double())
    moved = fp8_attention(q, k + k_offset, v + v_offset, return_lse=True)
    assert error(moved.out - v_offset, exact) < 0.065
    assert moved.lse is not None
    assert float((moved.lse - exact_lse).abs().max()) < 0.03
    q, k, v = with_outliers(q, k, v)
    exact, _ = reference_attention(q.double(), k.double(), v.double())
    without = reference.quantize(q, k, v)._replace(
        **{name: reference.rounded(x * (100 / x.abs().max())) for name, x in (("q", q), ("k", k - k.mean(1)))},
        descale=(q.abs().max() * (k - k.mean(1)).abs().max() / 1e4).reshape(1),
    )
    unrotated = reference.restore(reference.attend(without, 1 / 8)[0], without, torch.float32)
    assert error(fp8_attention(q, k, v).out, exact) < 0.7 * error(unrotated, exact)


def test_what_is_rounded() -> None:
    q, k, v = draw(20, 100, 64, heads=4, kv_heads=2)
    k[:, :, 1] *= 1000
    inputs = reference.quantize(q, k, v)
    turn = reference.rotation(64)
    torch.testing.assert_close(turn @ turn.T, 64 * torch.eye(64))
    products = torch.einsum("bqhd,bkhd->bhqk", inputs.q.float()[:, :, ::2], inputs.k.float()) * inputs.descale
    centred = k - k.mean(1, keepdim=True)
    exact = torch.einsum("bqhd,bkhd->bhqk", q[:, :, ::2], centred)
    for head in range(2):
        assert error(products[:, head], exact[:, head].double()) < 0.05, "no head pays for another's size"
    assert inputs.q.float().abs().max() <= 448
    made = inputs.v.float() * inputs.v_scales[:, None] + inputs.v_mean[:, None]
    assert error(made, v.double()) < 0.03
    assert (inputs.v.float().abs().amax(1) == 448).all(), "every channel has a scale of its own"


@table("scale", [-0.2, 0.0, 0.01])
def test_any_scale(scale: float) -> None:
    q, k, v = draw(50, 130, 64)
    exact, exact_lse = reference_attention(q.double(), k.double(), v.double(), scale=scale)
    result = fp8_attention(q, k, v, scale=scale, return_lse=True)
    assert error(result.out, exact) < 0.08
    assert result.lse is not None
    assert float((result.lse - exact_lse).abs().max()) < 0.15


@table("poison", [torch.nan, torch.inf])
def test_what_is_no_number_reaches_the_result(poison: float) -> None:
    for name in ("q", "k", "v"):
        tensors = dict(zip("qkv", draw(8, 70, 64), strict=True))
        tensors[name][0, 5, 0, 7] = poison
        out = fp8_attention(**tensors).out.isfinite()
        assert not (out[0, 5, 0].any() if name == "q" else out[..., 7].any()), name


def test_refusals() -> None:
    q, k, v = draw(4, 8, 64)
    with pytest.raises(ConfigError, match=r"expected q \[batch"):
        fp8_attention(q, k[:, :0], v[:, :0])
    with pytest.raises(ConfigError, match="head_dim of 64 or 128"):
        fp8_attention(q[..., :32], k[..., :32], v[..., :32])
    with pytest.raises(ConfigError, match="computes no gradients"):
        fp8_attention(q.requires_grad_(), k, v)


@pytest.mark.skipif(importlib.util.find_spec("cudnn") is None, reason="needs nvidia-cudnn-frontend")
def test_the_package_accepts_the_graph() -> None:
    for return_lse in (False, True):
        described_graph(GraphForm(0, 2, 300, 77, 4, 2, 128, 0.1, return_lse))


def compare(
    num_q: int, num_k: int, head_dim: int, heads: tuple[int, int], dtype: torch.dtype, shape: LaunchShape
) -> None:
    """Triton's passes around the reference's attention give the reference's result, up to single roundings."""
    q, k, v = with_outliers(*draw(num_q, num_k, head_dim, *heads, dtype=dtype))
    q, k, v = q.to(dtype), (k + 2).to(dtype), (v + 1).to(dtype)
    q = torch.cat([q, q], 3)[..., head_dim // 2 : head_dim // 2 + head_dim]  # rows with a stride
    scale = -(head_dim**-0.5)
    expected = reference.quantize(q, k, v)
    made = prepare(q, k, v, scale=scale, return_lse=True, shape=shape)
    assert made.lse is not None
    made.gather()
    made.round_inputs()
    inputs = made.inputs()
    for name in ("k_mean", "v_mean", "v_scales", "descale"):
        torch.testing.assert_close(getattr(inputs, name), getattr(expected, name), rtol=1e-4, atol=1e-5, msg=name)
    for name in ("q", "k", "v"):
        found, wanted = getattr(inputs, name).float(), getattr(expected, name).float()
        # The interpreter cuts bfloat16 off and halves what rounds up to a power of two in e4m3; a GPU does neither.
        halved = ((found / wanted.where(wanted != 0, 1.0)) - 0.5).abs() < 0.01
        assert halved.float().mean() < 0.05, name
        assert error(found[~halved], wanted[~halved].double()) < 0.03, name
    out8, lse = reference.attend(inputs, scale)
    made.lse.copy_(lse)
    made.restore(out8)
    restored = reference.restore(out8, inputs, dtype)
    torch.testing.assert_close(made.out, restored, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    of_means = scale * (q.float() * expected.k_mean.repeat_interleave(heads[0] // heads[1], 1)[:, None]).sum(-1)
    torch.testing.assert_close(made.lse - lse, of_means.transpose(1, 2), rtol=1e-3, atol=1e-3)
    without = prepare(q, k, v, scale=scale, return_lse=False, shape=shape)
    without.gather()
    without.round_inputs()
    assert without.lse is None
    assert torch.equal(without.inputs().q.float(), inputs.q.float())


def compare_flashinfer(scale: float) -> None:
    """The passes around a function with the package's signature and layouts give the reference's result, but for the
    rounding of the output to 8 bits."""
    called = []

    def single_prefill_with_kv_cache(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor,
        o_dtype: torch.dtype,
        sm_scale: float,
        backend: str,
        return_lse: bool,
    ) -> Any:
        """[seq, heads, head_dim] of one sample; the maximum is of what is not scaled yet, as in its kernel."""
        called.append((q.dtype, backend, return_lse))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float().repeat_interleave(q.shape[1] // k.shape[1], 1))
        factor = scale_q[:, None, None] * sm_scale
        highest = scores.amax(-1, keepdim=True)
        weights = torch.exp((scores - highest) * factor)
        assert weights.max() <= 1, "it would be more than e4m3 holds"
        total = weights.sum(-1, keepdim=True)
        values = v.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
        out = torch.einsum("hqk,khd->qhd", reference.rounded(weights * 448).float() / total / 448, values).to(o_dtype)
        lse = (highest * factor + total.log())[..., 0].T / math.log(2)
        return (out, lse.contiguous()) if return_lse else out

    module = types.ModuleType("flashinfer")
    module.single_prefill_with_kv_cache = single_prefill_with_kv_cache  # type: ignore[attr-defined]
    sys.modules["flashinfer"] = module
    several = [draw(40, 70, 64, 4, 2), [x.flip(1) for x in draw(40, 70, 64, 4, 2)]]
    q, k, v = (torch.cat(pair) for pair in zip(*several, strict=True))
    made = prepare(q, k, v, scale=scale, return_lse=True, kernel="flashinfer")
    made.gather()
    made.round_inputs()
    attended = made.attend()
    expected, expected_lse = reference.attend(made.inputs(), scale)
    assert attended.dtype == torch.bfloat16
    assert 0.01 < error(expected.float(), attended.double()) < 0.04, "the rounding of the output to 8 bits"
    assert made.lse is not None
    torch.testing.assert_close(made.lse, expected_lse, rtol=1e-4, atol=1e-4)
    made.restore(attended)
    torch.testing.assert_close(made.out, reference.restore(attended, made.inputs(), q.dtype))
    out, lse = fp8_attention_triton(q, k, v, scale=scale, return_lse=True, kernel="flashinfer")
    assert lse is not None
    assert torch.equal(out, made.out)
    assert torch.equal(lse, made.lse)
    without, none = fp8_attention_triton(q, k, v, scale=scale, return_lse=False, kernel="flashinfer")
    assert none is None
    assert torch.equal(without, out)
    assert called == [(torch.float8_e4m3fn, "fa3", returned) for returned in [True] * 4 + [False] * 2]


# Tokens that fill no tile, fewer than one tile, grouped queries, several tiles per program.
SMALL = LaunchShape(programs=4, rows=16, tiles=2)
CASES = (
    (40, 70, 64, (2, 1), torch.float32, SMALL),
    (33, 9, 128, (2, 2), torch.float16, LaunchShape(programs=2, gather_rows=16, rows=32, tiles=1)),
)


@needs_triton
def test_kernels_under_the_interpreter() -> None:
    assert interpret(Path(__file__)).endswith("ok\n")


if __name__ == "__main__":
    for case in CASES:
        compare(*case)
    for scale in (0.125, -0.125):
        compare_flashinfer(scale)
    print("ok")
