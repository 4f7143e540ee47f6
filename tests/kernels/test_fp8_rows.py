"""Row-wise quantisation to 8-bit floats: the reference's error, Triton equal to it, products on a GPU."""

from __future__ import annotations

import pytest
import torch
from triton_interpreter import interpret

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.activations.api import silu_mul
from diffusion_runtime.kernels.fp8_rows import reference
from diffusion_runtime.kernels.fp8_rows.api import (
    multiply_rows,
    product_refusal,
    quantize_gated_rows,
    quantize_joined_rows,
    quantize_rows,
)

# Half a step of three bits of mantissa, of the number itself; below 2 ** -6 of the scale numbers are subnormal.
HALF_STEP = 2.0**-4
SUBNORMAL = 2.0**-10


def test_a_number_is_off_by_half_a_step_at_most_and_the_largest_by_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randn(33, 100) * torch.logspace(-8, 30, 33)[:, None]
    rows = reference.quantize_rows(x)
    error = (reference.dequantize(rows, torch.float32) - x).abs()
    assert (error <= (HALF_STEP * x.abs()).maximum(SUBNORMAL * rows.scales) * 1.0001).all()
    largest = x.abs().argmax(-1, keepdim=True)
    assert rows.values.float().abs().gather(1, largest).eq(448).all()


def test_zeros_have_a_scale_and_what_is_no_number_stays_none() -> None:
    x = torch.zeros(3, 16)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    rows = quantize_rows(x)
    assert rows.values[0].float().eq(0).all()
    assert rows.scales[0] > 0
    made = reference.dequantize(rows, torch.float32)
    assert made[1].isnan().any()
    assert made[2].isnan().any()


def test_leading_dimensions_become_rows() -> None:
    rows = quantize_rows(torch.randn(2, 3, 16))
    assert rows.values.shape == (6, 16)
    assert rows.scales.shape == (6, 1)
    assert quantize_rows(torch.randn(0, 16)).values.shape == (0, 16)


def test_a_gelu_of_the_last_columns_is_that_of_torch() -> None:
    x = torch.randn(4, 40)
    rows, activated = quantize_rows(x, gelu_from=16), x.clone()
    activated[:, 16:] = torch.nn.functional.gelu(x[:, 16:], approximate="tanh")
    expected = quantize_rows(activated)
    assert torch.equal(rows.values.float(), expected.values.float())
    assert torch.equal(rows.scales, expected.scales)


def test_a_gated_activation_is_quantised_as_apart() -> None:
    gate, features = torch.randn(2, 3, 24).bfloat16().chunk(2, dim=-1)
    rows, expected = quantize_gated_rows(gate, features), quantize_rows(silu_mul(gate, features))
    assert torch.equal(rows.values.float(), expected.values.float())
    assert torch.equal(rows.scales, expected.scales)
    first = torch.randn(2, 3, 8).bfloat16()
    for others, wanted in ((features, silu_mul(gate, features)), (None, gate)):
        rows = quantize_joined_rows(first, gate, others)
        expected = quantize_rows(torch.cat([first, wanted], dim=-1), gelu_from=8 if others is None else None)
        assert torch.equal(rows.values.float(), expected.values.float())
        assert torch.equal(rows.scales, expected.scales)
    with pytest.raises(ConfigError, match=r"expected features \(2, 3, 12\) beside \(2, 3, 12\), got \(2, 2, 12\)"):
        quantize_gated_rows(gate, features[:, :2])
    with pytest.raises(ConfigError, match=r"expected first \(2, 3, 8\) beside \(2, 3, 12\), got \(1, 3, 8\)"):
        quantize_joined_rows(first[:1], gate)


def test_a_cpu_says_why_it_has_no_products() -> None:
    assert "cpu has no 8-bit float products" in str(product_refusal(torch.device("cpu"), torch.bfloat16, 16, 16))


INTERPRETED = """
import torch
from diffusion_runtime.kernels.activations.api import silu_mul
from diffusion_runtime.kernels.fp8_rows import reference, triton
from diffusion_runtime.kernels.fp8_rows.api import quantize_gated_rows, quantize_joined_rows
torch.manual_seed(0)
# 8192 numbers and 1024.
TWO_PARTS = (torch.bfloat16, (2, 8960))
for dtype, shape in ((torch.float32, (5, 24)), (torch.bfloat16, (3, 1000)), (torch.float16, (2, 17)), TWO_PARTS):
    wide = torch.randn(shape[0], shape[1] + 8).to(dtype)
    x = wide[:, 3 : 3 + shape[1]]  # rows with a stride
    x[0] = 0
    assert triton.refusal(x) is None
    found, expected = triton.quantize_rows(x, gelu_from=None), reference.quantize_rows(x)
    assert torch.equal(found.scales, expected.scales), dtype
    activated, expected_activated = triton.quantize_rows(x, gelu_from=5), reference.quantize_rows(x, gelu_from=5)
    torch.testing.assert_close(activated.scales, expected_activated.scales, rtol=1e-5, atol=1e-12)
    off = (activated.values.float() - expected_activated.values.float()).abs()
    # Half a step either way, or the interpreter's lost carry.
    assert (off <= expected_activated.values.float().abs() / 2 + 2.0**-9).all(), dtype
    assert (off == 0).float().mean() > 0.9, dtype
    # The interpreter loses the carry of numbers that round up to a power of two, and gives half of it; a tie of the
    # products' own rounding may be a step either way.
    values, wanted = found.values.float(), expected.values.float()
    assert ((values == wanted) | (2 * values == wanted) | ((values - wanted).abs() <= wanted.abs() / 8)).all(), dtype
    assert (values == wanted).float().mean() > 0.9, dtype
# A product's halves, rows with a stride: to the bit what the two passes give.
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    gate, features = torch.randn(2, 3, 80).to(dtype).chunk(2, dim=-1)
    found = quantize_gated_rows(gate, features)
    passed = silu_mul(gate, features, implementation="triton").flatten(0, 1)
    expected = triton.quantize_rows(passed)
    assert torch.equal(found.values.float(), expected.values.float()), dtype
    assert torch.equal(found.scales, expected.scales), dtype
    # Behind attention output, of other widths and with rows of its own stride.
    first = torch.randn(2, 3, 40).to(dtype)[..., 4:28]
    for others in (features, None):
        found = quantize_joined_rows(first, gate, others)
        second = gate if others is None else passed.view(gate.shape)
        whole = torch.cat([first, second], dim=-1).flatten(0, 1)
        expected = triton.quantize_rows(whole, gelu_from=24 if others is None else None)
        assert torch.equal(found.values.float(), expected.values.float()), (dtype, others is None)
        assert torch.equal(found.scales, expected.scales), dtype
print("equal")
"""


def test_triton_agrees_with_the_reference_in_the_interpreter() -> None:
    assert interpret(INTERPRETED).strip() == "equal"


@pytest.mark.gpu
def test_a_gpu_multiplies_as_the_dequantised_matrices_do() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    holed = torch.ones(2, 16, device=device)
    holed[0, 3] = torch.nan
    assert quantize_rows(holed).values.float().isnan().any(1).tolist() == [True, False]
    for rows, inner, outer in ((1, 16, 32), (77, 1536, 8960), (4608, 3072, 9216)):
        if product_refusal(device, torch.bfloat16, inner, outer) is not None:
            pytest.skip("this GPU has no 8-bit float products")
        x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16) * torch.rand(rows, 1, device=device)
        weight = torch.randn(outer, inner, device=device) * 0.02
        bias = torch.randn(outer, device=device, dtype=torch.bfloat16)
        quantized, quantized_weight = quantize_rows(x), quantize_rows(weight)
        specified = reference.quantize_rows(x)
        torch.testing.assert_close(quantized.scales, specified.scales, rtol=1e-6, atol=0.0)
        # A scale that is rounded the other way moves single numbers that lie between two steps.
        steps = (quantized.values.float() - specified.values.float()).abs() / specified.values.float().abs().clamp(1e-3)
        assert (steps <= 1 / 8).all()
        assert (steps > 0).float().mean() < 1e-3
        gated, halves = quantize_gated_rows(x, x.flip(0)), quantize_rows(silu_mul(x, x.flip(0)))
        assert torch.equal(gated.values.float(), halves.values.float())
        assert torch.equal(gated.scales, halves.scales)
        joined = quantize_joined_rows(x, x), quantize_rows(torch.cat([x, x], dim=-1), gelu_from=inner)
        assert torch.equal(*(rows.values.float() for rows in joined))
        assert torch.equal(*(rows.scales for rows in joined))
        activated, wanted = quantize_rows(x, gelu_from=inner // 2), reference.quantize_rows(x, gelu_from=inner // 2)
        torch.testing.assert_close(activated.scales, wanted.scales, rtol=1e-5, atol=1e-12)
        off = (activated.values.float() - wanted.values.float()).abs()
        assert (off <= wanted.values.float().abs() / 8 + 2.0**-9).all()
        found = multiply_rows(quantized, quantized_weight, bias).double()
        exact = (
            reference.dequantize(quantized, torch.float32).double()
            @ (reference.dequantize(quantized_weight, torch.float32).double().T)
            + bias.double()
        )
        # Rounding to bfloat16, and the tensor cores' sums of 14 bits.
        assert ((found - exact).norm() / exact.norm()).item() < 3e-3
        full = x.double() @ weight.double().T + bias.double()
        assert ((found - full).norm() / full.norm()).item() < 0.05
