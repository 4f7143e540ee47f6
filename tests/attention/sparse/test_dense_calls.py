"""The dense calls of sparse backends: whose backend serves them, what the report says, and rows of padded text."""

from __future__ import annotations

from typing import Any

import torch
from sparse_oracle import random_qkv, valid_tokens
from tables import table

from diffusion_runtime.attention import (
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    LocalAttention,
    StepInfo,
    TokenLayout,
    attention,
)
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.attention.sparse.interface import SparseBackend, SparseOptions

GRID = TokenLayout((2, 8, 8))
# Text before and after the grid, some of it padding.
PADDED = (
    TokenLayout((2, 8, 8), num_suffix_tokens=5, valid_lengths=(2, 5)),
    TokenLayout((2, 8, 8), num_prefix_tokens=5, valid_lengths=(0, 3)),
)
# Each sparse method, dense in the first step and sparse in the second, with what the report says of the first.
METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "sliding_tile_attn": (
        {"window": [1, 1, 1], "tile_size": [2, 2, 2], "skip_time_steps": 1},
        "steps 0 (skip_time_steps 1)",
    ),
    "video_sparse_attn": ({"sparsity": 0.5, "dense_first_steps": 1}, "steps 0 (dense_first_steps 1)"),
    "vmoba_attn": (
        {"temporal_chunk_size": 1, "moba_threshold": 0.1, "first_full_step": 1},
        "steps 0 (first_full_step 1)",
    ),
    "sparse_video_gen_2_attn": (
        {"svg2_first_times_fp": 0.5, "svg2_first_layers_fp": 0.0},
        "steps 0 (svg2_first_times_fp 0.5)",
    ),
    "sol_attn": ({"tile_size": [2, 2, 2], "dense_first_steps": 1}, "steps 0 (dense_first_steps 1)"),
}


def rows_of(config: Any, layout: TokenLayout, num_steps: int = 2) -> tuple[list[tuple[str, str]], list[torch.Tensor]]:
    """(steps, implementation) of one layer in the report, and what it gave in each step."""
    q, k, v = random_qkv(layout, batch=2)
    policy = AttentionPolicy(config=AttentionConfig.parse(config), environment=None)
    layer, context = LocalAttention(2, 16, policy=policy), AttentionContext(layout)
    outputs = [
        layer(q, k, v, AttentionContext(layout, StepInfo(step, num_steps), context.state, context.recorder))
        for step in range(num_steps)
    ]
    return [(row.steps, row.implementation) for row in context.recorder.report().rows], outputs


@table("method", METHODS)
def test_dense_steps_follow_the_users_own_dense_choice_and_say_so(method: str) -> None:
    options, reason = METHODS[method]
    config = {"default": "reference", "per_role": {"self": {"backend": method, "extra": options}}}
    rows, outputs = rows_of(config, GRID)
    assert rows[0] == ("0", f"dense reference (eager float32; default says reference): {reason}")
    assert rows[1][0] == "1"
    assert "dense" not in rows[1][1]
    q, k, v = random_qkv(GRID, batch=2)
    assert torch.equal(outputs[0], attention(q, k, v, backend="reference", layout=GRID))


def test_without_such_a_choice_they_are_the_platforms() -> None:
    rows, _ = rows_of({"per_role": {"self": {"backend": "video_sparse_attn", "extra": {"sparsity": 0.0}}}}, GRID)
    assert rows == [("0-1", "dense torch_sdpa (flash): the sparsity drops no tile")]


def test_a_choice_below_that_cannot_serve_them_is_named(absent: str) -> None:
    rows, _ = rows_of(f"video_sparse_attn,{absent}", GRID)
    why = f"not {absent}, default: package 'absent' is not installed; fix: pip install absent"
    assert len(rows) == 1
    assert why in rows[0][1]


def test_one_call_of_the_function_names_both() -> None:
    q, k, v = random_qkv(GRID)
    arguments: dict[str, Any] = {"layout": GRID, "options": {"min_tokens": 1000}}
    found = attention(q, k, v, backend="video_sparse_attn,reference", **arguments)
    assert torch.equal(found, attention(q, k, v, backend="reference", layout=GRID))
    assert not torch.equal(found, attention(q, k, v, backend="video_sparse_attn", **arguments))


@table("layout", PADDED)
def test_padded_text_rows_are_zero_in_dense_and_in_sparse_steps(layout: TokenLayout) -> None:
    q, k, v = random_qkv(layout, batch=2)
    wrong = []
    for method, (options, _) in METHODS.items():
        for step in range(2):
            out, lse = attention(
                q,
                k,
                v,
                backend=method,
                options=options,
                layout=layout,
                step=StepInfo(step, 2),
                return_lse=True,
            )
            for sample in range(2):
                padding = ~valid_tokens(layout, sample)
                if out[sample, padding].any() or not lse[sample][:, padding].isneginf().all():
                    wrong.append((method, step, sample))
                if not out[sample, ~padding].any(-1).all() or not lse[sample][:, ~padding].isfinite().all():
                    wrong.append((method, step, sample))
    assert wrong == []


def test_no_method_has_a_dense_schedule_of_its_own() -> None:
    others = []
    for method in METHODS:
        backend = find_backend(method)
        assert isinstance(backend, SparseBackend)
        has_rules = issubclass(backend.options_type, SparseOptions)
        if not has_rules or type(backend).dense_reason is not SparseBackend.dense_reason:
            others.append(method)
    assert others == []
