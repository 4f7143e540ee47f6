"""The Triton kernels of block-sparse attention. Shapes: B batch, H heads, N tokens, D head_dim, W its power of two.

q, k and v are packed: rows in the order of the plan, one head after the other, [B * H * N + tail, W]. A block is then a
run of rows that one bulk copy fetches, and a block that is shorter than a copy is masked, never padded. Tokens that
are in the order of the plan are read in place: rows [B * N, ...] in which a head begins at a column of its own.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

LENGTH_BITS = tl.constexpr(8)
LENGTH_MASK = tl.constexpr(255)
CHUNK = tl.constexpr(16)


@triton.jit
def _listed_row(group_of, row, num_heads, repeats, PER_HEAD: tl.constexpr):
    """(selection, kv geometry) of a row of lists: rows are selections, or with PER_HEAD heads."""
    selection = row
    geometry = 0
    if PER_HEAD:
        selection = tl.load(group_of + row)
        geometry = row // num_heads * (num_heads // repeats) + row % num_heads // repeats
    return selection, geometry


@triton.jit
def list_short_pieces(
    kv_count,
    kv_index,
    kv_offsets,
    group_of,
    pieces,
    num_full,
    num_partial,
    num_q_blocks,
    num_kv_blocks,
    index_capacity,
    capacity,
    num_heads,
    repeats,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_HEAD: tl.constexpr,
):
    """Pieces of the listed blocks where no block is longer than a piece. One program per (selection, q block).

    A piece is a run of PIECE rows, written as start << 8 | length. Pieces are at the front of a row; what is left of
    a block is at the row's end, in chunks of at most CHUNK rows, so that the rests of several blocks share a step.
    """
    q_block = tl.program_id(0)
    row = tl.program_id(1)
    selection, geometry = _listed_row(group_of, row, num_heads, repeats, PER_HEAD)
    source = selection.to(tl.int64) * num_q_blocks + q_block
    target = row.to(tl.int64) * num_q_blocks + q_block
    count = tl.load(kv_count + source)
    offsets = kv_offsets + geometry * (num_kv_blocks + 1)
    full = 0
    partial = 0
    for first in range(0, count, BLOCK):
        places = first + tl.arange(0, BLOCK)
        listed = places < count
        blocks = tl.load(kv_index + source * index_capacity + places, mask=listed, other=0)
        start = tl.load(offsets + blocks, mask=listed, other=0)
        length = tl.load(offsets + blocks + 1, mask=listed, other=0) - start
        whole = (listed & (length == PIECE)).to(tl.int32)
        front = full + tl.cumsum(whole, 0) - 1
        tl.store(pieces + target * capacity + front, (start << LENGTH_BITS) | PIECE, mask=whole == 1)
        rest = tl.where(length == PIECE, 0, length)
        chunks = (rest + CHUNK - 1) // CHUNK
        back = capacity - partial - tl.cumsum(chunks, 0)
        for chunk in tl.static_range(PIECE // CHUNK):
            code = ((start + chunk * CHUNK) << LENGTH_BITS) | tl.minimum(rest - chunk * CHUNK, CHUNK)
            tl.store(pieces + target * capacity + back + chunk, code, mask=chunk < chunks)
        full += tl.sum(whole, 0)
        partial += tl.sum(chunks, 0)
    tl.store(num_full + target, full)
    tl.store(num_partial + target, partial)


@triton.jit
def list_merged_pieces(
    kv_count,
    kv_index,
    kv_offsets,
    group_of,
    pieces,
    piece_blocks,
    num_full,
    num_partial,
    num_q_blocks,
    num_kv_blocks,
    index_capacity,
    capacity,
    num_heads,
    repeats,
    PIECE: tl.constexpr,
    PER_HEAD: tl.constexpr,
    MERGE: tl.constexpr,
):
    """List pieces as list_short_pieces does, for blocks of any length; with MERGE, adjacent listed blocks make one run.

    Without MERGE, piece_blocks holds the block of each piece, and all pieces are at the end of the row, each of at most
    PIECE rows.
    """
    q_block = tl.program_id(0)
    row = tl.program_id(1)
    selection, geometry = _listed_row(group_of, row, num_heads, repeats, PER_HEAD)
    source = selection.to(tl.int64) * num_q_blocks + q_block
    target = (row.to(tl.int64) * num_q_blocks + q_block) * capacity
    count = tl.load(kv_count + source)
    offsets = kv_offsets + geometry * (num_kv_blocks + 1)
    full = 0
    partial = 0
    run_start = 0
    run_stop = 0
    for place in range(0, count + 1):
        # One iteration more than there are blocks writes the last run.
        is_block = place < count
        block = tl.load(kv_index + source * index_capacity + place, mask=is_block, other=0)
        start = tl.load(offsets + block, mask=is_block, other=-1)
        stop = tl.load(offsets + block + 1, mask=is_block, other=-1)
        if MERGE:
            joins = is_block & ((start == run_stop) | (start == stop))
            if not joins:
                while run_stop - run_start >= PIECE:
                    tl.store(pieces + target + full, (run_start << LENGTH_BITS) | PIECE)
                    full += 1
                    run_start += PIECE
                while run_start < run_stop:
                    partial += 1
                    length = tl.minimum(CHUNK, run_stop - run_start)
                    tl.store(pieces + target + capacity - partial, (run_start << LENGTH_BITS) | length)
                    run_start += CHUNK
                run_start = start
            run_stop = tl.where(start == stop, run_stop, stop)
        else:
            while start < stop:
                length = tl.minimum(PIECE, stop - start)
                partial += 1
                tl.store(pieces + target + capacity - partial, (start << LENGTH_BITS) | length)
                tl.store(piece_blocks + target + capacity - partial, block)
                start += PIECE
    tl.store(num_full + tl.program_id(1).to(tl.int64) * num_q_blocks + q_block, full)
    tl.store(num_partial + tl.program_id(1).to(tl.int64) * num_q_blocks + q_block, partial)


@triton.jit
def mark_listed(kv_count, kv_index, words, num_q_blocks, capacity, num_words, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """words [R, q blocks, num_words], int32: bit b of word w says whether a q block lists the key block 32 w + b. Grid:
    (q blocks, R)."""
    target = tl.program_id(1).to(tl.int64) * num_q_blocks + tl.program_id(0)
    count = tl.load(kv_count + target)
    columns = tl.arange(0, WORDS)
    found = tl.zeros([WORDS], tl.int32)
    place = 0
    # Not range(): its bounds are read on the device, which Triton 3.6's interpreter cannot do with NumPy 2.4.
    while place < count:
        places = place + tl.arange(0, BLOCK)
        blocks = tl.load(kv_index + target * capacity + places, mask=places < count, other=-1)
        bits = tl.full([BLOCK], 1, tl.int32) << (blocks & 31)
        # A block is listed once, so the sum of its row's bits is their union.
        found += tl.sum(tl.where((blocks >> 5)[:, None] == columns[None, :], bits[:, None], 0), 0)
        place += BLOCK
    tl.store(words + target * num_words + columns, found, mask=columns < num_words)


@triton.jit
def _load_rows(rows, first, column, stride, W: tl.constexpr, COUNT: tl.constexpr, BULK: tl.constexpr):
    """W values from `column` of COUNT rows from `first`: by one bulk copy from a descriptor, or through pointers."""
    if BULK:
        values = rows.load([first, column])
    else:
        index = first + tl.arange(0, COUNT)
        values = tl.load(rows + index.to(tl.int64)[:, None] * stride + column + tl.arange(0, W)[None, :])
    return values


@triton.jit
def _load_listed(rows, index, listed, column, stride, W: tl.constexpr):
    """Some rows through pointers; rows that are not listed are 0, so that no NaN of theirs meets a weight of 0."""
    pointers = rows + index.to(tl.int64)[:, None] * stride + column + tl.arange(0, W)[None, :]
    return tl.load(pointers, mask=listed[:, None], other=0.0)


@triton.jit
def _add_piece(
    q,
    k,
    v,
    acc,
    row_max,
    row_sum,
    visible,
    qk_scale,
    MASKED: tl.constexpr,
    EMPTY_ROWS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Compute a step of the online softmax, base 2. visible: scores that count; EMPTY_ROWS: a row may see none."""
    scores = _scores(q, k, EXACT)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    return _add_scores(scores, tl.max(scores, 1) * qk_scale, v, acc, row_max, row_sum, qk_scale, EMPTY_ROWS, EXACT)


@triton.jit
def _scores(q, k, EXACT: tl.constexpr):
    """q k^T, float32."""
    if EXACT:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(k))
    return scores


@triton.jit
def _add_scores(scores, top, v, acc, row_max, row_sum, qk_scale, EMPTY_ROWS: tl.constexpr, EXACT: tl.constexpr):
    """Compute the softmax of a step and its product with v. top: the highest score of each row, scaled."""
    new_max = tl.maximum(row_max, top)
    if EMPTY_ROWS:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        shift = new_max
    weights = tl.exp2(scores * qk_scale - shift[:, None])
    correction = tl.exp2(row_max - shift)
    row_sum = row_sum * correction + tl.sum(weights, 1)
    acc = acc * correction[:, None]
    if EXACT:
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc)
    return acc, new_max, row_sum


@triton.jit
def _add_pooled(q, k, v, log2_sizes, left_out, acc, row_max, row_sum, qk_scale, EXACT: tl.constexpr):
    """Compute a step of the online softmax over keys that stand for blocks. left_out: bool [1 or ROWS, PIECE]."""
    # As a score before the scale, so that the step is that of any other key.
    scores = _scores(q, k, EXACT) + (log2_sizes / qk_scale)[None, :]
    scores = tl.where(left_out, scores, float("-inf"))
    return _add_scores(scores, tl.max(scores, 1) * qk_scale, v, acc, row_max, row_sum, qk_scale, True, EXACT)


@triton.jit
def attend(
    q_rows,
    k_rows,
    v_rows,
    q_values,
    k_values,
    v_values,
    out,
    lse,
    q_order,
    q_offsets,
    tile_blocks,
    tile_starts,
    pieces,
    piece_blocks,
    num_full,
    num_partial,
    group_of,
    text_lengths,
    row_mask,
    has_broken_values,
    pooled,
    gate,
    tail_k,
    tail_v,
    tail_log2_sizes,
    listed_words,
    qk_scale,
    num_tiles,
    num_rows,
    num_grid,
    num_heads,
    repeats,
    num_q_blocks,
    num_kv_blocks,
    capacity,
    mask_words,
    order_stride,
    offsets_stride,
    tile_stride,
    out_b,
    out_n,
    out_h,
    gate_b,
    gate_n,
    gate_h,
    q_n,
    q_h,
    k_n,
    k_h,
    v_n,
    v_h,
    D: tl.constexpr,
    W: tl.constexpr,
    IN_PLACE: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    TILES_PER_BLOCK: tl.constexpr,
    LEFT: tl.constexpr,
    REST_OF: tl.constexpr,
    PIECES_PER_HEAD: tl.constexpr,
    HAS_TEXT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_ROW_MASK: tl.constexpr,
    LOOK_FOR_BROKEN: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BULK: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend one tile of at most ROWS queries of one block and head to the pieces that its block lists, then to the
    text.

    Grid: (num_tiles + text tiles, B * H). Tiles past the grid's are those of text queries, which see everything. The
    rest of a block after whole tiles may be a launch of its own, with fewer rows: this one leaves rests of at most LEFT
    queries to it; with REST_OF it is that launch, for rests of tiles of REST_OF rows, one tile per block. With row
    masks, a launch with LOOK_FOR_BROKEN handles values of which some are not finite, one without handles others.
    HAS_TAIL: blocks that a query of the grid does not see are one key each, tail_k and tail_v [B * kv_heads * kv
    blocks, W]; listed_words: of mark_listed.

    q_rows, k_rows, v_rows: descriptors with BULK, else as q_values, k_values, v_values: packed, or with IN_PLACE rows
    of tokens that are q_n, k_n, v_n values apart, and their heads q_h, k_h, v_h.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    b = head // num_heads
    h = head % num_heads
    num_text = num_rows - num_grid
    valid_text = num_text
    if HAS_LENGTHS:
        valid_text = tl.load(text_lengths + b)
    q_order += head.to(tl.int64) * order_stride
    q_offsets += head.to(tl.int64) * offsets_stride
    is_text = tile >= num_tiles
    block = 0
    start = num_grid + (tile - num_tiles) * ROWS
    stop = num_grid + valid_text
    if not is_text:
        if REST_OF > 0:
            block = tile
            start = tl.load(q_offsets + block)
            size = tl.load(q_offsets + block + 1) - start
            start += (size + REST_OF - ROWS - 1) // REST_OF * REST_OF
        elif TILES_PER_BLOCK > 0:
            block = tile // TILES_PER_BLOCK
            start = tl.load(q_offsets + block) + tile % TILES_PER_BLOCK * ROWS
        else:
            block = tl.load(tile_blocks + head.to(tl.int64) * tile_stride + tile)
            start = tl.load(tile_starts + head.to(tl.int64) * tile_stride + tile)
        stop = tl.load(q_offsets + block + 1)
        if stop - start <= LEFT:
            stop = start
    if HAS_ROW_MASK:
        # Two launches, one of which does nothing: looking for NaN and inf in every piece takes 2.5 times as long.
        if (tl.load(has_broken_values) != 0) != LOOK_FOR_BROKEN:
            stop = start
    if start < stop:
        row = head
        if not PIECES_PER_HEAD:
            row = tl.load(group_of + head)
        listed = row.to(tl.int64) * num_q_blocks + block
        if IN_PLACE:
            kv_first = b * num_rows
            k_stride = k_n
            v_stride = v_n
            k_column = h // repeats * k_h
            v_column = h // repeats * v_h
            if BULK:
                q = _load_rows(q_rows, kv_first + start, h * q_h, q_n, W, ROWS, BULK)
            else:
                # Without rows behind the last one that a tile may read: those behind its own are left out.
                q_index = start + tl.arange(0, ROWS)
                q = _load_listed(q_values, kv_first + q_index, q_index < stop, h * q_h, q_n, W)
        else:
            kv_first = (b * (num_heads // repeats) + h // repeats) * num_rows
            k_stride = W
            v_stride = W
            k_column = 0
            v_column = 0
            q = _load_rows(q_rows, head * num_rows + start, 0, W, W, ROWS, BULK)
        acc = tl.zeros([ROWS, W], dtype=tl.float32)
        # Rows that see a value that is not finite; used with row masks alone.
        sees_broken = tl.zeros([ROWS], dtype=tl.int32)
        row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([ROWS], dtype=tl.float32)
        columns = tl.arange(0, PIECE)
        full = 0
        partial = 0
        text_from = 0
        if not is_text:
            full = tl.load(num_full + listed)
            partial = tl.load(num_partial + listed)
            text_from = num_grid
        my_pieces = pieces + listed * capacity
        for place in tl.range(0, full, num_stages=STAGES):
            first = kv_first + (tl.load(my_pieces + place) >> LENGTH_BITS)
            k = _load_rows(k_rows, first, k_column, k_stride, W, PIECE, BULK)
            v = _load_rows(v_rows, first, v_column, v_stride, W, PIECE, BULK)
            acc, row_max, row_sum = _add_piece(q, k, v, acc, row_max, row_sum, None, qk_scale, False, False, EXACT)
        if HAS_ROW_MASK:
            for place in tl.range(capacity - partial, capacity, num_stages=STAGES):
                code = tl.load(my_pieces + place)
                first = kv_first + (code >> LENGTH_BITS)
                kv_block = tl.load(piece_blocks + listed * capacity + place)
                rows = tl.minimum(start + tl.arange(0, ROWS), num_grid - 1)
                words = tl.load(row_mask + (head.to(tl.int64) * num_grid + rows) * mask_words + kv_block // 32)
                seen = ((words >> (kv_block % 32)) & 1) == 1
                inside = columns < (code & LENGTH_MASK)
                visible = inside[None, :] & seen[:, None]
                if LOOK_FOR_BROKEN:
                    k = _load_listed(k_values, first + columns, inside, k_column, k_stride, W)
                    v = _load_listed(v_values, first + columns, inside, v_column, v_stride, W)
                    # A weight of 0 does not hide NaN or inf from the rows of this tile that do not see the key.
                    finite = v - v == 0.0
                    broken = tl.max(tl.where(finite, 0, 1), 1)
                    sees_broken = tl.maximum(sees_broken, tl.max(tl.where(visible, broken[None, :], 0), 1))
                    v = tl.where(finite, v, 0.0)
                else:
                    k = _load_rows(k_rows, first, k_column, k_stride, W, PIECE, BULK)
                    v = _load_rows(v_rows, first, v_column, v_stride, W, PIECE, BULK)
                acc, row_max, row_sum = _add_piece(q, k, v, acc, row_max, row_sum, visible, qk_scale, True, True, EXACT)
            if LOOK_FOR_BROKEN:
                acc = tl.where((sees_broken > 0)[:, None], float("nan"), acc)
        else:
            for place in tl.range(0, partial, PIECE // CHUNK, num_stages=STAGES):
                chunk = place + columns // CHUNK
                code = tl.load(my_pieces + capacity - 1 - chunk, mask=chunk < partial, other=0)
                visible = columns % CHUNK < (code & LENGTH_MASK)
                rows = kv_first + (code >> LENGTH_BITS) + columns % CHUNK
                k = _load_listed(k_values, rows, visible, k_column, k_stride, W)
                v = _load_listed(v_values, rows, visible, v_column, v_stride, W)
                acc, row_max, row_sum = _add_piece(
                    q, k, v, acc, row_max, row_sum, visible[None, :], qk_scale, True, False, EXACT
                )
        if HAS_TAIL:
            # Pieces of pooled keys: 64 of them stand for as many blocks, so this loop is short and the rows stay in L2.
            num_pooled = tl.where(is_text, 0, num_kv_blocks)
            kv_head = b * (num_heads // repeats) + h // repeats
            sizes = tail_log2_sizes
            if PIECES_PER_HEAD:
                sizes += kv_head.to(tl.int64) * num_kv_blocks
            my_words = tl.load(group_of + head).to(tl.int64) * num_q_blocks + block
            my_words = listed_words + my_words * ((num_kv_blocks + 31) // 32)
            for place in tl.range(0, num_pooled, PIECE, num_stages=STAGES):
                kv_blocks = place + columns
                inside = kv_blocks < num_kv_blocks
                words = tl.load(my_words + kv_blocks // 32, mask=inside, other=0)
                log2_sizes = tl.load(sizes + kv_blocks, mask=inside, other=float("-inf"))
                k = _load_listed(tail_k, kv_head * num_kv_blocks + kv_blocks, inside, 0, W, W)
                v = _load_listed(tail_v, kv_head * num_kv_blocks + kv_blocks, inside, 0, W, W)
                exists = log2_sizes > float("-inf")
                seen = (((words >> (kv_blocks % 32)) & 1) == 1)[None, :]
                if HAS_ROW_MASK:
                    rows = tl.minimum(start + tl.arange(0, ROWS), num_grid - 1)
                    of_rows = row_mask + (head.to(tl.int64) * num_grid + rows)[:, None] * mask_words
                    words = tl.load(of_rows + (kv_blocks // 32)[None, :], mask=inside[None, :], other=0)
                    seen = seen & (((words >> (kv_blocks % 32)[None, :]) & 1) == 1)
                left_out = exists[None, :] & ~seen
                acc, row_max, row_sum = _add_pooled(
                    q, k, v, log2_sizes, left_out, acc, row_max, row_sum, qk_scale, EXACT
                )
        if HAS_TEXT:
            text_stop = num_grid + valid_text
            whole_stop = text_from + (text_stop - text_from) // PIECE * PIECE
            for position in tl.range(text_from, whole_stop, PIECE, num_stages=STAGES):
                k = _load_rows(k_rows, kv_first + position, k_column, k_stride, W, PIECE, BULK)
                v = _load_rows(v_rows, kv_first + position, v_column, v_stride, W, PIECE, BULK)
                acc, row_max, row_sum = _add_piece(q, k, v, acc, row_max, row_sum, None, qk_scale, False, False, EXACT)
            if whole_stop < text_stop:
                visible = whole_stop + columns < text_stop
                k = _load_listed(k_values, kv_first + whole_stop + columns, visible, k_column, k_stride, W)
                v = _load_listed(v_values, kv_first + whole_stop + columns, visible, v_column, v_stride, W)
                acc, row_max, row_sum = _add_piece(
                    q, k, v, acc, row_max, row_sum, visible[None, :], qk_scale, True, HAS_ROW_MASK, EXACT
                )
        sees = row_sum > 0
        acc = acc / tl.where(sees, row_sum, 1.0)[:, None]
        natural = tl.where(sees, (row_max + tl.log2(tl.where(sees, row_sum, 1.0))) * 0.6931471805599453, float("-inf"))
        positions = start + tl.arange(0, ROWS)
        inside = positions < stop
        if IN_PLACE:
            tokens = positions.to(tl.int64)
        else:
            tokens = tl.load(q_order + positions, mask=inside, other=0).to(tl.int64)
        dims = tl.arange(0, W)
        keep = inside[:, None] & (dims[None, :] < D)
        if HAS_BRANCH:
            if not is_text:
                added = tl.load(
                    pooled + (head.to(tl.int64) * num_q_blocks + block) * D + dims, mask=dims < D, other=0.0
                )
                gate_rows = gate + b.to(tl.int64) * gate_b + h.to(tl.int64) * gate_h
                gates = tl.load(gate_rows + tokens[:, None] * gate_n + dims[None, :], mask=keep, other=0.0)
                acc += gates.to(tl.float32) * added.to(tl.float32)[None, :]
        target = out + b.to(tl.int64) * out_b + h.to(tl.int64) * out_h + tokens[:, None] * out_n + dims[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=keep)
        tl.store(lse + head.to(tl.int64) * num_rows + tokens, natural, mask=inside)
