"""The Triton kernel of the activations. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(
    gate,
    features,
    out,
    dim,
    gate_stride,
    features_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [rows, dim]: silu(gate) * features, sigmoid(gate) * features, or gelu(gate) in its tanh form. Grid: (rows,
    runs of BLOCK columns). out may be gate."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    value = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu":
        # 0.5 * (1 + tanh(u)) is the logistic function of 2 u.
        inner = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        value *= tl.sigmoid(inner)
    else:
        if ACTIVATION == "silu_mul":
            value *= tl.sigmoid(value)
        else:
            value = tl.sigmoid(value)
        value *= tl.load(features + row * features_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, value.to(out.dtype.element_ty), mask=inside)
