"""Linear maps by oneDNN equal torch's, and gradients go through torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tables import table
from torch.profiler import profile

from diffusion_runtime.layers.linear import Linear

INPUTS = {
    "tokens": torch.randn(2, 5, 32),
    "one row": torch.randn(1, 32),
    "a part of a wider tensor": torch.randn(2, 5, 64)[..., :32],
    "transposed": torch.randn(2, 32, 5).transpose(1, 2),
    "empty": torch.randn(0, 32),
}


@table("name", INPUTS)
@table("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_linear_and_gelu(name: str, dtype: torch.dtype) -> None:
    layer = Linear(32, 48).to(dtype)
    x = INPUTS[name].to(dtype)
    expected = F.linear(x, layer.weight, layer.bias).detach()
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)
        torch.testing.assert_close(layer.forward_gelu(x), F.gelu(expected, approximate="tanh"))


def test_gradients_reach_the_weights() -> None:
    layer = Linear(32, 48)
    layer.forward_gelu(torch.randn(3, 32)).sum().backward()
    assert layer.weight.grad is not None
    assert float(layer.weight.grad.abs().max()) > 0


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_onednn_is_what_runs_on_a_cpu() -> None:
    layer = Linear(32, 48)
    with torch.inference_mode(), profile() as profiled:
        layer.forward_gelu(torch.randn(3, 32))
    assert "mkldnn::_linear_pointwise" in {event.key for event in profiled.key_averages()}
