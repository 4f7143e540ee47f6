"""Sparse VideoGen 2 on a CUDA GPU: the output, no waiting once it is warm, and the same result in every run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sparse_oracle import masked_attention, random_qkv

from diffusion_runtime.attention import RequestCache, StepInfo, TokenLayout, attention, plan_attention

pytestmark = pytest.mark.gpu

NAME = "sparse_video_gen_2_attn"
LAYOUT = TokenLayout((5, 12, 17), num_suffix_tokens=30, valid_lengths=(30, 11))
OPTIONS: dict[str, Any] = {
    "svg2_num_q_centroids": 20,
    "svg2_num_k_centroids": 70,
    "svg2_top_p_kmeans": 0.7,
    "svg2_kmeans_iter_init": 5,
}


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Anything that waits for the device raises, from the moment the test asks for it."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def tokens(head_dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    drawn = random_qkv(LAYOUT, batch=2, num_heads=4, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    return [x.cuda() for x in drawn]


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_output(head_dim: int, dtype: torch.dtype) -> None:
    q, k, v = tokens(head_dim, dtype)
    states = [RequestCache(), RequestCache()]
    for index in range(2):
        arguments: dict[str, Any] = {"backend": NAME, "options": OPTIONS, "layout": LAYOUT}
        arguments["step"] = StepInfo(index, 2, branch="both")
        plan = plan_attention(q, k, state=states[0], **arguments)
        assert torch.equal(plan.q.order.sort(dim=1).values, torch.arange(1050, device="cuda").int().expand(8, -1))
        assert (plan.kv.sizes.sum(dim=1) == 1020).all()
        out = attention(q, k, v, state=states[1], **arguments)
        expected, _ = masked_attention(q, k, v, plan.to_dense_mask())
        rounding = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-3}[dtype]
        assert ((out.double() - expected).norm() / expected.norm()) < rounding


def test_a_warm_step_waits_for_nothing_and_repeats_to_the_bit(no_waiting: None) -> None:
    q, k, v = tokens()
    outs = []
    for _ in range(2):
        state = RequestCache()
        for index in range(3):
            if index == 2:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            step = StepInfo(index, 3, branch="both")
            out = attention(q, k, v, backend=NAME, options=OPTIONS, layout=LAYOUT, step=step, state=state)
            torch.cuda.set_sync_debug_mode("default")
        outs.append(out)
    assert torch.equal(*outs)


def test_both_devices_start_from_the_same_tokens() -> None:
    q, k, _ = tokens(64, torch.float32)
    options = {**OPTIONS, "svg2_kmeans_iter_init": 0}
    cpu, cuda = (
        plan_attention(q.to(device), k.to(device), backend=NAME, options=options, layout=LAYOUT)
        for device in ("cpu", "cuda")
    )
    for ours, theirs in ((cpu.q, cuda.q), (cpu.kv, cuda.kv)):
        differing = (ours.block_of_token() != theirs.block_of_token().cpu()).float().mean()
        assert differing < 1e-3, "labels differ where two distances are as good as equal, nowhere else"
