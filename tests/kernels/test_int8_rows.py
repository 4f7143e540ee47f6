"""Rotated 8-bit integers: the specification's error and its rotation, Triton equal to it, products on a GPU."""

from __future__ import annotations

import comfy_files
import pytest
import torch
from tables import table
from triton_interpreter import interpret

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.activations.api import silu_mul
from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows
from diffusion_runtime.kernels.int8_rows import api, reference
from diffusion_runtime.kernels.int8_rows.api import multiply_rows, product_refusal, quantize_rows


def test_the_rotation_is_orthogonal_symmetric_and_the_formats() -> None:
    for size in reference.GROUP_SIZES:
        matrix = reference.hadamard(size, torch.device("cpu"), torch.float64)
        assert torch.equal(matrix, torch.from_numpy(comfy_files.hadamard(size)))
        assert torch.equal(matrix, matrix.T)
        torch.testing.assert_close(matrix @ matrix, torch.eye(size, dtype=torch.float64))
        x = torch.randn(3, 5, 2 * size)
        torch.testing.assert_close(reference.rotate(reference.rotate(x, size), size), x)
    assert [reference.group_size_of(dim) for dim in (5120, 8960, 192, 48, 40)] == [256, 256, 64, 16, 0]


def test_a_number_is_off_by_half_a_step_at_most() -> None:
    torch.manual_seed(0)
    x = torch.randn(33, 256) * torch.logspace(-8, 30, 33)[:, None]
    x[0] = 0
    for group_size in (0, *reference.GROUP_SIZES):
        rows = quantize_rows(x, group_size)
        error = (rows.values.float() * rows.scales - reference.rotate(x, group_size)).abs()
        assert (error <= rows.scales * 0.5001).all()
        assert rows.values[1:].abs().amax(1).eq(127).all()
        assert rows.values[0].eq(0).all()
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    for row in (1, 2):
        assert not torch.isfinite(reference.dequantize(quantize_rows(x, 16), 16, torch.float32)[row]).all()


def test_one_large_channel_costs_less_when_rows_are_rotated() -> None:
    """Relative error of x W^T with one outlier channel in both: a tenth and more of it without the rotation."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 512, generator=generator) for size in (256, 384))
    x[:, 7] *= 60
    weight[:, 9] *= 60
    exact = x.double() @ weight.double().T
    errors = {}
    for group_size in (0, 256):
        found = multiply_rows(quantize_rows(x, group_size), quantize_rows(weight, group_size), None, torch.float32)
        errors[group_size] = float((found.double() - exact).norm() / exact.norm())
    assert errors[256] < 0.02
    assert errors[256] < errors[0] / 3


def test_activations_are_quantised_as_apart() -> None:
    gate, features = torch.randn(2, 3, 64).bfloat16().chunk(2, dim=-1)
    first = torch.randn(2, 3, 16).bfloat16()
    product = silu_mul(gate, features)
    gelu = torch.cat([first.float(), torch.nn.functional.gelu(gate.float(), approximate="tanh")], dim=-1)
    for found, expected in (
        (quantize_rows(gate, 16, features=features), quantize_rows(product, 16)),
        (quantize_rows(gate, 16, features=features, first=first), quantize_rows(torch.cat([first, product], -1), 16)),
        (quantize_rows(gate, 16, gelu_from=16, first=first), quantize_rows(gelu, 16)),
    ):
        assert torch.equal(found.values, expected.values)
        assert torch.equal(found.scales, expected.scales)


@table(
    ("given", "said"),
    [
        ({"group_size": 64}, "expected rows of whole groups of 64 numbers, got 48"),
        ({"group_size": 4}, "expected rows of whole groups of 4 numbers"),
        ({"group_size": 16, "features": torch.ones(2, 32)}, r"expected features \(2, 48\), got \(2, 32\)"),
        ({"group_size": 16, "first": torch.ones(3, 48)}, r"expected first \(2, 48\), got \(3, 48\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        quantize_rows(torch.ones(2, 48), **given)  # type: ignore[arg-type]


def test_a_cpu_without_the_instructions_says_so_and_one_with_them_sums_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = (
        QuantizedRows(torch.full((size, 15360), 127, dtype=torch.int8), torch.ones(size, 1)) for size in (3, 5)
    )
    found = multiply_rows(x, weight, torch.full((5,), 0.25), torch.float32)
    assert torch.equal(found, reference.multiply_rows(x, weight, torch.full((5,), 0.25), torch.float32))
    monkeypatch.setattr(api, "_has_vnni", lambda: False)
    assert "this CPU has no products" in str(product_refusal(torch.device("cpu"), torch.bfloat16, 16))
    assert torch.equal(found, multiply_rows(x, weight, torch.full((5,), 0.25), torch.float32))


INTERPRETED = """
import torch
from diffusion_runtime.kernels.activations.api import silu_mul
from diffusion_runtime.kernels.int8_rows import reference, triton
from diffusion_runtime.kernels.int8_rows.api import multiply_rows, quantize_rows
torch.manual_seed(0)
for dtype, shape, group in (
    (torch.float32, (5, 32), 16),
    (torch.bfloat16, (3, 768), 256),
    (torch.float16, (2, 192), 64),
    (torch.float32, (3, 24), 0),
    # Kept in two parts: 8192 numbers and 1024.
    (torch.bfloat16, (2, 8960), 256),
):
    wide = torch.randn(shape[0], shape[1] + 8).to(dtype)
    x = wide[:, 3 : 3 + shape[1]]  # rows with a stride
    x[0] = 0
    x[-1, 5] = 100
    assert triton.refusal(x) is None
    for gelu_from in (None, 5):
        found = triton.quantize_rows(x, group, gelu_from)
        expected = reference.quantize_rows(x, group, gelu_from=gelu_from)
        torch.testing.assert_close(found.scales, expected.scales, rtol=1e-6, atol=1e-14)
        # Ties of rounding: sums are in another order.
        off = (found.values.int() - expected.values.int()).abs()
        assert int(off.max()) <= 1, (dtype, group)
        assert float((off > 0).float().mean()) < 5e-3, (dtype, group)
    # The bound: the specification's own error to float64, and rounding of sums.
    exact = reference.rotate(x.double(), group)
    steps = reference.quantize_rows(x, group)
    own = float((steps.values.double() * steps.scales - exact).norm())
    made = triton.quantize_rows(x, group)
    assert float((made.values.double() * made.scales - exact).norm()) <= 1.001 * own + 1e-6
    x[0, 1] = torch.nan
    assert torch.isinf(triton.quantize_rows(x, group).scales[0]).all()
for dtype in (torch.float32, torch.bfloat16):
    gate, features = torch.randn(2, 3, 64).to(dtype).chunk(2, dim=-1)
    first = torch.randn(2, 3, 16).to(dtype)
    passed = silu_mul(gate, features, implementation="triton")
    for found, whole in (
        (quantize_rows(gate, 16, features=features), passed),
        (quantize_rows(gate, 16, features=features, first=first), torch.cat([first, passed], -1)),
    ):
        expected = triton.quantize_rows(whole.flatten(0, 1), 16)
        assert torch.equal(found.values, expected.values), dtype
        assert torch.equal(found.scales, expected.scales), dtype
SIZES = ((5, 48, 24, torch.float32), (37, 256, 70, torch.bfloat16), (70, 96, 33, torch.float16))
for rows, inner, outer, dtype in SIZES:
    x, weight = quantize_rows(torch.randn(rows, inner), 16), quantize_rows(torch.randn(outer, inner), 16)
    bias = torch.randn(outer).to(dtype)
    for own in (bias, None):
        found, expected = multiply_rows(x, weight, own, dtype), reference.multiply_rows(x, weight, own, dtype)
        # Sums are exact: what is left is rounding of the scales' products.
        exact = (x.values.double() @ weight.values.double().T) * x.scales.double() * weight.scales.double().T
        exact = exact if own is None else exact + own.double()
        unit = torch.finfo(dtype).eps
        assert ((found.double() - exact).abs() <= exact.abs() * unit + 1e-5).all(), dtype
        assert ((expected.double() - exact).abs() <= exact.abs() * unit + 1e-5).all(), dtype
print("equal")
"""


def test_triton_agrees_with_the_reference_in_the_interpreter() -> None:
    assert interpret(INTERPRETED).strip() == "equal"


@pytest.mark.gpu
def test_a_gpu_multiplies_as_the_specification_does() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    for rows, inner, outer in ((1, 16, 32), (77, 1536, 8960), (4608, 3072, 9216), (33, 8960, 1536)):
        if product_refusal(device, torch.bfloat16, inner) is not None:
            pytest.skip("this GPU has no 8-bit integer products here")
        x = (
            torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
            * torch.rand(rows, 1, device=device).bfloat16()
        )
        weight = torch.randn(outer, inner, device=device) * 0.02
        bias = torch.randn(outer, device=device, dtype=torch.bfloat16)
        for group in {0, reference.group_size_of(inner)}:
            own, specified = quantize_rows(x, group), reference.quantize_rows(x, group)
            torch.testing.assert_close(own.scales, specified.scales, rtol=1e-6, atol=0.0)
            off = (own.values.int() - specified.values.int()).abs()
            assert int(off.max()) <= 1
            # Numbers of 8 bits over a largest one of 8 bits are often halfway between two integers: 5e-4 of them round
            # otherwise in float64 too.
            assert float((off > 0).float().mean()) < 5e-3
            of_weight = quantize_rows(weight, group)
            found = multiply_rows(own, of_weight, bias, torch.bfloat16)
            expected = reference.multiply_rows(own, of_weight, bias, torch.bfloat16)
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-4)
            full = x.double() @ weight.double().T + bias.double()
            assert float((found.double() - full).norm() / full.norm()) < 0.02
