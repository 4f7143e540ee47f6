"""Sol-Attn: which tiles it keeps, against loops over the definition; its tiles and its options."""

from __future__ import annotations

import math

import torch
from sparse_oracle import random_qkv
from tables import table

from diffusion_runtime.attention import SparsePlan, TokenLayout, attention, plan_attention
from diffusion_runtime.attention.sparse import sol

RAGGED = TokenLayout((5, 6, 7))
TEXT = TokenLayout((5, 6, 7), num_prefix_tokens=6, valid_lengths=(0, 5))
SCALE = 0.4


def selected(layout: TokenLayout, **options: object) -> tuple[SparsePlan, list[torch.Tensor], list[torch.Tensor]]:
    """The plan, and by sample and head the means of the tiles of queries and of keys, float64."""
    q, k, _ = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=2)
    k = k + 3
    plan = plan_attention(q, k, backend="sol_attn", options=options, layout=layout, scale=SCALE)
    tiles = [
        plan.kv.order[0, start:stop].long()
        for start, stop in zip(plan.kv.offsets[0], plan.kv.offsets[0, 1:], strict=False)
    ]
    means = []
    for x in (q, k.repeat_interleave(2, dim=2)):
        of_tiles = torch.stack([x[:, tile].double().mean(dim=1) for tile in tiles], dim=2)
        means.append(list(of_tiles.flatten(0, 1)))
    return plan, means[0], means[1]


@table("tau", [-0.3, 0.4, 1.3])
@table("layout", [RAGGED, TEXT])
def test_a_threshold_equals_the_definition(layout: TokenLayout, tau: float) -> None:
    plan, of_q, of_k = selected(layout, tau=tau)
    sizes = plan.kv.sizes[0].double()
    count = len(sizes)
    exact = 0
    for row, (queries, keys) in enumerate(zip(of_q, of_k, strict=True)):
        mean = sum(size * key for size, key in zip(sizes, keys, strict=True)) / sizes.sum()
        variance = sum(size * (key - mean) ** 2 for size, key in zip(sizes, keys, strict=True)) / sizes.sum()
        group = int(plan.group_of.flatten()[row])
        for i in range(count):
            bound = tau * SCALE * math.sqrt(float((queries[i] ** 2 * variance).sum()))
            expected = [
                j for j in range(count) if abs(i - j) <= 1 or SCALE * float(queries[i] @ (keys[j] - mean)) > bound
            ]
            assert plan.kv_index[group, i, : plan.kv_count[group, i]].tolist() == expected
            exact += len(expected)
    assert 0.4 < exact / (count * count * len(of_q)) < 0.95


@table("top_k", [0.1, 0.3, 0.6])
def test_a_share_equals_the_definition(top_k: float) -> None:
    """Its own tile first, then its neighbours, then the best."""
    plan, of_q, of_k = selected(RAGGED, top_k=top_k)
    count = plan.kv.num_blocks
    for row, (queries, keys) in enumerate(zip(of_q, of_k, strict=True)):
        for i in range(count):
            scores = [float(queries[i] @ key) for key in keys]
            order = sorted(range(count), key=lambda j: (min(abs(i - j), 2), -scores[j] if abs(i - j) > 1 else j))
            expected = sorted(order[: math.ceil(top_k * count)])
            assert plan.kv_index[int(plan.group_of.flatten()[row]), i].tolist() == expected


def test_one_threshold_serves_keys_with_any_offset() -> None:
    q, k, _ = random_qkv(RAGGED, num_heads=2)
    plans = [plan_attention(q, keys, backend="sol_attn", layout=RAGGED) for keys in (k, k + 5)]
    assert torch.equal(plans[0].to_dense_mask(), plans[1].to_dense_mask())


def test_heads_in_parts_give_the_same(monkeypatch: object) -> None:
    q, k, _ = random_qkv(RAGGED, batch=2, num_heads=4, num_kv_heads=2)
    for options in ({"tau": 0.5}, {"top_k": 0.5}):
        whole = plan_attention(q, k, backend="sol_attn", options=options, layout=RAGGED)
        monkeypatch.setattr(sol, "_CHUNK", 8 * 8 * 2)  # type: ignore[attr-defined]
        assert torch.equal(
            plan_attention(q, k, backend="sol_attn", options=options, layout=RAGGED).to_dense_mask(),
            whole.to_dense_mask(),
        )
        monkeypatch.undo()  # type: ignore[attr-defined]


@table(
    ("grid", "size"),
    [((1, 16, 16), 64), ((2, 8, 16), 64), ((3, 8, 16), 64), ((4, 8, 8), 64), ((8, 8, 8), 64)],
)
def test_tiles_hold_sixty_four_tokens_of_any_grid(grid: tuple[int, int, int], size: int) -> None:
    layout = TokenLayout(grid)
    q, k, _ = random_qkv(layout, num_heads=1)
    assert plan_attention(q, k, backend="sol", layout=layout).kv.max_block_size == size


def test_it_pools_unless_it_is_told_otherwise() -> None:
    q, k, v = random_qkv(RAGGED, num_heads=2)
    assert plan_attention(q, k, backend="sol_attn", layout=RAGGED).pooled_tail
    whole = attention(q, k, v, backend="torch_sdpa")
    errors = {}
    for tail in ("pooled", "none"):
        options = {"top_k": 0.25, "tail": tail}
        out = attention(q, k, v, backend="sol_attn", options=options, layout=RAGGED)
        errors[tail] = float((out - whole).norm() / whole.norm())
    assert errors["pooled"] < errors["none"]
