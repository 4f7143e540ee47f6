"""Norms and modulation against the formulas written out in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tables import table

from diffusion_runtime.layers.modulation import add_gated_, modulated_layer_norm, modulated_rms_norm
from diffusion_runtime.layers.norm import LayerNorm, RMSNorm

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-6


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


@table("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    norm = RMSNorm(24, EPS).to(dtype).requires_grad_(False)
    norm.weight.copy_(torch.randn(24))
    x = (3 * torch.randn(2, 5, 24)).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.weight.double()
    out = norm(x.clone())
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, **tolerance(dtype))


def test_rms_norm_of_a_slice_leaves_the_rest_alone() -> None:
    norm = RMSNorm(8, EPS).requires_grad_(False)
    wide = torch.randn(2, 5, 24)
    before = wide.clone()
    out = norm(wide[..., 8:16])
    torch.testing.assert_close(out, F.rms_norm(before[..., 8:16], (8,), norm.weight, EPS))
    assert torch.equal(wide[..., :8], before[..., :8])
    assert torch.equal(wide[..., 16:], before[..., 16:])


@table("dtype", DTYPES)
def test_layer_norm_computes_in_float32(dtype: torch.dtype) -> None:
    norm = LayerNorm(24, EPS).requires_grad_(False)
    norm.weight.copy_(torch.randn(24))
    norm.bias.copy_(torch.randn(24))
    x = torch.randn(2, 5, 24).to(dtype)
    before = x.clone()
    expected = F.layer_norm(x.double(), (24,), norm.weight.double(), norm.bias.double(), EPS)
    out = norm(x)
    assert out.dtype == dtype
    assert torch.equal(x, before)
    torch.testing.assert_close(out.double(), expected, **tolerance(dtype))


@table("dtype", DTYPES)
@table("batch", [1, 3])
def test_modulated_layer_norm(batch: int, dtype: torch.dtype) -> None:
    x = torch.randn(batch, 5, 24).to(dtype)
    before = x.clone()
    shift, scale = torch.randn(batch, 24), torch.randn(batch, 24)
    normalized = F.layer_norm(x.double(), (24,), eps=EPS)
    expected = normalized * (1 + scale.double()[:, None]) + shift.double()[:, None]
    out = modulated_layer_norm(x, shift, scale, EPS)
    assert out.dtype == dtype
    assert torch.equal(x, before)
    torch.testing.assert_close(out.double(), expected, **tolerance(dtype))


@table("dtype", DTYPES)
@table("batch", [1, 3])
def test_modulated_rms_norm(batch: int, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(batch, 5, 24)).to(dtype)
    before = x.clone()
    shift, scale = torch.randn(batch, 24), torch.randn(batch, 24)
    normalized = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    expected = normalized * (1 + scale.double()[:, None]) + shift.double()[:, None]
    out = modulated_rms_norm(x, shift, scale, EPS)
    assert out.dtype == dtype
    assert torch.equal(x, before)
    torch.testing.assert_close(out.double(), expected, **tolerance(dtype))


@table("dtype", DTYPES)
def test_the_gated_sum_is_rounded_once(dtype: torch.dtype) -> None:
    x, branch = torch.randn(2, 5, 24).to(dtype), torch.randn(2, 5, 24).to(dtype)
    gate = torch.randn(2, 24)
    expected = (x.double() + branch.double() * gate.double()[:, None]).to(dtype)
    out = add_gated_(x, branch, gate)
    assert out is x
    torch.testing.assert_close(out, expected, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6)


@table("batch", [1, 2])
def test_rows_of_the_models_dtype_are_read_as_float32(batch: int) -> None:
    x, rows = torch.randn(batch, 5, 16).bfloat16(), torch.randn(batch, 3 * 16).bfloat16().chunk(3, dim=-1)
    branch = torch.randn_like(x)
    found, expected = (
        (
            modulated_layer_norm(x, shift, scale, EPS),
            add_gated_(x.clone(), branch, gate),
        )
        for shift, scale, gate in (rows, [row.float() for row in rows])
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
