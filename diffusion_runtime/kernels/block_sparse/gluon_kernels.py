"""Block-sparse attention for Hopper in Gluon: a producer warp fills a ring of key and value tiles by TMA, a warpgroup
computes with them by wgmma.

Shapes, packed rows and rows in place as in triton_kernels.py, whose lists of pieces these kernels read.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LENGTH_BITS = gl.constexpr(8)
LENGTH_MASK = gl.constexpr(255)
# Queries of a tile and keys of a step; keys of a chunk, as in triton_kernels.py; chunks of a step; columns of a chunk's
# copy, which the swizzled tiles in shared memory hold one after the other.
TILE = gl.constexpr(64)
CHUNK = gl.constexpr(16)
CHUNKS = gl.constexpr(4)
PANEL = gl.constexpr(64)


@gluon.jit
def _claim(step, full, empty, BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Wait until the stage of a step is free, and announce its bytes. Returns the stage."""
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    return stage


@gluon.jit
def _copy_tiles(stage, row, k_rows, v_rows, k_ring, v_ring, full, k_column, v_column):
    """Copy TILE rows of keys and of values from a row on."""
    tma.async_copy_global_to_shared(k_rows, [row, k_column], full.index(stage), k_ring.index(stage))
    tma.async_copy_global_to_shared(v_rows, [row, v_column], full.index(stage), v_ring.index(stage))


@gluon.jit
def _produce(
    k_rows,
    v_rows,
    k_chunks,
    v_chunks,
    k_ring,
    v_ring,
    full,
    empty,
    my_pieces,
    kv_first,
    k_column,
    v_column,
    num_full,
    num_partial,
    text_from,
    num_text_steps,
    text_rest,
    capacity,
    W: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_RESTS: gl.constexpr,
    HAS_TEXT: gl.constexpr,
):
    """Copy the tiles of every step, in the order in which _consume reads them: whole pieces, whole tiles of text, rests
    of blocks by chunks, the rest of the text."""
    BYTES: gl.constexpr = 2 * TILE * W * 2
    num_whole = num_full + num_text_steps
    code = gl.load(my_pieces)
    for step in range(num_whole):
        first = text_from + (step - num_full) * TILE
        if step < num_full:
            first = code >> LENGTH_BITS
        # Ahead of the wait, which hides the load.
        if step + 1 < num_full:
            code = gl.load(my_pieces + step + 1)
        stage = _claim(step, full, empty, BYTES, STAGES)
        _copy_tiles(stage, kv_first + first, k_rows, v_rows, k_ring, v_ring, full, k_column, v_column)
    if HAS_RESTS:
        parts: gl.constexpr = STAGES * CHUNKS * (W // PANEL)
        k_parts = k_ring._reinterpret(k_ring.dtype, [parts, CHUNK, PANEL], k_ring.layout)
        v_parts = v_ring._reinterpret(v_ring.dtype, [parts, CHUNK, PANEL], v_ring.layout)
        for place in range(0, num_partial, CHUNKS):
            stage = _claim(num_whole + place // CHUNKS, full, empty, BYTES, STAGES)
            for chunk in gl.static_range(CHUNKS):
                # Past the last one, its rows again, which are masked.
                code = gl.load(my_pieces + capacity - 1 - gl.minimum(place + chunk, num_partial - 1))
                first = kv_first + (code >> LENGTH_BITS)
                for panel in gl.static_range(W // PANEL):
                    part = (stage * (W // PANEL) + panel) * CHUNKS + chunk
                    column = panel * PANEL
                    tma.async_copy_global_to_shared(
                        k_chunks, [first, k_column + column], full.index(stage), k_parts.index(part)
                    )
                    tma.async_copy_global_to_shared(
                        v_chunks, [first, v_column + column], full.index(stage), v_parts.index(part)
                    )
    if HAS_TEXT:
        if text_rest > 0:
            stage = _claim(num_whole + (num_partial + CHUNKS - 1) // CHUNKS, full, empty, BYTES, STAGES)
            first = kv_first + text_from + num_text_steps * TILE
            _copy_tiles(stage, first, k_rows, v_rows, k_ring, v_ring, full, k_column, v_column)


@gluon.jit
def _weigh(scores, row_max, row_sum, qk_scale):
    """Compute a step of the online softmax, base 2: the weights, and what the sums before are multiplied with."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * qk_scale)
    weights = gl.exp2(scores * qk_scale - new_max[:, None])
    correction = gl.exp2(row_max - new_max)
    row_sum = row_sum * correction + gl.sum(weights, 1)
    return weights, correction, new_max, row_sum


@gluon.jit
def _consume(
    q_tile,
    k_ring,
    v_ring,
    q_full,
    full,
    empty,
    out,
    lse,
    q_order,
    my_pieces,
    pooled,
    gate,
    qk_scale,
    start,
    stop,
    num_full,
    num_partial,
    num_text_steps,
    text_rest,
    capacity,
    out_n,
    gate_n,
    is_text,
    D: gl.constexpr,
    W: gl.constexpr,
    IN_PLACE: gl.constexpr,
    HAS_TEXT: gl.constexpr,
    HAS_RESTS: gl.constexpr,
    HAS_BRANCH: gl.constexpr,
    STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):
    """Attend the queries of a tile to the tiles of the ring, and write their rows of out and lse."""
    dtype: gl.constexpr = k_ring.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, W, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    num_whole = num_full + num_text_steps
    acc = gl.zeros([TILE, W], gl.float32, o_layout)
    nothing = gl.zeros([TILE, TILE], gl.float32, s_layout)
    row_max = gl.full([TILE], float("-inf"), gl.float32, s_rows)
    row_sum = gl.zeros([TILE], gl.float32, s_rows)
    mbarrier.wait(q_full, 0)
    if num_whole > 0:
        mbarrier.wait(full.index(0), 0)
        scores = warpgroup_mma(q_tile, k_ring.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        weights, correction, row_max, row_sum = _weigh(scores, row_max, row_sum, qk_scale)
        p = gl.convert_layout(weights.to(dtype), p_layout)
        for step in range(1, num_whole):
            stage = step % STAGES
            before = (step - 1) % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            scores = warpgroup_mma(q_tile, k_ring.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            # Beside the maxima of the scores.
            acc = warpgroup_mma(p, v_ring.index(before), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            weights, correction, row_max, row_sum = _weigh(scores, row_max, row_sum, qk_scale)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            mbarrier.arrive(empty.index(before), count=1)
            acc = acc * gl.convert_layout(correction, o_rows)[:, None]
            p = gl.convert_layout(weights.to(dtype), p_layout)
        last = (num_whole - 1) % STAGES
        acc = warpgroup_mma(p, v_ring.index(last), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(empty.index(last), count=1)
    if HAS_RESTS or HAS_TEXT:
        num_rests = (num_partial + CHUNKS - 1) // (CHUNKS)
        num_masked = num_rests
        if text_rest > 0:
            num_masked += 1
        columns = gl.arange(0, TILE, gl.SliceLayout(0, s_layout))
        copied: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NUM_WARPS, 1], [1, 0])
        v_columns = gl.arange(0, TILE, gl.SliceLayout(1, copied))
        for masked in range(num_masked):
            step = num_whole + masked
            stage = step % STAGES
            lengths = gl.full([TILE], 0, gl.int32, gl.SliceLayout(0, s_layout)) + text_rest
            v_lengths = gl.full([TILE], 0, gl.int32, gl.SliceLayout(1, copied)) + text_rest
            places = columns
            v_places = v_columns
            if masked < num_rests:
                chunk = masked * (CHUNKS) + columns // CHUNK
                code = gl.load(my_pieces + capacity - 1 - chunk, mask=chunk < num_partial, other=0)
                lengths = code & LENGTH_MASK
                places = columns % CHUNK
                chunk = masked * (CHUNKS) + v_columns // CHUNK
                code = gl.load(my_pieces + capacity - 1 - chunk, mask=chunk < num_partial, other=0)
                v_lengths = code & LENGTH_MASK
                v_places = v_columns % CHUNK
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            scores = warpgroup_mma(q_tile, k_ring.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            # Rows that are not listed may hold NaN, which a weight of 0 does not hide.
            values = v_ring.index(stage).load(copied)
            values = gl.where((v_places < v_lengths)[:, None], values, gl.zeros_like(values))
            v_ring.index(stage).store(values)
            fence_async_shared()
            scores = warpgroup_mma_wait(0, deps=[scores])
            scores = gl.where((places < lengths)[None, :], scores, float("-inf"))
            weights, correction, row_max, row_sum = _weigh(scores, row_max, row_sum, qk_scale)
            acc = acc * gl.convert_layout(correction, o_rows)[:, None]
            p = gl.convert_layout(weights.to(dtype), p_layout)
            acc = warpgroup_mma(p, v_ring.index(stage), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            mbarrier.arrive(empty.index(stage), count=1)
    sees = row_sum > 0
    total = gl.where(sees, row_sum, 1.0)
    natural = gl.where(sees, (row_max + gl.log2(total)) * 0.6931471805599453, float("-inf"))
    acc = acc * gl.convert_layout(1.0 / total, o_rows)[:, None]
    positions = start + gl.arange(0, TILE, s_rows)
    inside = positions < stop
    tokens = positions
    if not IN_PLACE:
        tokens = gl.load(q_order + positions, mask=inside, other=0)
    gl.store(lse + tokens, natural, mask=inside)
    # By way of the queries' memory, so that a thread stores 16 bytes in a row.
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [NUM_WARPS, 1], [1, 0])
    positions = start + gl.arange(0, TILE, gl.SliceLayout(1, stored))
    rows = positions.to(gl.int64)
    if not IN_PLACE:
        rows = gl.load(q_order + positions, mask=positions < stop, other=0).to(gl.int64)
    dims = gl.arange(0, W, gl.SliceLayout(0, stored))
    keep = (positions < stop)[:, None] & (dims < D)[None, :]
    if HAS_BRANCH:
        if not is_text:
            o_dims = gl.arange(0, W, gl.SliceLayout(0, o_layout))
            added = gl.load(pooled + o_dims, mask=o_dims < D, other=0.0).to(gl.float32)
            q_tile.store(gl.load(gate + rows[:, None] * gate_n + dims[None, :], mask=keep, other=0.0))
            acc += q_tile.load(o_layout).to(gl.float32) * added[None, :]
    q_tile.store(acc.to(dtype))
    gl.store(out + rows[:, None] * out_n + dims[None, :], q_tile.load(stored), mask=keep)


@gluon.jit
def attend_tiles(
    q_rows,
    k_rows,
    v_rows,
    k_chunks,
    v_chunks,
    out,
    lse,
    q_order,
    q_offsets,
    tile_blocks,
    tile_starts,
    pieces,
    num_full,
    num_partial,
    group_of,
    text_lengths,
    pooled,
    gate,
    qk_scale,
    num_tiles,
    num_text_tiles,
    num_rows,
    num_grid,
    batch_heads,
    num_heads,
    repeats,
    num_q_blocks,
    capacity,
    order_stride,
    offsets_stride,
    tile_stride,
    out_b,
    out_n,
    out_h,
    gate_b,
    gate_n,
    gate_h,
    q_h,
    k_h,
    v_h,
    D: gl.constexpr,
    W: gl.constexpr,
    IN_PLACE: gl.constexpr,
    TILES_PER_BLOCK: gl.constexpr,
    PIECES_PER_HEAD: gl.constexpr,
    HAS_TEXT: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    HAS_BRANCH: gl.constexpr,
    HAS_RESTS: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Attend one tile of at most TILE queries of one block and head to the pieces that its block lists, then to the
    text.

    Grid: B * H * (text tiles + tiles), the text's first, because each of them sees every key.
    """
    program = gl.program_id(0)
    num_text_programs = batch_heads * num_text_tiles
    is_text = program < num_text_programs
    head = program
    tile = program
    if HAS_TEXT:
        if is_text:
            head = program // num_text_tiles
            tile = program % num_text_tiles
    if not is_text:
        head = (program - num_text_programs) // num_tiles
        tile = (program - num_text_programs) % num_tiles
    b = head // num_heads
    h = head % num_heads
    valid_text = num_rows - num_grid
    if HAS_LENGTHS:
        valid_text = gl.load(text_lengths + b)
    q_order += head.to(gl.int64) * order_stride
    q_offsets += head.to(gl.int64) * offsets_stride
    block = 0
    start = num_grid + tile * TILE
    stop = num_grid + valid_text
    if not is_text:
        if TILES_PER_BLOCK > 0:
            block = tile // TILES_PER_BLOCK
            start = gl.load(q_offsets + block) + tile % TILES_PER_BLOCK * TILE
        else:
            block = gl.load(tile_blocks + head.to(gl.int64) * tile_stride + tile)
            start = gl.load(tile_starts + head.to(gl.int64) * tile_stride + tile)
        stop = gl.load(q_offsets + block + 1)
    if start < stop:
        row = head
        if not PIECES_PER_HEAD:
            row = gl.load(group_of + head)
        listed = row.to(gl.int64) * num_q_blocks + block
        if IN_PLACE:
            q_first = b * num_rows + start
            kv_first = b * num_rows
            q_column = h * q_h
            k_column = h // repeats * k_h
            v_column = h // repeats * v_h
        else:
            q_first = head * num_rows + start
            kv_first = (b * (num_heads // repeats) + h // repeats) * num_rows
            q_column = 0
            k_column = 0
            v_column = 0
        full_count = 0
        partial_count = 0
        text_from = 0
        if not is_text:
            full_count = gl.load(num_full + listed)
            if HAS_RESTS:
                partial_count = gl.load(num_partial + listed)
            text_from = num_grid
        num_text_steps = 0
        text_rest = 0
        if HAS_TEXT:
            num_text_steps = (num_grid + valid_text - text_from) // TILE
            text_rest = (num_grid + valid_text - text_from) % TILE
        my_pieces = pieces + listed * capacity
        dtype: gl.constexpr = q_rows.dtype
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        q_tile = gl.allocate_shared_memory(dtype, [TILE, W], shared)
        k_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE, W], shared)
        v_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE, W], shared)
        q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(q_full, 1)
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), 1)
            mbarrier.init(empty.index(stage), 1)
        fence_async_shared()
        mbarrier.expect(q_full, TILE * W * 2)
        tma.async_copy_global_to_shared(q_rows, [q_first, q_column], q_full, q_tile)
        to = out + b.to(gl.int64) * out_b + h.to(gl.int64) * out_h
        gate_rows = gate + b.to(gl.int64) * gate_b + h.to(gl.int64) * gate_h
        of_block = pooled + (head.to(gl.int64) * num_q_blocks + block) * D
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        q_tile,
                        k_ring,
                        v_ring,
                        q_full,
                        full,
                        empty,
                        to,
                        lse + head.to(gl.int64) * num_rows,
                        q_order,
                        my_pieces,
                        of_block,
                        gate_rows,
                        qk_scale,
                        start,
                        stop,
                        full_count,
                        partial_count,
                        num_text_steps,
                        text_rest,
                        capacity,
                        out_n,
                        gate_n,
                        is_text,
                        D,
                        W,
                        IN_PLACE,
                        HAS_TEXT,
                        HAS_RESTS,
                        HAS_BRANCH,
                        STAGES,
                        num_warps,
                    ),
                ),
                (
                    _produce,
                    (
                        k_rows,
                        v_rows,
                        k_chunks,
                        v_chunks,
                        k_ring,
                        v_ring,
                        full,
                        empty,
                        my_pieces,
                        kv_first,
                        k_column,
                        v_column,
                        full_count,
                        partial_count,
                        text_from,
                        num_text_steps,
                        text_rest,
                        capacity,
                        W,
                        STAGES,
                        HAS_RESTS,
                        HAS_TEXT,
                    ),
                ),
            ],
            [1],
            [40],
        )
