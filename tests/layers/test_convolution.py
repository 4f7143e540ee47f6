"""The quicker way gives what torch's own convolution and normalize give, and is really taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile

from diffusion_runtime.layers.convolution import OneDnnConvolutions


def kernels(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> set[str]:
    with torch.inference_mode(), profile() as profiled, OneDnnConvolutions():
        function(x)
    return {event.key for event in profiled.key_averages()}


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [((3, 3, 3), 1, 0), ((3, 1, 1), 1, 1), ((1, 1, 1), 1, 0), ((3, 3, 3), 2, "valid")]
)
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_are_equal(kernel: tuple[int, int, int], stride: int, padding: int | str, bias: bool) -> None:
    layer = nn.Conv3d(4, 6, kernel, stride, padding, bias=bias).requires_grad_(False)
    x = torch.randn(1, 4, 5, 9, 10)
    expected = layer(x)
    with torch.inference_mode(), OneDnnConvolutions():
        out = layer(x)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dim", [1, -1])
def test_normalize_is_equal(dim: int) -> None:
    x = torch.randn(2, 6, 3, 4, 5)
    x[0, :, 0] = 0.0
    expected = F.normalize(x, dim=dim)
    with torch.inference_mode(), OneDnnConvolutions():
        out = F.normalize(x, dim=dim)
    torch.testing.assert_close(out, expected)
    assert not out[0, :, 0].any()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_onednn_runs_small_convolutions() -> None:
    layer, x = nn.Conv3d(4, 6, 3), torch.randn(1, 4, 5, 9, 10)
    assert "aten::slow_conv3d_forward" not in kernels(layer, x)
    assert "aten::mkldnn_convolution" in kernels(layer, x)


def test_the_norm_over_channels_is_a_product_and_a_sum() -> None:
    x = torch.randn(1, 6, 3, 4, 5)
    assert "aten::linalg_vector_norm" not in kernels(lambda x: F.normalize(x, dim=1), x)
    assert "aten::linalg_vector_norm" in kernels(lambda x: F.normalize(x, dim=-1), x)
    assert "aten::linalg_vector_norm" in kernels(lambda x: F.normalize(x, dim=1, eps=0.1), x)


def test_gradients_and_other_dtypes_are_left_alone() -> None:
    layer = nn.Conv3d(4, 6, 3)
    with OneDnnConvolutions():
        layer(torch.randn(1, 4, 5, 9, 10)).sum().backward()
        with torch.no_grad():
            assert layer.double()(torch.randn(1, 4, 5, 9, 10).double()).dtype == torch.float64
    assert layer.weight.grad is not None
