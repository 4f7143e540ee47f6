"""The three layers: decided at construction, forced at a call, scheduled by step and layer, counted."""

from __future__ import annotations

import copy
import logging
import pickle
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from tables import table

from diffusion_runtime.attention import (
    AttentionCall,
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    AttentionResult,
    Availability,
    Backend,
    Capability,
    LayerInfo,
    LocalAttention,
    StepInfo,
    TokenLayout,
    UlyssesAttention,
    USPAttention,
    attention,
    force_attention_backend,
    register_backend,
    unregister_backend,
)
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.errors import BackendUnavailableError, ConfigError
from diffusion_runtime.parallel.collectives import RankGroup

LAYERS = [LocalAttention, UlyssesAttention, USPAttention]


def policy(config: Any = None, cli: Any = None) -> AttentionPolicy:
    return AttentionPolicy(cli=AttentionConfig.parse(cli), config=AttentionConfig.parse(config), environment=None)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 12, 4, 16)
    return q, k, v


@table("layer_class", LAYERS)
@table("layout", [None, TokenLayout((1, 2, 4), num_suffix_tokens=4, valid_lengths=(1, 4))])
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


@table("layer_class", LAYERS)
def test_a_layer_checks_its_call_against_what_it_was_built_for(layer_class: type) -> None:
    """Selection answered for those heads: others would go past what the backend was asked."""
    layer = layer_class(4, 16, 2, layer=LayerInfo(3, 6, name="blocks.3.attn1"), policy=policy())
    q, k = torch.randn(1, 6, 4, 16), torch.randn(1, 6, 2, 16)
    assert layer(q, k, k).shape == q.shape
    wrong = {
        "heads": (torch.randn(1, 6, 2, 16), k, k),
        "head size": (torch.randn(1, 6, 4, 300), torch.randn(1, 6, 2, 300), torch.randn(1, 6, 2, 300)),
        "key heads": (q, q, q),
        "value heads": (q, k, q),
        "no heads": (q[:, :, 0], k, k),
    }
    for q_wrong, k_wrong, v_wrong in wrong.values():
        with pytest.raises(ConfigError) as caught:
            layer(q_wrong, k_wrong, v_wrong)
        assert "layer 3 (blocks.3.attn1), role 'self': built for q [batch, seq_q, 4, 16]" in str(caught.value)
        assert f"k {tuple(k_wrong.shape)}, v {tuple(v_wrong.shape)}" in str(caught.value)


def test_layers_hold_no_weights() -> None:
    assert not LocalAttention(4, 16, policy=policy()).state_dict()


@table("layer_class", LAYERS)
def test_layers_are_copied_and_pickled_after_a_call(layer_class: type, blocky: str) -> None:
    q, k, v = inputs()
    layer = layer_class(4, 16, policy=policy({"default": {"backend": blocky, "extra": {"topk": 5}}}))
    out = layer(q, k, v)
    for copied in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.decisions.possible == layer.decisions.possible
        assert torch.equal(copied(q, k, v), out)


def test_a_deep_copy_talks_to_the_same_processes() -> None:
    handle: Any = threading.Lock()  # torch's groups cannot be copied either
    group = RankGroup((0, 1), 0, handle, (0, 1))
    assert copy.deepcopy(group).process_group is handle


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


# --- what backends say about their options ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AskedOptions:
    topk: int = 3


class AskedBackend(Backend):
    """Writes down what it is asked, and serves topk of 3 alone, in requests of 8 steps alone."""

    name = "asked"
    summary = "a backend of the tests"
    options_type = AskedOptions
    capability = Capability(categories=frozenset({"self"}))
    asked: ClassVar[list[tuple[int, int, int, int | None]]] = []

    def probe(self, hardware: Hardware) -> Availability:
        return Availability(version="1.0")

    def check(self, options: AskedOptions, layer: LayerInfo, num_heads: int, num_steps: int | None) -> None:
        self.asked.append((options.topk, layer.index, num_heads, num_steps))
        if options.topk != 3 or num_steps not in (None, 8):
            raise ConfigError(f"topk {options.topk} in {num_steps} steps of layer {layer.index} of {layer.num_layers}")

    def run(self, call: AttentionCall) -> AttentionResult:
        raise AssertionError("a backend that is only asked ran")


@pytest.fixture
def asked() -> Iterator[list[tuple[int, int, int, int | None]]]:
    register_backend(AskedBackend)
    AskedBackend.asked.clear()
    yield AskedBackend.asked
    unregister_backend("asked")


def test_a_backend_is_asked_about_its_options_at_construction_and_for_every_request(
    asked: list[tuple[int, int, int, int | None]],
) -> None:
    layer = LocalAttention(4, 16, 4, layer=LayerInfo(2, 6), policy=policy("asked"))
    assert asked == [(3, 2, 4, None)]
    layer.decisions.check_request(8)
    with pytest.raises(ConfigError, match="topk 3 in 7 steps of layer 2 of 6"):
        layer.decisions.check_request(7)
    assert asked[1:] == [(3, 2, 4, 8), (3, 2, 4, 7)]
    with pytest.raises(ConfigError, match="topk 4 in None steps"):
        LocalAttention(4, 16, policy=policy({"default": "asked", "schedule": [{"steps": "5", "extra": {"topk": 4}}]}))


def test_a_backend_is_asked_only_about_what_can_hold(asked: list[tuple[int, int, int, int | None]]) -> None:
    """The default never comes into play, nor the second rule in short requests."""
    config = {
        "default": {"backend": "asked", "extra": {"topk": 9}},
        "schedule": [{"steps": "0-6", "backend": "torch_sdpa"}, {"steps": "7--1", "extra": {"topk": 3}}],
    }
    layer = LocalAttention(4, 16, policy=policy(config))
    assert set(asked) == {(3, 0, 4, None)}
    asked.clear()
    layer.decisions.check_request(7)
    assert asked == []
    layer.decisions.check_request(8)
    assert asked == [(3, 0, 4, 8)]
    cross = LocalAttention(4, 16, layer=LayerInfo(role="cross"), policy=policy("asked"))
    cross.decisions.check_request(7)


def test_a_choice_that_is_forced_around_a_request_is_asked_too(asked: list[tuple[int, int, int, int | None]]) -> None:
    layer = LocalAttention(4, 16, policy=policy("torch_sdpa"))
    layer.decisions.check_request(7)
    with force_attention_backend("asked"), pytest.raises(ConfigError, match="topk 3 in 7 steps"):
        layer.decisions.check_request(7)
    with force_attention_backend("fa"), pytest.raises(BackendUnavailableError, match="not on cpu"):
        layer.decisions.check_request(7)


@table("seed", range(12))
def test_the_rules_that_can_hold_are_those_that_some_step_has(seed: int) -> None:
    """Against every step of every request of up to 40 steps, which is more than twice what the rules count to."""
    chance = random.Random(seed)

    def rule() -> dict[str, Any]:
        first, last = sorted((chance.randint(0, 9), chance.randint(0, 9)))
        last_from_end, first_from_end = sorted((chance.randint(1, 9), chance.randint(1, 9)))
        steps = chance.choice([f"{first}-{last}", f"-{first_from_end}--{last_from_end}", f"{first}--{last_from_end}"])
        return {"steps": steps, "layers": chance.choice(["0-1", "1", "all"]), "extra": {}, "backend": "torch_sdpa"}

    levels = [{"schedule": [rule() for _ in range(count)]} for count in (2, 3)]
    for level in levels:
        for item in level["schedule"]:
            if item["layers"] == "all":
                del item["layers"]
    choices = policy(*levels)
    for index in range(3):
        layer = LayerInfo(index, 3)
        held = {
            count: {choices.rules_now(layer, StepInfo(step, count)) for step in range(count)} for count in range(1, 41)
        }
        assert set(choices.held_rules(layer)) == set().union(*held.values())
        for count in (1, 2, 7, 20, 40):
            assert set(choices.held_rules(layer, count)) == held[count]


def test_rules_that_count_far_cost_nothing() -> None:
    rules = [{"steps": f"{10**8 * i}--{10**7 * i}", "backend": "torch_sdpa"} for i in range(1, 5)]
    assert len(policy({"schedule": rules}).held_rules(LayerInfo())) >= 5


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
    assert [when for when, _ in first.decisions.possible] == [
        "always",
        "steps 0-1, layers all",
        "steps all, layers 0,-1",
    ]


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
