"""flex_attn on this CPU, compiled. The first form takes half a minute and each other one seconds, so there are few."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_attention import LAYOUTS, assert_is_exact, exact, random_mask, visible_by

from diffusion_runtime.attention import (
    AttentionCall,
    AttentionResult,
    LayerInfo,
    RequestCache,
    StepInfo,
    attention,
)
from diffusion_runtime.attention.backends import flex_attn
from diffusion_runtime.attention.backends.calling import run_backend
from diffusion_runtime.attention.backends.flex_attn import causal_blocks
from diffusion_runtime.attention.backends.interface import NoOptions
from diffusion_runtime.attention.backends.torch_sdpa import TorchSdpaBackend
from diffusion_runtime.errors import BackendUnavailableError, ConfigError
from diffusion_runtime.parallel.interface import AttentionInputs

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="flex_attn compiles with g++")


def check(
    layout_name: str,
    *,
    kv_heads: int = 4,
    scale: float | None = None,
    causal: bool = False,
    call: Callable[..., torch.Tensor] = attention,
) -> None:
    torch.manual_seed(0)
    layout = LAYOUTS[layout_name]
    q = torch.randn(3, 17, 4, 16)
    k, v = torch.randn(2, 3, 17, kv_heads, 16)
    visible = visible_by(layout, 3, 17, causal)
    unseen = ~visible.any(dim=1)
    k[unseen], v[unseen] = 1e4, float("nan")
    out = call(q, k, v, backend="flex_attn", layout=layout, scale=scale, causal=causal)
    assert_is_exact(out, None, exact(q, k, v, visible, 0.25 if scale is None else scale))


@needs_compiler
@pytest.mark.slow
def test_its_compiled_kernel_runs_here() -> None:
    """One form, so that the fast tests see the real thing too; inside a compiled function it is one operator."""
    check("equal")
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    check("equal", call=torch.compile(attention, fullgraph=True, backend=keep))
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert [name for name in called if name.startswith("diffusion_runtime.")] == ["diffusion_runtime.attention.default"]


@needs_compiler
@pytest.mark.slow
def test_against_float64(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches and single samples, as many keys as queries, fewer and one, and each feature; each compiles a form,
    in 6 s.

    How lengths become such calls is proved in test_key_ranges.py. torch would give up after one compilation here:
    each form counts for itself, and begins again where it needs more.
    """
    monkeypatch.setattr(flex_attn, "_compiled_forms", {})
    caplog.set_level(logging.INFO, "diffusion_runtime.attention")
    with torch._dynamo.config.patch(recompile_limit=1):
        for layout_name in ("equal", "alternating", "one word"):
            check(layout_name)
        check("none", kv_heads=2, scale=0.3)
        check("equal", causal=True)
    # Said for every form that is told apart by more than lengths: plain, grouped and causal.
    assert len([line for line in caplog.messages if line.startswith("flex_attn compiles")]) == 3


def test_a_cpu_gives_no_log_sum_exp_and_takes_no_mask() -> None:
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(BackendUnavailableError, match=r"cannot do lse|no C\+\+ compiler"):
        attention(q, q, q, backend="flex_attn", return_lse=True)
    with pytest.raises(BackendUnavailableError, match=r"cannot do boolean_mask|no C\+\+ compiler"):
        attention(q, q, q, backend="flex_attn", mask=torch.ones(1, 1, 1, 4, dtype=torch.bool))


@pytest.mark.parametrize("boolean", [False, True])
def test_a_mask_is_a_modification_of_scores(boolean: bool) -> None:
    """What a GPU compiles, evaluated by hand for every score."""
    torch.manual_seed(3)
    mask = random_mask(boolean, (2, 1, 5, 7)).expand(2, 3, 5, 7)
    scores = torch.randn(2, 3, 5, 7)
    index = torch.meshgrid(*(torch.arange(size) for size in scores.shape), indexing="ij")
    expected = scores.masked_fill(~mask, float("-inf")) if boolean else scores + mask
    assert torch.equal(flex_attn.masking(mask)(scores, *index), expected)


@pytest.mark.parametrize("seq", [1, 127, 128, 129, 1000])
def test_causal_blocks_are_the_lower_triangle(seq: int) -> None:
    blocks = causal_blocks(seq, torch.device("cpu"))
    rows = -(-seq // 128)
    assert blocks.shape == (1, 1, seq, seq)
    assert torch.equal(blocks.to_dense()[0, 0].bool(), torch.ones(rows, rows, dtype=torch.bool).tril())
    assert blocks.full_kv_num_blocks is not None
    assert blocks.full_kv_num_blocks.flatten().tolist() == list(range(rows))


def test_a_kernel_without_a_backward_pass_refuses_gradients() -> None:
    """FlexAttention on a CPU by what it declares, and any other backend whose result records none."""

    class Detached(TorchSdpaBackend):
        name = "detached_attn"

        def run(self, call: AttentionCall) -> AttentionResult:
            result = super().run(call)
            return result._replace(out=result.out.detach())

    q, k, v = (torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3))
    with pytest.raises(ConfigError, match=r"flex_attn computes no gradients here.*no_grad"):
        attention(q, k, v, backend="flex_attn")
    call = AttentionCall(AttentionInputs(q, k, v), NoOptions(), LayerInfo(), StepInfo(), RequestCache())
    with pytest.raises(ConfigError, match="detached_attn computes no gradients here"):
        run_backend(Detached(), call)
    with torch.no_grad():
        assert run_backend(Detached(), call).out.shape == q.shape
