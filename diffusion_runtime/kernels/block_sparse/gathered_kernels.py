"""The Triton kernels of gathered attention. Shapes as in triton_kernels; C key blocks; an entry: a (query, block) pair.

A unit is what is computed at a time: all query blocks of some heads, or some query blocks of one head.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from diffusion_runtime.kernels.block_sparse.triton_kernels import _add_piece, _add_pooled, _load_listed, _load_rows


@triton.jit
def _bits_of_rows(row_mask, head, places, stop, num_grid, num_blocks, words, BLOCKS: tl.constexpr):
    """int32 [rows, BLOCKS], 1 where the query at a position sees a block."""
    columns = tl.arange(0, BLOCKS)
    mask = (places < stop)[:, None] & (columns < num_blocks)[None, :]
    pointers = row_mask + (head.to(tl.int64) * num_grid + places)[:, None] * words + (columns // 32)[None, :]
    values = tl.load(pointers, mask=mask, other=0)
    return (values >> (columns % 32)[None, :]) & 1


@triton.jit
def count_rows(
    row_mask,
    q_offsets,
    block_counts,
    row_counts,
    num_grid,
    num_blocks,
    num_q_blocks,
    words,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """block_counts [B * H, q blocks, C]: queries of a q block that see a key block; row_counts [B * H, S]: key blocks
    that a query sees. Grid: (q blocks, B * H)."""
    q_block = tl.program_id(0)
    head = tl.program_id(1)
    position = tl.load(q_offsets + q_block)
    stop = tl.load(q_offsets + q_block + 1)
    counts = tl.zeros([BLOCKS], tl.int32)
    while position < stop:
        places = position + tl.arange(0, ROWS)
        bits = _bits_of_rows(row_mask, head, places, stop, num_grid, num_blocks, words, BLOCKS)
        counts += tl.sum(bits, 0)
        tl.store(row_counts + head.to(tl.int64) * num_grid + places, tl.sum(bits, 1), mask=places < stop)
        position += ROWS
    columns = tl.arange(0, BLOCKS)
    target = block_counts + (head.to(tl.int64) * num_q_blocks + q_block) * num_blocks + columns
    tl.store(target, counts, mask=columns < num_blocks)


@triton.jit
def _first_slot(row_starts, q_offsets, first_head, first_block, num_grid):
    """Return the index, among the entries of all queries, at which the entries of a unit begin."""
    return tl.load(row_starts + first_head.to(tl.int64) * num_grid + tl.load(q_offsets + first_block))


@triton.jit
def list_queries(
    row_mask,
    q_offsets,
    row_starts,
    bases,
    entry_rows,
    entry_slots,
    first_head,
    first_block,
    num_unit_blocks,
    num_grid,
    num_blocks,
    words,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """List the queries that see each key block, ascending, and where the result of each goes: entry by entry of a
    query.

    bases [heads, C, q blocks] of the unit: where the entries of a q block start. Grid: (q blocks, heads) of the unit.
    """
    local_block = tl.program_id(0)
    local_head = tl.program_id(1)
    # Sums with a tensor, because Triton makes an argument of 1 a constant without methods.
    head = local_head + first_head
    q_block = local_block + first_block
    columns = tl.arange(0, BLOCKS)
    first = _first_slot(row_starts, q_offsets, head - local_head, q_block - local_block, num_grid)
    base = tl.load(
        bases + (local_head.to(tl.int64) * num_blocks + columns) * num_unit_blocks + local_block,
        mask=columns < num_blocks,
        other=0,
    )
    position = tl.load(q_offsets + q_block)
    stop = tl.load(q_offsets + q_block + 1)
    while position < stop:
        places = position + tl.arange(0, ROWS)
        bits = _bits_of_rows(row_mask, head, places, stop, num_grid, num_blocks, words, BLOCKS)
        starts = tl.load(row_starts + head.to(tl.int64) * num_grid + places, mask=places < stop, other=0)
        slots = (starts - first)[:, None] + tl.cumsum(bits, 1) - bits
        target = base[None, :] + tl.cumsum(bits, 0) - bits
        tl.store(entry_rows + target, tl.broadcast_to(places[:, None], bits.shape), mask=bits == 1)
        tl.store(entry_slots + target, slots.to(tl.int32), mask=bits == 1)
        base += tl.sum(bits, 0)
        position += ROWS


@triton.jit
def attend_lists(
    q_packed,
    k_rows,
    v_rows,
    k_packed,
    v_packed,
    kv_offsets,
    tile_lists,
    tile_starts,
    list_stops,
    entry_rows,
    entry_slots,
    partial,
    partial_lse,
    qk_scale,
    first_head,
    num_rows,
    num_heads,
    repeats,
    num_blocks,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    BULK: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend one tile of at most ROWS queries of one list to its key block, into their slots of `partial`.

    Grid: (tiles,), those of a list one after the other, so that they find its keys in the cache.
    """
    tile = tl.program_id(0)
    index = tl.load(tile_lists + tile)
    start = tl.load(tile_starts + tile)
    stop = tl.load(list_stops + index)
    if start < stop:
        head = index // num_blocks + first_head
        block = index % num_blocks
        kv_head = head // num_heads * (num_heads // repeats) + head % num_heads // repeats
        kv_start = tl.load(kv_offsets + block)
        length = tl.load(kv_offsets + block + 1) - kv_start
        kv_first = kv_head * num_rows + kv_start
        places = start + tl.arange(0, ROWS)
        inside = places < stop
        rows = tl.load(entry_rows + places, mask=inside, other=0)
        q = _load_listed(q_packed, head * num_rows + rows, inside, 0, W, W)
        acc = tl.zeros([ROWS, W], dtype=tl.float32)
        row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([ROWS], dtype=tl.float32)
        whole = length // PIECE * PIECE
        for position in tl.range(0, whole, PIECE, num_stages=STAGES):
            k = _load_rows(k_rows, kv_first + position, 0, W, W, PIECE, BULK)
            v = _load_rows(v_rows, kv_first + position, 0, W, W, PIECE, BULK)
            acc, row_max, row_sum = _add_piece(q, k, v, acc, row_max, row_sum, None, qk_scale, False, False, EXACT)
        if whole < length:
            columns = whole + tl.arange(0, PIECE)
            visible = columns < length
            k = _load_listed(k_packed, kv_first + columns, visible, 0, W, W)
            v = _load_listed(v_packed, kv_first + columns, visible, 0, W, W)
            acc, row_max, row_sum = _add_piece(
                q, k, v, acc, row_max, row_sum, visible[None, :], qk_scale, True, False, EXACT
            )
        # A block without keys gives 0 and -inf; a NaN stays one.
        acc = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
        slots = tl.load(entry_slots + places, mask=inside, other=0).to(tl.int64)
        target = partial + slots[:, None] * W + tl.arange(0, W)[None, :]
        tl.store(target, acc.to(partial.dtype.element_ty), mask=inside[:, None])
        tl.store(partial_lse + slots, row_max + tl.log2(row_sum), mask=inside)


@triton.jit
def attend_tail(
    q_packed,
    tail_k,
    tail_v,
    tail_log2_sizes,
    row_mask,
    row_starts,
    row_counts,
    q_offsets,
    partial,
    partial_lse,
    qk_scale,
    first_head,
    first_block,
    last_block,
    num_grid,
    num_rows,
    num_heads,
    repeats,
    num_blocks,
    words,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend ROWS queries of a unit to the blocks that each does not see, as one key each, into the last slot of each.

    tail_k, tail_v: [B * kv_heads * C, W]. Grid: (tiles, heads).
    """
    head = tl.program_id(1) + first_head
    start = tl.load(q_offsets + first_block) + tl.program_id(0) * ROWS
    stop = tl.load(q_offsets + last_block)
    if start < stop:
        kv_head = head // num_heads * (num_heads // repeats) + head % num_heads // repeats
        first = _first_slot(row_starts, q_offsets, head - tl.program_id(1), first_block, num_grid)
        places = start + tl.arange(0, ROWS)
        inside = places < stop
        q = _load_listed(q_packed, head * num_rows + places, inside, 0, W, W)
        acc = tl.zeros([ROWS, W], dtype=tl.float32)
        row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([ROWS], dtype=tl.float32)
        at = head.to(tl.int64) * num_grid + places
        for place in tl.range(0, num_blocks, PIECE, num_stages=STAGES):
            blocks = place + tl.arange(0, PIECE)
            exists = blocks < num_blocks
            log2_sizes = tl.load(tail_log2_sizes + blocks, mask=exists, other=float("-inf"))
            bits = tl.load(
                row_mask + at[:, None] * words + (blocks // 32)[None, :],
                mask=inside[:, None] & exists[None, :],
                other=0,
            )
            k = _load_listed(tail_k, kv_head * num_blocks + blocks, exists, 0, W, W)
            v = _load_listed(tail_v, kv_head * num_blocks + blocks, exists, 0, W, W)
            left_out = (log2_sizes > float("-inf"))[None, :] & (((bits >> (blocks % 32)[None, :]) & 1) == 0)
            acc, row_max, row_sum = _add_pooled(q, k, v, log2_sizes, left_out, acc, row_max, row_sum, qk_scale, EXACT)
        acc = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
        slots = tl.load(row_starts + at, mask=inside, other=0) - first + tl.load(row_counts + at, mask=inside, other=0)
        target = partial + slots[:, None] * W + tl.arange(0, W)[None, :]
        tl.store(target, acc.to(partial.dtype.element_ty), mask=inside[:, None])
        tl.store(partial_lse + slots, row_max + tl.log2(row_sum), mask=inside)


@triton.jit
def merge_entries(
    partial,
    partial_lse,
    row_starts,
    row_counts,
    q_order,
    q_offsets,
    out,
    lse,
    first_head,
    first_block,
    last_block,
    num_grid,
    num_heads,
    out_b,
    out_n,
    out_h,
    D: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
):
    """out and lse of a unit's queries: the results of a query's entries, weighted by their sums. Grid: (tiles, heads).
    MORE: entries of a query after those of the blocks that it sees.

    Entries of a query are added in the order of their blocks, so every run gives the same bits.
    """
    head = tl.program_id(1) + first_head
    start = tl.load(q_offsets + first_block)
    stop = tl.load(q_offsets + last_block)
    first = _first_slot(row_starts, q_offsets, head - tl.program_id(1), first_block, num_grid)
    places = start + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = places < stop
    at = head.to(tl.int64) * num_grid + places
    slots = tl.load(row_starts + at, mask=inside, other=0) - first
    counts = tl.load(row_counts + at, mask=inside, other=-MORE) + MORE
    most = tl.max(counts, 0)
    dims = tl.arange(0, W)
    acc = tl.zeros([ROWS, W], dtype=tl.float32)
    row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    entry = 0
    while entry < most:
        here = entry < counts
        found = tl.load(partial_lse + slots + entry, mask=here, other=float("-inf"))
        values = tl.load(partial + (slots + entry)[:, None] * W + dims[None, :], mask=here[:, None], other=0.0)
        new_max = tl.maximum(row_max, found)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(found - shift)
        correction = tl.exp2(row_max - shift)
        row_sum = row_sum * correction + weight
        acc = acc * correction[:, None] + weight[:, None] * values.to(tl.float32)
        row_max = new_max
        entry += 1
    empty = row_sum == 0
    acc = acc / tl.where(empty, 1.0, row_sum)[:, None]
    natural = tl.where(empty, float("-inf"), (row_max + tl.log2(tl.where(empty, 1.0, row_sum))) * 0.6931471805599453)
    tokens = tl.load(q_order + places, mask=inside, other=0).to(tl.int64)
    b = (head // num_heads).to(tl.int64)
    h = (head % num_heads).to(tl.int64)
    target = out + b * out_b + h * out_h + tokens[:, None] * out_n + dims[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside[:, None] & (dims < D)[None, :])
    tl.store(lse + head.to(tl.int64) * num_grid + tokens, natural, mask=inside)


@triton.jit
def count_lists(
    counts,
    bases,
    totals,
    num_blocks,
    num_keys,
    stride_h,
    stride_q,
    stride_k,
    BLOCK: tl.constexpr,
):
    """Write for each list (head, key block) `bases` [lists, num_blocks], the queries before each query block's, and
    `totals`. Grid: (lists,)."""
    row = tl.program_id(0)
    source = counts + (row // num_keys).to(tl.int64) * stride_h + row % num_keys * stride_k
    target = bases + row.to(tl.int64) * num_blocks
    total = 0
    for first in range(0, num_blocks, BLOCK):
        places = first + tl.arange(0, BLOCK)
        count = tl.load(source + places * stride_q, mask=places < num_blocks, other=0)
        tl.store(target + places, total + tl.cumsum(count, 0) - count, mask=places < num_blocks)
        total += tl.sum(count, 0)
    tl.store(totals + row, total)


@triton.jit
def place_lists(
    bases,
    totals,
    stops,
    tile_lists,
    tile_starts,
    num_lists,
    num_blocks,
    num_tiles,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Lists one after the other: their start is added to bases, their stops and tiles are written; and of the tiles
    past the last one, each program writes a part. Grid: (lists,)."""
    row = tl.program_id(0)
    start = 0
    first_tile = 0
    num_entries = 0
    num_used = 0
    for first in range(0, num_lists, LISTS):
        lists = first + tl.arange(0, LISTS)
        total = tl.load(totals + lists, mask=lists < num_lists, other=0)
        tiles = (total + ROWS - 1) // ROWS
        start += tl.sum(tl.where(lists < row, total, 0), 0)
        first_tile += tl.sum(tl.where(lists < row, tiles, 0), 0)
        num_entries += tl.sum(total, 0)
        num_used += tl.sum(tiles, 0)
    mine = tl.load(totals + row)
    tl.store(stops + row, start + mine)
    target = bases + row.to(tl.int64) * num_blocks
    for first in range(0, num_blocks, BLOCK):
        places = first + tl.arange(0, BLOCK)
        base = tl.load(target + places, mask=places < num_blocks, other=0)
        tl.store(target + places, base + start, mask=places < num_blocks)
    my_tiles = (mine + ROWS - 1) // ROWS
    place = 0
    # Not range(): its bounds are read on the device, which Triton 3.6's interpreter cannot do with NumPy 2.4.
    while place < my_tiles:
        tiles = place + tl.arange(0, BLOCK)
        tl.store(tile_lists + first_tile + tiles, tl.zeros([BLOCK], tl.int32) + row, mask=tiles < my_tiles)
        tl.store(tile_starts + first_tile + tiles, start + tiles * ROWS, mask=tiles < my_tiles)
        place += BLOCK
    left = num_tiles - num_used
    part = (left + num_lists - 1) // num_lists
    last = num_used + tl.minimum((row + 1) * part, left)
    place = num_used + row * part
    while place < last:
        tiles = place + tl.arange(0, BLOCK)
        tl.store(tile_lists + tiles, tl.zeros([BLOCK], tl.int32) + num_lists - 1, mask=tiles < last)
        tl.store(tile_starts + tiles, tl.zeros([BLOCK], tl.int32) + num_entries, mask=tiles < last)
        place += BLOCK
