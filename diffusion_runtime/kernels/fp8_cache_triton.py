"""The Triton kernel that reads keys and values in 8 bits. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dequantise(
    keys,
    values,
    scale,
    mean,
    out,
    batch,
    num_tokens,
    num_heads,
    width,
    stride_keys,
    stride_values,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out [2, batch, seq, width]: codes * scale, of keys with their mean. width: heads * HEAD_DIM. Grid: (tiles of
    tokens, tiles of columns, 2 * batch)."""
    part = tl.program_id(2)
    sample = (part % batch).to(tl.int64)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    inside = (tokens < num_tokens)[:, None] & is_column[None, :]
    place = tokens.to(tl.int64)[:, None] * width + columns[None, :]
    of_column = tl.load(scale + part * num_heads + columns // HEAD_DIM, mask=is_column, other=0.0).to(tl.float32)
    if part < batch:
        codes = tl.load(keys + sample * stride_keys + place, mask=inside, other=0)
        offset = tl.load(mean + sample * width + columns, mask=is_column, other=0.0).to(tl.float32)
    else:
        codes = tl.load(values + sample * stride_values + place, mask=inside, other=0)
        offset = tl.zeros([COLUMNS], tl.float32)
    # The bits of float8_e4m3fn as those of a float16, whose exponent is larger by 8: exact on every GPU, and for
    # subnormal codes too. A conversion of the type needs compute capability 8.9.
    bits = codes.to(tl.int16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    number = half.to(tl.float32) * 256.0
    result = number * of_column[None, :] + offset[None, :]
    tl.store(out + part.to(tl.int64) * num_tokens * width + place, result.to(out.dtype.element_ty), mask=inside)
