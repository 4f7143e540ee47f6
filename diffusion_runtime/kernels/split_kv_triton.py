"""The Triton kernel that merges attention to parts of the keys. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_parts(
    partial,
    lse,
    out,
    merged,
    seq,
    heads,
    out_batch,
    out_token,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out [batch, seq, heads, HEAD_DIM] and merged [batch, heads, seq] of partial [batch * PARTS, seq, heads, HEAD_DIM]
    and lse [batch * PARTS, heads, seq]. out_batch, out_token: strides. Grid: (tiles of queries, heads, batch)."""
    head = tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    is_row = rows < seq
    inside = is_row[:, None] & (columns < HEAD_DIM)[None, :]
    first_lse = lse + (sample * PARTS * heads + head) * seq + rows
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        found = tl.load(first_lse + part * heads * seq, mask=is_row, other=float("-inf"))
        highest = tl.maximum(highest, found)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, COLUMNS], tl.float32)
    token = (rows.to(tl.int64) * heads + head) * HEAD_DIM
    for part in tl.static_range(PARTS):
        found = tl.load(first_lse + part * heads * seq, mask=is_row, other=float("-inf"))
        weight = tl.exp(found - shift)
        total += weight
        place = (sample * PARTS + part) * seq * heads * HEAD_DIM + token
        values = tl.load(partial + place[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        result += weight[:, None] * values
    divisor = tl.where(total == 0.0, 1.0, total)
    target = out + sample * out_batch + rows.to(tl.int64)[:, None] * out_token + head * HEAD_DIM + columns[None, :]
    tl.store(target, (result / divisor[:, None]).to(out.dtype.element_ty), mask=inside)
    natural = tl.where(total == 0.0, float("-inf"), shift + tl.log(divisor))
    tl.store(merged + (sample * heads + head) * seq + rows, natural, mask=is_row)
