"""The plan of a call that its schedule or its size says is dense."""

from __future__ import annotations

from typing import Any

import torch
from sparse_oracle import random_qkv
from tables import table
from torch.utils._python_dispatch import TorchDispatchMode

from diffusion_runtime.attention import SparsePlan, TokenLayout, plan_attention
from diffusion_runtime.attention.context import RequestCache

LAYOUTS = [
    TokenLayout((1, 1, 1)),
    TokenLayout((2, 3, 5)),
    TokenLayout((2, 3, 5), num_prefix_tokens=4, valid_lengths=(1, 4)),
    TokenLayout((2, 3, 5), num_prefix_tokens=2, num_suffix_tokens=3),
]


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def plan_of(layout: TokenLayout) -> SparsePlan:
    q, k, _ = random_qkv(layout, batch=2)
    return plan_attention(q, k, backend="video_sparse_attn", options={"min_tokens": 1000}, layout=layout)


@table("layout", LAYOUTS)
def test_everything_valid_sees_everything_valid(layout: TokenLayout) -> None:
    plan = plan_of(layout)
    assert plan.is_dense
    assert plan.density == 1.0
    for sample in range(2):
        valid = torch.zeros(layout.num_tokens, dtype=torch.bool)
        for start, stop in layout.key_ranges(sample):
            valid[start:stop] = True
        mask = plan.to_dense_mask()[sample]
        assert torch.equal(mask, (valid[:, None] & valid).expand(2, -1, -1))


def test_it_is_made_once_per_request_and_layout() -> None:
    """Afterwards nothing but three fills runs, and no tensor comes from a list."""
    layout = TokenLayout((3, 4, 7), num_suffix_tokens=2)
    q, k, _ = random_qkv(layout)
    arguments: dict[str, Any] = {"backend": "vmoba_attn", "options": {"first_full_step": 1}, "layout": layout}
    arguments["state"] = RequestCache()
    first = plan_attention(q, k, **arguments)
    with Operators() as operators:
        second = plan_attention(q, k, **arguments)
    assert second.q is first.q
    assert operators.names <= {"aten.zeros.default", "aten.ones.default"}
