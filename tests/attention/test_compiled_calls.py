"""attention, plan_attention and the three layers under torch.compile(fullgraph=True): one operator for each call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from diffusion_runtime.attention import (
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    LayerInfo,
    LocalAttention,
    RequestCache,
    StepInfo,
    TokenLayout,
    UlyssesAttention,
    USPAttention,
    attention,
    force_attention_backend,
    list_backends,
    plan_attention,
)
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.errors import BackendUnavailableError, ConfigError
from diffusion_runtime.report.attention_report import AttentionRecorder

GRID = (2, 8, 8)
LAYOUT = TokenLayout(GRID, 0, 6, (6, 4))
SPARSE_OPTIONS = {
    "sliding_tile_attn": {"window": [1, 3, 3], "tile_size": [2, 2, 2]},
    "video_sparse_attn": {"sparsity": 0.5},
}


class CountingBackend:
    """A backend of torch.compile that keeps every graph and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    def operators(self) -> list[Any]:
        nodes = [node for graph in self.graphs for node in graph.graph.nodes if node.op == "call_function"]
        return [node.target for node in nodes if str(node.target).startswith("diffusion_runtime.")]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def tokens(*, heads: int = 2, head_dim: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(3, 2, LAYOUT.num_tokens, heads, head_dim).unbind(0)


def compiled(call: Callable[..., Any], backend: Any = "eager") -> Callable[..., Any]:
    torch._dynamo.reset()

    def program(q: torch.Tensor, *others: Any, **named: Any) -> Any:
        return call(1 * q, *others, **named)

    return torch.compile(program, fullgraph=True, backend=backend)


def runnable() -> list[str]:
    """The names of the backends that serve a call here, with auto for the platform's choice."""
    return ["auto", *(row.name for row in list_backends(device="cpu") if row.version is not None)]


def test_every_backend_of_a_cpu_is_one_operator() -> None:
    """With padding, and the log-sum-exp where the backend has one; as the same call uncompiled.

    flex_attn, whose kernel takes long to compile, is in test_backends_flex.py.
    """
    q, k, v = tokens()
    wrong = []
    served = 0
    for name in sorted({*runnable()} - {"flex_attn"}):
        backend = find_backend(name) if name != "auto" else None
        options = SPARSE_OPTIONS.get(name)
        features = frozenset({"key_padding", "lse"}) if backend is None else backend.capability.features
        layout = LAYOUT if "key_padding" in features else TokenLayout(GRID, 0, 6)
        arguments: dict[str, Any] = {"backend": name, "options": options, "layout": layout}
        for return_lse in (False, True):
            try:
                expected = attention(q, k, v, return_lse=return_lse, **arguments)
            except BackendUnavailableError:
                continue
            counting = CountingBackend()
            found = compiled(functools.partial(attention, return_lse=return_lse, **arguments), counting)(q, k, v)
            pairs = zip(found, expected, strict=True) if return_lse else [(found, expected)]
            served += 1
            same = all(torch.equal(one, other) and one.dtype == other.dtype for one, other in pairs)
            if not same or counting.operators() != [torch.ops.diffusion_runtime.attention.default]:
                wrong.append((name, return_lse))
    assert served >= 12
    assert wrong == []


def test_other_steps_and_lengths_compile_nothing_anew() -> None:
    q, k, v = tokens()
    counting, state = CountingBackend(), RequestCache()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepInfo, lengths: tuple[int, ...]) -> Any:
        return attention(q, k, v, layout=TokenLayout(GRID, 0, 6, lengths), step=step, state=state)

    function = compiled(call, counting)
    for index in range(12):
        step, lengths = StepInfo(index, 12, timestep=1000.0 - index, sigma=1 / (index + 1)), (6, index % 6)
        assert torch.equal(function(q, k, v, step, lengths), call(q, k, v, step, lengths))
    assert len(counting.graphs) <= 3


def test_a_call_has_all_that_it_was_given() -> None:
    """Role, options, scale, causality, masks, grouped queries, and errors as they are outside of a graph."""
    q, _, _ = tokens(heads=4, head_dim=64)
    _, k, v = tokens(head_dim=64)
    mask = torch.rand(2, 1, 1, LAYOUT.num_tokens) > 0.3
    calls: list[dict[str, Any]] = [
        {"scale": 0.3, "causal": True},
        {"mask": mask},
        {"mask": torch.randn(2, 4, LAYOUT.num_tokens, LAYOUT.num_tokens), "return_lse": True},
        {"layer": LayerInfo(3, 5, "self", "a 'name'"), "backend": "fp8_attn"},
        {"backend": "sta", "options": {"window": [3, 1, 1], "tile_size": [1, 4, 4]}, "layout": LAYOUT},
    ]
    for arguments in calls:
        found = compiled(functools.partial(attention, **arguments))(q, k, v)
        expected = attention(q, k, v, **arguments)
        for one, other in zip([*found], [*expected], strict=True):
            assert torch.equal(one, other), arguments
    with pytest.raises(BackendUnavailableError, match="fa2"):
        compiled(functools.partial(attention, backend="fa2"))(q, k, v)
    with pytest.raises(ConfigError, match="windows"):
        compiled(functools.partial(attention, backend="sta", options={"windows": [3, 1, 1]}))(q, k, v)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_are_those_of_the_uncompiled_call(backend: str) -> None:
    layer = LocalAttention(2, 16)
    calls: list[tuple[str, Callable[..., Any]]] = [
        ("attention", functools.partial(attention, layout=LAYOUT)),
        ("lse", lambda q, k, v: sum(map(torch.sum, attention(q, k, v, backend="reference", return_lse=True)))),
        ("layer", layer),
    ]
    for name, call in calls:
        given = [x.requires_grad_() for x in tokens()]
        expected = torch.autograd.grad(call(*given).square().sum(), given)
        found = torch.autograd.grad(compiled(call, backend)(*given).square().sum(), given)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, msg=name)
    with pytest.raises(ConfigError, match="computes no gradients"):
        compiled(functools.partial(attention, backend="fp8_attn"), backend)(
            *(x.requires_grad_() for x in tokens(head_dim=64))
        )


class Block(nn.Module):
    """A model of others around one of our layers. makes_context: whether its forward makes one."""

    def __init__(self, layer: nn.Module, makes_context: bool) -> None:
        super().__init__()
        self.projection, self.attention, self.makes_context = nn.Linear(32, 96), layer, makes_context

    def forward(self, x: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        q, k, v = self.projection(x).unflatten(-1, (3, 2, 16)).unbind(2)
        if self.makes_context:
            context = AttentionContext(LAYOUT, StepInfo(2, 4))
        return self.attention(q, k, v, context).flatten(2)


def test_layers_are_one_operator_with_any_context() -> None:
    """Given, made within the graph, and none; one that the graph cannot see is an error that says what to do."""
    x = torch.randn(2, LAYOUT.num_tokens, 32)
    for kind in (LocalAttention, UlyssesAttention, USPAttention):
        for makes_context, given in ((False, False), (False, True), (True, False)):
            block = Block(
                kind(2, 16, policy=AttentionPolicy(cli=AttentionConfig.parse("reference"))), makes_context
            ).requires_grad_(False)
            recorder = AttentionRecorder()
            context = AttentionContext(LAYOUT, recorder=recorder) if given else None
            expected = block(x, context)
            counting = CountingBackend()
            torch._dynamo.reset()
            found = torch.compile(block, fullgraph=True, backend=counting)(x, context)
            assert torch.equal(found, expected), (kind, makes_context, given)
            assert counting.operators() == [torch.ops.diffusion_runtime.attention.default]
            assert recorder.report().num_calls == 2 * given
    layer, counts = LocalAttention(2, 16), AttentionRecorder()
    with pytest.raises(ConfigError, match="make it outside"):
        compiled(lambda q, k, v: layer(q, k, v, AttentionContext(recorder=counts)))(*tokens())


def test_a_plan_of_a_graph_keeps_the_same_pairs() -> None:
    q, k, _ = tokens()
    choices: list[tuple[str, dict[str, Any]]] = [
        ("sta", {"window": [1, 3, 3], "tile_size": [2, 2, 2]}),
        ("vsa", {"sparsity": 0.5}),
        ("vsa", {"sparsity": 0.5, "dense_first_steps": 1}),
        ("vmoba", {"first_full_step": 0, "first_full_layer": 0}),
        ("vmoba", {"first_full_step": 1}),
        ("vsa", {"sparsity": 0.5, "tail": "pooled"}),
        ("sol", {"tau": 0.0}),
        ("sol", {"tau": 0.0, "tail": "none"}),
        ("svg2", {}),
    ]
    for name, options in choices:
        arguments: dict[str, Any] = {"backend": name, "options": options, "layout": LAYOUT, "step": StepInfo(0, 2)}
        counting = CountingBackend()
        expected = plan_attention(q, k, **arguments)
        found = compiled(functools.partial(plan_attention, **arguments), counting)(q, k)
        assert counting.operators() == [torch.ops.diffusion_runtime.plan_attention.default]
        assert (found.method, found.is_dense) == (expected.method, expected.is_dense), name
        assert found.pooled_tail == expected.pooled_tail, name
        assert found.density == pytest.approx(expected.density), name
        assert torch.equal(found.block_mask, expected.block_mask), name
        assert (found.row_mask is not None) >= (expected.row_mask is not None), name
    with pytest.raises(ConfigError, match="has no plan"):
        compiled(functools.partial(plan_attention, backend="reference", layout=LAYOUT))(q, k)


def test_a_forced_choice_stands_around_a_compiled_function() -> None:
    """Inside one, torch reports the refusal; where graphs may break, the rest runs uncompiled with the choice."""
    q = torch.randn(1, 8, 2, 16)

    def forced(q: torch.Tensor) -> torch.Tensor:
        with force_attention_backend("reference"):
            return attention(q, q, q)

    whole = torch.compile(lambda q: attention(q, q, q), fullgraph=True, backend="eager")
    with force_attention_backend("reference"):
        assert whole(q).equal(forced(q))
    with pytest.raises(RuntimeError, match="force_attention_backend: expected outside of a compiled function"):
        torch.compile(forced, fullgraph=True, backend="eager")(q)
    # What torch has given up on once it leaves alone.
    torch._dynamo.reset()
    assert torch.compile(forced, backend="eager")(q).equal(forced(q))
