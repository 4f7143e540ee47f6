"""The error of rounded attention on a model's own q, k and v: measured, recorded, bounded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from recorded_capture import RecordedCapture
from tables import table
from torch import nn
from warm_python import run_worker

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.attention import (
    AttentionCall,
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    AttentionRecorder,
    AttentionResult,
    Availability,
    Backend,
    Capability,
    LayerInfo,
    LocalAttention,
    RequestCache,
    StepInfo,
    TokenLayout,
    attention,
    measured_error,
    register_backend,
    unregister_backend,
)
from diffusion_runtime.attention.backends.interface import RoundedOptions
from diffusion_runtime.attention.backends.reference import reference_attention, visible_keys
from diffusion_runtime.attention.layer_decisions import MeasuredPasses
from diffusion_runtime.attention.measured_error import sampled_squares
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.denoising.cuda_graphs.captured_forward import ForwardPass
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import CAPTURED, FIRST, NEW_REQUEST, TIMED, ForwardGraphs
from diffusion_runtime.errors import BackendInaccurateError, BackendUnavailableError, ConfigError

LAYER = LayerInfo(3, 5, name="blocks.3.attn1")


class Coarse(Backend):
    """The reference, with a relative error that a test sets on results of all features."""

    name = "coarse"
    summary = "a backend of the tests"
    lossless = False
    error_bound = 0.1
    options_type = RoundedOptions
    not_replayed = None
    capability = Capability(
        features=frozenset({"key_padding", "gqa", "scale", "lse", "causal", "boolean_mask", "additive_mask"})
    )
    error: ClassVar[float] = 0.05
    calls: ClassVar[list[AttentionCall]] = []

    def probe(self, hardware: Hardware) -> Availability:
        return Availability(hardware.torch_version)

    def run(self, call: AttentionCall) -> AttentionResult:
        self.calls.append(call)
        out, lse = reference_attention(
            call.q,
            call.k,
            call.v,
            visible=visible_keys(call),
            scale=call.scale,
            causal=call.causal,
            mask=call.mask,
        )
        if call.layout is not None and call.layout.has_padding and call.q.shape[1] == call.k.shape[1]:
            # Some kernels leave what they like in the rows of padding.
            visible = visible_keys(call)
            assert visible is not None
            out = torch.where(visible[:, :, None, None], out, 7.0)
        return AttentionResult(out * (1 + type(self).error), lse if call.return_lse else None, "coarse kernel")


class NoPadding(Coarse):
    """Exact, of calls without padded keys."""

    name = "no_padding"
    lossless = True
    error_bound = None
    error = 0.0
    capability = Capability(features=Coarse.capability.features - {"key_padding"})


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Coarse]]:
    monkeypatch.setattr(Coarse, "error", 0.05)
    monkeypatch.setattr(Coarse, "calls", [])
    register_backend(Coarse)
    register_backend(NoPadding)
    yield Coarse
    unregister_backend("coarse")
    unregister_backend("no_padding")


def layer_of(config: Any, num_heads: int = 4, head_dim: int = 16, **values: Any) -> LocalAttention:
    policy = AttentionPolicy(config=AttentionConfig.parse(config), environment=None)
    return LocalAttention(num_heads, head_dim, layer=LAYER, policy=policy, **values)


def tokens(num_q: int = 200, num_k: int = 200, num_heads: int = 4, head_dim: int = 16, batch: int = 2) -> Any:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, num_q, num_heads, head_dim, generator=generator)
    k, v = torch.randn(2, batch, num_k, num_heads, head_dim, generator=generator)
    return q, k, v


def errors_of(context: AttentionContext) -> list[dict[str, Any]]:
    return context.recorder.report().to_dict()["errors"]  # type: ignore[no-any-return]


MASK = torch.rand(2, 4, 200, 200, generator=torch.Generator().manual_seed(1)) > 0.5


@table("layout", [None, TokenLayout((1, 10, 18), num_suffix_tokens=20, valid_lengths=(3, 20))])
@table("more", [{}, {"mask": MASK}, {"mask": MASK[:1, :1, :1].float()}])
@table("causal", [False, True])
def test_the_error_is_of_what_a_query_sees(layout: TokenLayout | None, more: dict[str, Any], causal: bool) -> None:
    """Padded queries are nobody's, and have no part in it."""
    layer = layer_of("coarse", num_kv_heads=2, causal=causal, scale=0.4)
    q, k, v = tokens()
    context = AttentionContext(layout, StepInfo(7, 9))
    layer(q, k[:, :, :2], v[:, :, :2], context, **more)
    (row,) = errors_of(context)
    assert row == {
        **{"role": "self", "backend": "coarse", "bound": 0.1, "layer": 3, "layers": "3", "steps": "7"},
        "error": pytest.approx(0.05, rel=1e-3),
    }


@table(("num_q", "num_k"), [(0, 5), (5, 0)])
def test_a_call_without_queries_or_keys_has_no_error(num_q: int, num_k: int) -> None:
    """As of a process whose slice of a short sequence is empty, and of an empty text."""
    context = AttentionContext()
    assert layer_of("coarse")(*tokens(num_q, num_k), context).shape == (2, num_q, 4, 16)
    assert errors_of(context) == []


def test_the_rows_stand_for_all_of_them() -> None:
    """The sample of 8-bit attention, whose error differs from row to row, is within a tenth of the whole result's."""
    q, k, v = tokens(1000, 1000, num_heads=6, head_dim=64)
    layer, context = layer_of("fp8_attn", 6, 64), AttentionContext()
    out, exact = layer(q, k, v, context), attention(q, k, v, backend="reference")
    (row,) = errors_of(context)
    assert row["error"] == pytest.approx(float((out - exact).norm() / exact.norm()), rel=0.1)
    (note,) = context.recorder.report().notes
    assert note == (
        f"self: the error of fp8_attn is {row['error']:.2g} at most, 0.1 allowed: measured on this model's q, k and v, "
        "layers 3 (the largest in layer 3), steps 0"
    )


def test_a_layer_is_measured_once_per_request_and_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(measured_error, "sampled_squares", lambda *a: measured.append(a) or sampled_squares(*a))
    layer, context = layer_of("coarse"), AttentionContext()
    for index in range(3):
        for branch in ("cond", "uncond"):
            layer(*tokens(), dataclasses.replace(context, step=StepInfo(index, 3, branch=branch)))
    assert len(measured) == 2
    layer(*tokens(), AttentionContext())
    assert len(measured) == 3


PADDED = TokenLayout((1, 10, 18), num_suffix_tokens=20, valid_lengths=(3, 20))


@table("layouts", [(None, None), (PADDED, PADDED), (None, PADDED)])
def test_passes_that_may_measure_are_known_before_they_run(layouts: tuple[TokenLayout | None, ...]) -> None:
    """By processes that run a guidance branch each, whatever the other's text: the first one by each choice, and by the
    same after blocks were left out."""
    config = {
        "default": "no_padding,coarse",
        "schedule": [{"steps": "3-5", "backend": "coarse"}, {"steps": "6", "backend": "reference", "role": "self"}],
    }
    layer, context = layer_of(config), AttentionContext()
    passes = MeasuredPasses([(LAYER, layer.policy)], leaves_out=lambda step: step.index < 1)
    due = []
    for index in range(9):
        step = StepInfo(index, 9)
        due += [index] if passes(step, ("cond", "uncond")) else []
        for branch, layout in zip(("cond", "uncond"), layouts, strict=True):
            if index >= 1:
                of_branch = dataclasses.replace(step, branch=branch)
                layer(*tokens(), dataclasses.replace(context, step=of_branch, layout=layout))
    (row,) = errors_of(context)
    assert row["steps"] == ("3" if layouts == (None, None) else "1" if None not in layouts else "1,3")
    assert due == [0, 1, 3, 6]


def test_exact_choices_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("it waits for the device")

    monkeypatch.setattr(measured_error, "sampled_squares", refuse)
    sparse = {"default": {"backend": "sta", "extra": {"window": [3, 1, 1], "tile_size": [1, 4, 4]}}}
    for config in ("torch_sdpa", "reference", "measured", sparse):
        context = AttentionContext(TokenLayout((5, 4, 10)))
        layer_of(config)(*tokens(), context)
        assert errors_of(context) == []


def test_nothing_is_measured_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the caller's own: ours find the layer measured."""
    monkeypatch.setattr(measured_error, "must_not_wait", lambda x: True)
    context = AttentionContext()
    layer_of("coarse")(*tokens(), context)
    assert errors_of(context) == []
    monkeypatch.undo()
    register_backend(Coarse)
    layer_of("coarse")(*tokens(), context)
    assert len(errors_of(context)) == 1


def test_a_prefix_is_measured_beside_the_rest() -> None:
    """It is computed within the first step, by the same layer or by another one of the block."""
    policy = AttentionPolicy(config=AttentionConfig.parse("coarse"), environment=None)
    context = AttentionContext()
    for name, of_pass, expected in (("", context.for_prefill(), 0.05), ("", context, 0.07), ("apart", context, 0.08)):
        Coarse.error = expected
        LocalAttention(4, 16, layer=LayerInfo(name=name), policy=policy)(*tokens(), of_pass)
        assert errors_of(context)[0]["error"] == pytest.approx(expected, rel=1e-3)


def test_a_pass_that_may_measure_a_prefix_alone_is_known_before_it_runs() -> None:
    config = AttentionConfig.parse({"default": "reference", "schedule": [{"phase": "commit", "backend": "coarse"}]})
    policy = AttentionPolicy(config=config, environment=None, has_phases=True)
    passes = MeasuredPasses([(LAYER, policy)], leaves_out=lambda _: False)
    assert [passes(StepInfo(index, 3), ("cond",)) for index in range(3)] == [True, False, False]


def test_a_stricter_choice_for_a_later_step_is_measured_again() -> None:
    schedule = [{"steps": "2-3", "backend": "coarse", "extra": {"max_error": 0.01}}]
    loose = {"backend": "coarse", "extra": {"max_error": 0.2}}
    layer, context = layer_of({"default": loose, "schedule": schedule}), AttentionContext()
    for index in range(2):
        layer(*tokens(), dataclasses.replace(context, step=StepInfo(index, 4)))
    with pytest.raises(BackendInaccurateError, match=r"is 0\.05 on this model's q, k and v, 0\.01 allowed"):
        layer(*tokens(), dataclasses.replace(context, step=StepInfo(2, 4)))
    assert [(row["bound"], row["steps"]) for row in errors_of(context)] == [(0.2, "0")]


def test_a_layer_of_a_sparse_choice_is_measured_where_its_first_call_is_dense() -> None:
    sta = {"backend": "sta", "extra": {"window": [3, 1, 1], "tile_size": [1, 4, 4], "skip_time_steps": 2}}
    layer = layer_of({"per_role": {"self": sta}, "default": "coarse"})
    for steps, expected in (((1, 3), [("coarse", "1")]), ((3, 1), [])):
        context = AttentionContext(TokenLayout((5, 4, 10)))
        for index in steps:
            layer(*tokens(), dataclasses.replace(context, step=StepInfo(index, 4)))
        assert [(row["backend"], row["steps"]) for row in errors_of(context)] == expected


def test_beyond_the_bound_it_ends_and_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coarse, "error", 0.13)
    context = AttentionContext(step=StepInfo(2, 9))
    with pytest.raises(BackendInaccurateError) as caught:
        layer_of("coarse")(*tokens(), context)
    assert str(caught.value) == (
        "attention of layer 3 (blocks.3.attn1), role 'self', step 2: coarse (coarse kernel) is not accurate here: its "
        "relative error is 0.13 on this model's q, k and v, 0.1 allowed. Choose another backend for the role: "
        "--attention-config.per_role.self.backend torch_sdpa, or accept it: "
        "--attention-config.per_role.self.extra.max_error 0.2"
    )
    assert caught.value.reasons == (("coarse", "its error is 0.13"),)
    accepted = {"per_role": {"self": {"backend": "coarse", "extra": {"max_error": 0.2}}}}
    layer_of(accepted)(*tokens(), context)
    assert errors_of(context)[0]["bound"] == 0.2
    with pytest.raises(ConfigError, match="max_error: expected a number above 0"):
        layer_of({"default": {"backend": "coarse", "extra": {"max_error": 0}}})


def test_a_result_that_is_not_finite_is_an_error_and_inputs_that_are_not_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Overflow in the model has its own message, at the end of the denoising."""
    q, k, v = tokens()
    monkeypatch.setattr(Coarse, "error", float("nan"))
    with pytest.raises(BackendInaccurateError, match="its relative error is inf"):
        layer_of("coarse")(q, k, v)
    v[0, 0, 0, 0] = float("nan")
    layer_of("coarse")(q[:1], k[:1], v[:1, :, :1].expand(-1, -1, 4, -1))


def test_attention_of_a_compiled_model_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, context = layer_of("coarse"), AttentionContext()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    compiled(*tokens(), context)
    assert errors_of(context)[0]["error"] == pytest.approx(0.05, rel=1e-3)
    monkeypatch.setattr(Coarse, "error", 0.2)
    with pytest.raises(BackendInaccurateError, match=r"is 0\.2 on this"):
        compiled(*tokens(), AttentionContext())


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The tokens of a model that reads no text."""


class Model(nn.Module):
    """One layer, and a weight for which it has a device."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.attention = nn.Parameter(torch.ones(1)), layer_of("coarse")

    def forward(
        self, x: torch.Tensor, _timestep: torch.Tensor, _inputs: Inputs, context: AttentionContext
    ) -> torch.Tensor:
        q, k, v = (x * self.scale).unbind(0)
        out: torch.Tensor = self.attention(q, k, v, context)
        return out


@torch.inference_mode()
def test_every_request_of_replayed_passes_is_measured_in_an_eager_one() -> None:
    """The model keeps nothing for a request, for which its first pass would run eagerly too."""
    model, graphs = Model(), ForwardGraphs(RecordedCapture())
    for expected in ({FIRST: 1, TIMED: 1, CAPTURED: 1}, {NEW_REQUEST: 1}):
        state, recorder, inputs = RequestCache(), AttentionRecorder(), Inputs()
        forward = graphs.of_generation(model, recorder)
        for index in range(5):
            context = AttentionContext(step=StepInfo(index, 5), state=state, recorder=recorder)
            forward(ForwardPass(torch.stack(tokens()), torch.zeros(1), inputs, context))
        forward.report()
        report = recorder.report()
        assert report.graphs is not None
        assert report.graphs.eager == expected
        assert [(row.steps, row.layer) for row in report.errors] == [("0", 3)]


def test_processes_measure_their_shares_and_end_alike(tmp_path: Path) -> None:
    run_worker(Path(__file__).with_name("measured_error_worker.py"), tmp_path)
    for name in ("ulysses", "ring"):
        found = [(tmp_path / f"{name}-{rank}.txt").read_text().splitlines() for rank in range(2)]
        assert found[0] == found[1], "the largest of both, and the same decision"
        error, message = found[0]
        assert 0.04 < float(error) < 0.09
        assert "fp8_attn (fp8 reference) is not accurate here" in message


@pytest.mark.slow
def test_a_generation_reports_it() -> None:
    attention_choice = {"per_role": {"self": "fp8_attn"}}
    pipeline = load_pipeline("shapes", device="cpu", attention=attention_choice)
    request = GenerationRequest("a red circle", height=64, width=64, num_frames=5, num_inference_steps=2)
    report = pipeline(request).attention_report
    (row,) = report.errors
    assert (row.role, row.backend, row.layers, row.steps) == ("self", "fp8_attn", "0-5", "0")
    assert 0.01 < row.error < row.bound == 0.1
    assert str(row) in report.notes


@pytest.mark.gpu
def test_generations_replayed_on_this_gpu_measure_in_their_first_pass() -> None:
    choice = {"per_role": {"self": "fp8_attn"}}
    try:
        pipeline = load_pipeline("shapes", device="cuda", dtype="bfloat16", attention=choice, cuda_graphs="on")
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    for seed in range(2):
        report = pipeline(GenerationRequest("a red circle", seed=seed, num_inference_steps=6)).attention_report
        (row,) = report.errors
        assert (row.role, row.layers, row.steps) == ("self", "0-5", "0")
        assert 0.01 < row.error < 0.1
        assert {each.implementation for each in report.rows if each.role == "self"} == {"fp8 cudnn"}
        assert report.graphs is not None
        assert report.graphs.num_replayed >= 3
