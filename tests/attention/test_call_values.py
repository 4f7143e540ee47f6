"""Calls that are unusual or wrong in their values: strides, heads, scales, devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffusion_runtime.attention import attention
from diffusion_runtime.errors import ConfigError


def qkv(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, 8, 4, 32, generator=generator)
    return q, k, v


@pytest.mark.parametrize("backend", ["torch_sdpa", "reference", "measured"])
@pytest.mark.parametrize("return_lse", [True, False])
def test_strides_change_nothing(backend: str, return_lse: bool) -> None:
    """Every second number of a wider tensor, heads before tokens, and one head repeated."""
    plain = qkv()
    expected: Any = attention(*plain, backend=backend, return_lse=return_lse)
    for number in range(3):
        for odd in (
            torch.stack([plain[number]] * 2, dim=-1).flatten(-2)[..., ::2],
            plain[number].transpose(1, 3).contiguous().transpose(1, 3),
            plain[number].transpose(1, 2).contiguous().transpose(1, 2),
        ):
            inputs = [*plain]
            inputs[number] = odd
            found: Any = attention(*inputs, backend=backend, return_lse=return_lse)
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("return_lse", [True, False])
def test_scales_of_zero_and_below(scale: float, causal: bool, return_lse: bool) -> None:
    arguments: dict[str, Any] = {"scale": scale, "causal": causal, "return_lse": return_lse}
    expected: Any = attention(*qkv(), backend="reference", **arguments)
    found: Any = attention(*qkv(), backend="torch_sdpa", **arguments)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"heads": 0}, "heads a multiple of kv_heads"),
        ({"scale": float("nan")}, "scale: expected a finite number, got nan"),
        ({"scale": "1"}, "scale: expected a finite number, got '1'"),
        ({"device": "meta"}, "must be on one device, got cpu, meta, cpu"),
    ],
)
def test_what_cannot_be_computed_is_a_typed_error(changes: dict[str, Any], said: str) -> None:
    q, k, v = qkv()
    if "heads" in changes:
        k, v = k[:, :, :0], v[:, :, :0]
    if "device" in changes:
        k = k.to("meta")
    with pytest.raises(ConfigError, match=said):
        attention(q, k, v, scale=changes.get("scale"))
