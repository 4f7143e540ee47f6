"""Which chunks V-MoBA selects: every mode and group against loops over the definition, and its schedule of chunks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from sparse_oracle import random_qkv
from tables import table

from diffusion_runtime.attention import LayerInfo, StepInfo, TokenLayout, plan_attention
from diffusion_runtime.attention.sparse import vmoba
from diffusion_runtime.attention.sparse.vmoba import VMobaOptions, chunk_kind, chunks_of
from diffusion_runtime.kernels import chunk_selection
from diffusion_runtime.kernels.block_sparse import gathered, row_masks
from diffusion_runtime.kernels.block_sparse.api import block_sparse_attention
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan

LAYOUT = TokenLayout((3, 5, 4), 2, 1)
# Ragged in time (2 + 1 frames), in space (3 + 2 by 3 + 1) and in both.
CHUNKS: dict[str, Any] = {
    "temporal_chunk_size": 0.7,
    "spatial_chunk_size": (3, 3),
    "st_chunk_size": (2, 2, 3),
    "first_full_step": 0,
}
LAYER_OF = {"temporal": 0, "spatial": 1, "st": 2}
TYPES = ("query_head", "head_global", "overall", "block")

Entry = tuple[int, int, int]


def chunk_of_tokens(kind: str, layout: TokenLayout = LAYOUT) -> list[int]:
    """The chunk of every grid token in raster order, by the definition and CHUNKS."""
    frames, height, width = layout.grid
    if kind == "temporal":
        return [token // int(0.7 * height * width) for token in range(frames * height * width)]
    tile = (frames, 3, 3) if kind == "spatial" else (2, 2, 3)
    rows, columns = -(-height // tile[1]), -(-width // tile[2])
    places = itertools.product(range(frames), range(height), range(width))
    return [((t // tile[0]) * rows + y // tile[1]) * columns + x // tile[2] for t, y, x in places]


def order_of(chunks: list[int]) -> list[int]:
    """Grid tokens chunk by chunk."""
    return sorted(range(len(chunks)), key=lambda token: (chunks[token], token))


def gates_of(q: torch.Tensor, k: torch.Tensor, chunks: list[int], layout: TokenLayout = LAYOUT) -> dict[Entry, float]:
    """(head, token, chunk) -> gate of one sample; q, k: [seq, heads, head_dim]."""
    first, repeats = layout.num_prefix_tokens, q.shape[1] // k.shape[1]
    gates = {}
    for head in range(q.shape[1]):
        for chunk in range(max(chunks) + 1):
            mine = [first + token for token, other in enumerate(chunks) if other == chunk]
            mean = k[mine, head // repeats].double().mean(dim=0)
            for token in range(len(chunks)):
                gates[head, token, chunk] = float(q[first + token, head].double() @ mean)
    return gates


def groups_of(gates: Iterable[Entry], group: str) -> list[list[Entry]]:
    key = {
        "query_head": lambda entry: entry[:2],
        "head_global": lambda entry: entry[0],
        "overall": lambda entry: 0,
        "block": lambda entry: entry[2],
    }[group]
    entries = sorted(gates, key=lambda entry: (key(entry), entry))
    return [list(members) for _, members in itertools.groupby(entries, key)]


def select_by_share(gates: dict[Entry, float], chunks: list[int], group: str, threshold: float) -> set[Entry]:
    selected = {entry for entry in gates if entry[2] == chunks[entry[1]]}
    for members in groups_of(gates, group):
        low, high = min(gates[e] for e in members), max(gates[e] for e in members)
        height = {e: (gates[e] - low) / (high - low) if high > low else 0.0 for e in members}
        total = sum(height.values()) + 1e-6
        own = sum(height[e] for e in members if e in selected)
        remain = max(threshold - own / total, 0.0)
        reached = 0.0
        for position, entry in enumerate(
            sorted((e for e in members if e[2] != chunks[e[1]]), key=lambda e: -height[e])
        ):
            if position > 0 and reached >= remain:
                break
            reached += height[entry] / total
            selected.add(entry)
    return selected


def select_best(gates: dict[Entry, float], chunks: list[int], group: str, top: int) -> set[Entry]:
    selected = {entry for entry in gates if entry[2] == chunks[entry[1]]}
    for members in groups_of(gates, group):
        foreign = sorted((e for e in members if e not in selected), key=lambda e: -gates[e])
        num_rows = len({e[:2] for e in members})
        selected.update(foreign[: (top - 1) * num_rows])
    return selected


def plan_of(
    q: torch.Tensor, k: torch.Tensor, kind: str = "temporal", layout: TokenLayout = LAYOUT, **options: Any
) -> SparsePlan:
    return plan_attention(
        q,
        k,
        backend="vmoba_attn",
        options={**CHUNKS, **options},
        layout=layout,
        layer=LayerInfo(LAYER_OF[kind], 6),
        step=StepInfo(20, 50),
    )


def entries_of(plan: SparsePlan, sample: int, chunks: list[int]) -> set[Entry]:
    """(head, token, chunk) that a plan lets a grid query see."""
    order = order_of(chunks)
    return {
        (head, order[row], chunk)
        for head in range(plan.num_heads)
        for row, chunk in plan.row_selection(sample, head).nonzero().tolist()
    }


# --- the definition ---------------------------------------------------------------------------------------------------


@table("kind", LAYER_OF)
@table("group", TYPES)
@table("threshold", [0.0, 0.25, 0.6, 0.95])
def test_threshold_equals_the_definition(kind: str, group: str, threshold: float) -> None:
    q, k, _ = random_qkv(LAYOUT, batch=2, num_heads=4, num_kv_heads=2, seed=1)
    plan = plan_of(q, k, kind, moba_threshold=threshold, moba_threshold_type=group)
    chunks = chunk_of_tokens(kind)
    for sample in range(2):
        expected = select_by_share(gates_of(q[sample], k[sample], chunks), chunks, group, threshold)
        assert entries_of(plan, sample, chunks) == expected


@table("kind", LAYER_OF)
@table("group", ["query_head", "head_global", "overall"])
@table("top", [1, 2, 3])
def test_topk_equals_the_definition(kind: str, group: str, top: int) -> None:
    q, k, _ = random_qkv(LAYOUT, batch=2, num_heads=4, num_kv_heads=2, seed=2)
    plan = plan_of(q, k, kind, moba_select_mode="topk", moba_threshold_type=group, **{f"{kind}_topk": top})
    chunks = chunk_of_tokens(kind)
    for sample in range(2):
        expected = select_best(gates_of(q[sample], k[sample], chunks), chunks, group, top)
        got = entries_of(plan, sample, chunks)
        assert got == expected
        assert len(got) == top * 4 * 60
        if group != "overall":
            assert {sum(e[0] == head for e in got) for head in range(4)} == {top * 60}
        if group == "query_head":
            assert all(len(list(row)) == top for _, row in itertools.groupby(sorted(got), lambda e: e[:2]))


def test_the_scale_of_a_group_is_that_of_its_sample() -> None:
    """A second sample of much larger gates must not take the first one's places."""
    q, k, _ = random_qkv(LAYOUT, batch=2, num_heads=2, seed=3)
    q[1] *= 100.0
    for group in TYPES:
        together = plan_of(q, k, moba_threshold=0.5, moba_threshold_type=group).to_dense_mask()
        for b in range(2):
            part = slice(b, b + 1)
            alone = plan_of(q[part], k[part], moba_threshold=0.5, moba_threshold_type=group).to_dense_mask()
            assert torch.equal(together[part], alone)


def test_query_head_groups_do_not_span_heads() -> None:
    q, k, _ = random_qkv(LAYOUT, num_heads=4, seed=4)
    for options in ({"moba_threshold": 0.4}, {"moba_threshold_type": "head_global"}):
        whole = plan_of(q, k, **options)
        part = plan_of(q[:, :, 1:3], k[:, :, 1:3], **options)
        assert torch.equal(whole.to_dense_mask()[:, 1:3], part.to_dense_mask())


def test_entries_are_compared_in_parts_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = random_qkv(LAYOUT, num_heads=4, seed=5)
    whole = [plan_of(q, k, "st", moba_threshold_type=group).row_mask for group in TYPES]
    for module in (chunk_selection, row_masks):
        monkeypatch.setattr(module, "_CHUNK", 60 * 4 * 3)
    for group, expected in zip(TYPES, whole, strict=True):
        assert torch.equal(plan_of(q, k, "st", moba_threshold_type=group).row_mask, expected)  # type: ignore[arg-type]


# --- what follows from it ---------------------------------------------------------------------------------------------


@table("group", TYPES)
def test_a_higher_threshold_keeps_all_that_a_lower_one_kept(group: str) -> None:
    q, k, _ = random_qkv(LAYOUT, num_heads=2, seed=6)
    chunks = chunk_of_tokens("st")
    kept = [
        entries_of(plan_of(q, k, "st", moba_threshold=tau, moba_threshold_type=group), 0, chunks)
        for tau in (0.0, 0.1, 0.3, 0.6, 0.9, 0.999)
    ]
    assert all(fewer <= more for fewer, more in itertools.pairwise(kept))
    assert len(kept[0]) < len(kept[3]) < len(kept[5])
    own = {(head, token, chunks[token]) for head in range(2) for token in range(60)}
    assert own <= kept[0]
    num_groups = {"query_head": 120, "head_global": 2, "overall": 1, "block": max(chunks) + 1}[group]
    assert len(kept[0]) == len(own) + num_groups


def test_equal_gates_keep_the_lowest_chunks() -> None:
    q, k, _ = random_qkv(LAYOUT, num_heads=1)
    plan = plan_of(torch.ones_like(q), torch.ones_like(k), moba_select_mode="topk", temporal_topk=2)
    chunks = chunk_of_tokens("temporal")
    expected = {(0, t, c) for t in range(60) for c in (chunks[t], 1 if chunks[t] == 0 else 0)}
    assert entries_of(plan, 0, chunks) == expected
    # Where nothing tells entries apart their share is never reached, so all are kept.
    every = {(0, t, c) for t in range(60) for c in range(max(chunks) + 1)}
    assert entries_of(plan_of(q, torch.zeros_like(k)), 0, chunks) == every


def test_queries_that_like_their_own_chunk_alone_keep_one_other() -> None:
    """Their own chunk already holds the share, and the others have no gate at all."""
    chunks = chunk_of_tokens("temporal")
    q, k, _ = random_qkv(LAYOUT, num_heads=1)
    k.zero_()
    k[0, [2 + token for token in range(60) if chunks[token] == 0]] = 1.0
    kept = entries_of(plan_of(torch.ones_like(q), k), 0, chunks)
    assert {e for e in kept if chunks[e[1]] == 0} == {(0, t, c) for t in range(60) if chunks[t] == 0 for c in (0, 1)}


def test_ties_over_a_head_go_to_the_first_queries() -> None:
    q, k, _ = random_qkv(LAYOUT, num_heads=1)
    options = {"moba_select_mode": "topk", "moba_threshold_type": "head_global", "temporal_topk": 2}
    plan = plan_of(q, torch.zeros_like(k), **options)
    chunks = chunk_of_tokens("temporal")
    foreign = [(0, t, c) for t in range(60) for c in range(max(chunks) + 1) if c != chunks[t]]
    own = {(0, t, chunks[t]) for t in range(60)}
    assert entries_of(plan, 0, chunks) == own | set(foreign[:60])


@table("layout", [TokenLayout((5, 8, 12)), TokenLayout((5, 8, 12), num_suffix_tokens=3)])
def test_where_queries_are_gathered_no_list_is_made(layout: TokenLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block lists every chunk there, and the row masks say the same as they do beside lists."""
    q, k, v = random_qkv(layout, batch=2, num_heads=2, seed=8)
    options: dict[str, Any] = {"temporal_chunk_size": 1.5, "moba_select_mode": "topk", "temporal_topk": 2}
    plan = plan_of(q, k, "temporal", layout, **options)
    # A CPU computes by the reference, which reads the lists.
    monkeypatch.setattr(vmoba, "refusal_of_blocks", gathered_refusal_on_a_gpu)
    unlisted = plan_of(q, k, "temporal", layout, **options)
    is_gathered = not layout.num_suffix_tokens
    assert (unlisted.kv_index.shape[0] == 1) == is_gathered
    assert torch.equal(unlisted.to_dense_mask(), plan.to_dense_mask())
    assert unlisted.density == plan.density
    out = [block_sparse_attention(q, k, v, of, implementation="reference").out for of in (plan, unlisted)]
    torch.testing.assert_close(*out)
    assert unlisted.row_counts is not None
    again = row_masks.count_rows(unlisted.row_mask.flatten(0, 1), unlisted.q, 4)  # type: ignore[union-attr]
    assert all(map(torch.equal, unlisted.row_counts, again))
    assert unlisted.heads(0, 1).row_counts is None, "counts are those of all heads"


def gathered_refusal_on_a_gpu(_q: torch.Tensor, *blocks: Any) -> str | None:
    """As gathered.refusal_of_blocks, without asking for a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathered.triton, "refusal_of_size", lambda *_: None)
        return gathered.refusal_of_blocks(_q, *blocks)


def test_listed_chunks_are_the_union_of_what_the_queries_of_a_block_selected() -> None:
    layout = TokenLayout((5, 8, 12))
    q, k, _ = random_qkv(layout, batch=2, num_heads=2, seed=8)
    plan = plan_of(q, k, "temporal", layout, temporal_chunk_size=1.5, moba_select_mode="topk", temporal_topk=2)
    assert plan.kv.sizes.tolist() == [[144, 144, 144, 48]]
    assert plan.q.sizes.tolist() == [[128, 16, 128, 16, 128, 16, 48]]
    assert torch.equal(plan.q.order, plan.kv.order)
    assert plan.kv_index.dtype == plan.kv_count.dtype == plan.row_mask.dtype == torch.int32  # type: ignore[union-attr]
    assert ((plan.kv_index >= 0) & (plan.kv_index < 4)).all()
    offsets = plan.q.offsets[0].tolist()
    for sample, head in itertools.product(range(2), range(2)):
        group = int(plan.group_of[sample, head])
        rows = plan.row_selection(sample, head)
        for block, (start, stop) in enumerate(itertools.pairwise(offsets)):
            count = int(plan.kv_count[group, block])
            assert plan.kv_index[group, block, :count].tolist() == rows[start:stop].any(dim=0).nonzero()[:, 0].tolist()


def test_more_chunks_than_fit_a_word() -> None:
    layout = TokenLayout((1, 10, 70))
    q, k, _ = random_qkv(layout, num_heads=1, seed=9)
    plan = plan_of(q, k, "st", layout, st_chunk_size=(1, 10, 1), moba_select_mode="topk", st_topk=20)
    assert plan.row_mask is not None
    assert plan.row_mask.shape == (1, 1, 700, 3)
    assert (plan.row_mask < 0).any()
    chunks = [token % 70 for token in range(700)]
    assert entries_of(plan, 0, chunks) == select_best(gates_of(q[0], k[0], chunks, layout), chunks, "query_head", 20)


@table("kind", LAYER_OF)
def test_chunks_hold_every_token_once(kind: str) -> None:
    q, k, _ = random_qkv(LAYOUT)
    plan = plan_of(q, k, kind)
    chunks = chunk_of_tokens(kind)
    expected = [2 + token for token in order_of(chunks)]
    assert plan.kv.order[0].tolist() == [*expected, 0, 1, 62]
    assert plan.kv.sizes[0].tolist() == [chunks.count(chunk) for chunk in range(max(chunks) + 1)]


def test_a_block_of_queries_lies_in_one_chunk() -> None:
    chunks = chunks_of(TokenLayout((2, 20, 20)), (2, 12, 12), torch.device("cpu"))
    assert chunks.q.max_block_size == 128
    for start, stop in itertools.pairwise(chunks.q.offsets[0].tolist()):
        assert len(set(chunks.chunk_of_row[start:stop].tolist())) == 1


# --- which chunks where -----------------------------------------------------------------------------------------------


@table(
    ("turns", "first", "expected"),
    [
        ((1, 1, 1), 2, {2: "temporal", 3: "spatial", 4: "st", 5: "temporal"}),
        ((1, 1, 1), 0, {0: "temporal", 1: "spatial", 2: "st", 39: "temporal"}),
        ((2, 0, 1), 0, {0: "temporal", 1: "temporal", 2: "st", 3: "temporal"}),
        ((0, 1, 2), 1, {1: "spatial", 2: "st", 3: "st", 4: "spatial"}),
    ],
)
def test_kinds_of_chunks_take_turns(turns: tuple[int, int, int], first: int, expected: dict[int, str]) -> None:
    options = VMobaOptions(first_full_layer=first, temporal_layer=turns[0], spatial_layer=turns[1], st_layer=turns[2])
    assert {index: chunk_kind(options, LayerInfo(index, 40)) for index in expected} == expected


@table(
    ("options", "layer", "step", "dense"),
    [
        ({}, 0, 11, True),
        ({}, 0, 12, False),
        ({"first_full_step": 0}, 0, 0, False),
        ({"first_full_step": 0, "first_full_layer": 2}, 1, 5, True),
        ({"first_full_step": 0, "first_full_layer": 2}, 2, 5, False),
        ({"first_full_step": 0, "min_tokens": 61}, 2, 5, True),
        ({"first_full_step": 0, "min_tokens": 60}, 2, 5, False),
        ({"first_full_step": 0, "moba_threshold": 1.0}, 2, 5, True),
        ({"first_full_step": 0, "moba_threshold": 3}, 2, 5, True),
        ({"first_full_step": 0, "moba_select_mode": "topk", "st_topk": 12}, 2, 5, True),
        ({"first_full_step": 0, "moba_select_mode": "topk", "st_topk": 11}, 2, 5, False),
        ({"first_full_step": 0, "moba_select_mode": "topk", "st_topk": 12}, 0, 5, False),
        ({"first_full_step": 0, "temporal_chunk_size": 3}, 0, 5, True),
        ({"first_full_step": 0, "spatial_chunk_size": (9, 9), "moba_threshold": 0.0}, 1, 5, True),
    ],
)
def test_where_it_is_dense(options: dict[str, Any], layer: int, step: int, dense: bool) -> None:
    q, k, _ = random_qkv(LAYOUT)
    plan = plan_attention(
        q,
        k,
        backend="vmoba_attn",
        options={**{key: value for key, value in CHUNKS.items() if key != "first_full_step"}, **options},
        layout=LAYOUT,
        layer=LayerInfo(layer, 6),
        step=StepInfo(step, 50),
    )
    assert plan.is_dense is dense
    assert bool(plan.to_dense_mask().all()) is dense


@table(("kind", "num_chunks"), [("temporal", 11), ("spatial", 130), ("st", 390)])
def test_a_plan_is_made_without_reading_the_device(kind: str, num_chunks: int) -> None:
    """Tensors without numbers, at the size of Wan at 480p: whatever would wait for the device fails on them."""
    layout = TokenLayout((21, 30, 52), 3, valid_lengths=(1, 2))
    q = torch.empty(2, layout.num_tokens, 4, 16, device="meta")
    sizes = {"temporal_chunk_size": 2, "spatial_chunk_size": (3, 4), "st_chunk_size": (4, 6, 4)}
    for group, mode in [*((group, "threshold") for group in TYPES), ("overall", "topk")]:
        options = {**sizes, "moba_threshold_type": group, "moba_select_mode": mode}
        plan = plan_of(q, q[:, :, :2], kind, layout, **options)
        assert plan.kv_index.shape[2] == num_chunks
        assert plan.row_mask is not None
        assert plan.row_mask.shape == (2, 4, 32760, -(-num_chunks // 32))
