"""The three layers: decided at construction, forced at a call, scheduled by step and layer, counted."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from diffusion_runtime.attention import (
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    LayerInfo,
    LocalAttention,
    StepInfo,
    TokenLayout,
    UlyssesAttention,
    USPAttention,
    attention,
    force_attention_backend,
)
from diffusion_runtime.errors import BackendUnavailableError, ConfigError

LAYERS = [LocalAttention, UlyssesAttention, USPAttention]


def policy(config: Any = None, cli: Any = None) -> AttentionPolicy:
    return AttentionPolicy(cli=AttentionConfig.parse(cli), config=AttentionConfig.parse(config), environment=None)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 12, 4, 16)
    return q, k, v


@pytest.mark.parametrize("layer_class", LAYERS)
@pytest.mark.parametrize("layout", [None, TokenLayout((1, 2, 4), num_suffix_tokens=4, valid_lengths=(1, 4))])
def test_with_one_process_all_three_equal_the_function(layer_class: type, layout: TokenLayout | None) -> None:
    q, k, v = inputs()
    out = layer_class(4, 16, policy=policy())(q, k, v, AttentionContext(layout=layout))
    assert torch.equal(out, attention(q, k, v, layout=layout))


def test_scale_causal_and_grouped_queries_reach_the_backend() -> None:
    q, k, v = inputs()
    layer = LocalAttention(4, 16, 2, policy=policy(), scale=0.5, causal=True)
    assert torch.equal(
        layer(q, k[:, :, :2], v[:, :, :2]), attention(q, k[:, :, :2], v[:, :, :2], scale=0.5, causal=True)
    )


def test_layers_hold_no_weights() -> None:
    assert not LocalAttention(4, 16, policy=policy()).state_dict()


def test_a_choice_that_cannot_run_fails_at_construction(absent: str, blocky: str) -> None:
    with pytest.raises(BackendUnavailableError, match="pip install absent"):
        LocalAttention(4, 16, policy=policy(config=absent))
    with pytest.raises(BackendUnavailableError, match="cannot do causal"):
        LocalAttention(4, 16, policy=policy(config=blocky), causal=True)
    with pytest.raises(BackendUnavailableError, match="takes head sizes"):
        LocalAttention(4, 20, policy=policy(config=blocky))
    with pytest.raises(ConfigError, match="multiple of num_kv_heads"):
        LocalAttention(4, 16, 3, policy=policy())


def test_a_choice_for_a_late_step_fails_at_construction_too(absent: str) -> None:
    late = {"schedule": [{"steps": "40", "layers": "5", "backend": absent}]}
    LocalAttention(4, 16, layer=LayerInfo(4, 6), policy=policy(late))
    with pytest.raises(BackendUnavailableError, match="steps 40, layers 5"):
        LocalAttention(4, 16, layer=LayerInfo(5, 6), policy=policy(late))


def run_steps(layer: LocalAttention, context: AttentionContext, num_steps: int) -> list[tuple[str, str, str]]:
    """(backend, layers, steps) of what ran in `num_steps` steps."""
    q, k, v = inputs()
    for index in range(num_steps):
        step = StepInfo(index=index, num_steps=num_steps)
        layer(q, k, v, AttentionContext(None, step, context.state, context.recorder))
    return [(row.backend, row.layers, row.steps) for row in context.recorder.report().rows]


def test_the_schedule_picks_by_step_and_layer(blocky: str) -> None:
    config = {
        "default": blocky,
        "schedule": [
            {"steps": "0-1", "backend": "torch_sdpa"},
            {"layers": "0,-1", "role": "self", "backend": "reference"},
        ],
    }
    first = LocalAttention(4, 16, layer=LayerInfo(0, 6), policy=policy(config))
    middle = LocalAttention(4, 16, layer=LayerInfo(2, 6), policy=policy(config))
    assert run_steps(first, AttentionContext(), 4) == [("torch_sdpa", "0", "0-1"), ("reference", "0", "2-3")]
    assert [row[0] for row in run_steps(middle, AttentionContext(), 4)] == ["torch_sdpa", "blocky", "blocky"]
    assert [when for when, _ in first.decisions] == ["always", "steps 0-1, layers all", "steps all, layers 0,-1"]


def test_a_scheduled_choice_passes_over_roles_it_is_not_made_for(blocky: str) -> None:
    config = {"default": "reference", "schedule": [{"steps": "0", "backend": blocky}]}
    cross = LocalAttention(4, 16, layer=LayerInfo(role="cross"), policy=policy(config))
    assert run_steps(cross, AttentionContext(), 2) == [("reference", "0", "0-1")]


def test_force_counts_at_construction_and_at_the_call() -> None:
    q, k, v = inputs()
    with force_attention_backend("reference"):
        built_inside = LocalAttention(4, 16, policy=policy(cli="torch_sdpa"))
    built_outside = LocalAttention(4, 16, policy=policy(cli="torch_sdpa"))
    context = AttentionContext()
    built_inside(q, k, v, context)
    with force_attention_backend("torch_sdpa"):
        built_inside(q, k, v, context)
    built_outside(q, k, v, context)
    with force_attention_backend("reference"):
        built_outside(q, k, v, context)
    assert [(row.backend, row.source, row.count) for row in context.recorder.report().rows] == [
        ("reference", "force", 2),
        ("torch_sdpa", "force", 1),
        ("torch_sdpa", "cli", 1),
    ]


def test_the_count_is_the_count_of_kernel_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    kernel = F.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return kernel(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    context = AttentionContext()
    layers = [
        LocalAttention(4, 16, layer=LayerInfo(i, 3, role), policy=policy())
        for i in range(3)
        for role in ("self", "cross")
    ]
    for layer in layers:
        run_steps(layer, context, 5)
    report = context.recorder.report()
    assert report.num_calls == calls == 30
    assert [(row.role, row.count, row.layers, row.steps) for row in report.rows] == [
        ("self", 15, "0-2", "0-4"),
        ("cross", 15, "0-2", "0-4"),
    ]
    assert all(row.implementation == "flash" for row in report.rows)


def test_padding_that_a_backend_cannot_do_is_refused_at_the_call(blocky: str) -> None:
    q, k, v = inputs()
    layer = LocalAttention(4, 16, policy=policy(blocky))
    with pytest.raises(BackendUnavailableError, match="cannot do key_padding"):
        layer(q, k, v, AttentionContext(TokenLayout((1, 2, 4), num_suffix_tokens=4, valid_lengths=(1, 4))))
    with pytest.raises(BackendUnavailableError, match="cannot do gate"):
        layer(q, k, v, gate=q)


def test_state_lives_as_long_as_the_request(blocky: str) -> None:
    layer = LocalAttention(4, 16, policy=policy(blocky))
    first, second = AttentionContext(), AttentionContext()
    run_steps(layer, first, 2)
    run_steps(layer, second, 1)
    names = [[row.implementation for row in context.recorder.report().rows] for context in (first, second)]
    assert names == [["sparsity 0.5, call 1", "sparsity 0.5, call 2"], ["sparsity 0.5, call 1"]]


def test_state_is_keyed_by_expert_layer_and_branch(blocky: str) -> None:
    q, k, v = inputs()
    layer = LocalAttention(4, 16, policy=policy(blocky))
    context = AttentionContext()
    for step in (StepInfo(branch="cond"), StepInfo(branch="uncond"), StepInfo(expert=1)):
        layer(q, k, v, AttentionContext(None, step, context.state, context.recorder))
    assert [row.count for row in context.recorder.report().rows] == [3]


def test_passed_over_choices_stand_in_the_report(blocky: str) -> None:
    cross = LocalAttention(4, 16, layer=LayerInfo(role="cross"), policy=policy(blocky))
    context = AttentionContext()
    run_steps(cross, context, 3)
    assert context.recorder.report().notes == (
        "cross: blocky not used: default: not made for role 'cross', the next choice decides",
    )


def test_a_decision_is_logged_once_for_a_policy(caplog: pytest.LogCaptureFixture) -> None:
    shared = policy(cli="reference")
    with caplog.at_level(logging.INFO, logger="diffusion_runtime.attention"):
        for index in range(3):
            run_steps(LocalAttention(4, 16, layer=LayerInfo(index, 3), policy=shared), AttentionContext(), 2)
    assert caplog.messages == ["Using attention backend 'reference' for role=self (cli)"]


def test_a_dtype_that_arrives_later_is_decided_anew(blocky: str) -> None:
    q, k, v = (x.half() for x in inputs())
    layer = LocalAttention(4, 16, policy=policy(blocky))
    with pytest.raises(BackendUnavailableError, match="not float16"):
        layer(q, k, v)
