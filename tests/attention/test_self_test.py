"""The self-test: good backends pass everything they declare, and each way of being wrong is caught."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from attention_calls import with_fields
from dense_backends import SPARSE
from sparse_oracle import masked_attention
from tables import table

from diffusion_runtime.attention import (
    AttentionCall,
    AttentionResult,
    Availability,
    Backend,
    Capability,
    HeadSizes,
    register_backend,
    unregister_backend,
)
from diffusion_runtime.attention.backends.reference import reference_attention, visible_keys
from diffusion_runtime.attention.backends.registry import available_names, find_backend
from diffusion_runtime.attention.self_test import (
    SelfTestResult,
    attention_by_definition,
    device_answers,
    planned_tests,
    run_self_test,
)
from diffusion_runtime.attention.self_test_cases import CASES
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.core.options import option_names

CPU = Hardware()
DENSE = ("torch_sdpa", "reference")
ALL_FEATURES = frozenset(
    {"key_padding", "gqa", "causal", "scale", "lse", "boolean_mask", "additive_mask", "cached_keys"}
)


def results_of(name: str) -> dict[str, SelfTestResult]:
    return {test.title: run_self_test(test, "cpu") for test in planned_tests(name, CPU)}


@table("name", DENSE + SPARSE)
def test_our_backends_pass(name: str) -> None:
    results = results_of(name)
    assert {title: result.problem for title, result in results.items() if not result.passed} == {}
    for result in results.values():
        assert result.error is not None
        # Rounding alone: an error of 0 would mean that nothing was compared.
        assert 0 < result.error < result.bound / 3
        assert ("block-sparse" in result.implementation) == (name in SPARSE), (
            "a sparse method is tested sparse: self_test_options"
        )


def test_every_declared_feature_is_tried() -> None:
    def tried(name: str) -> set[str]:
        return {feature for test in planned_tests(name, CPU) for feature in test.case.needs}

    assert tried("torch_sdpa") == ALL_FEATURES
    assert tried("video_sparse_attn") == {"key_padding", "gqa", "scale", "lse", "gate"}
    assert {test.case.role for test in planned_tests("torch_sdpa", CPU)} == {"self", "cross"}
    assert {test.case.role for test in planned_tests("vmoba_attn", CPU)} == {"self"}
    assert {test.dtype for test in planned_tests("torch_sdpa", CPU)} == {"float32", "bfloat16", "float16"}
    assert planned_tests("torch_sdpa", Hardware("cuda", capability=(9, 0)))[0].dtype == "bfloat16"
    assert planned_tests("sage_attn_3", CPU) == ()


def test_the_definition_agrees_with_the_oracle_of_the_sparse_tests() -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 9, 4, 8, generator=generator)
    k, v = torch.randn(2, 2, 7, 2, 8, generator=generator)
    visible = torch.rand(2, 4, 9, 7, generator=generator) < 0.4
    visible[1, 2, 5] = False
    ours, theirs = attention_by_definition(q, k, v, visible, 0.3), masked_attention(q, k, v, visible, 0.3)
    torch.testing.assert_close(ours, theirs)
    assert ours[1][1, 2, 5] == -math.inf


class Tampered(Backend):
    """The reference, and a fault that a test puts in."""

    name = "tampered"
    summary = "a backend of the tests"
    capability = Capability(head_sizes=HeadSizes(minimum=16, maximum=80, multiple=16), features=ALL_FEATURES)
    fault: Callable[[AttentionCall], AttentionResult]

    def probe(self, hardware: Hardware) -> Availability:
        return Availability("1")

    def run(self, call: AttentionCall) -> AttentionResult:
        return type(self).fault(call)


def right(call: AttentionCall) -> AttentionResult:
    out, lse = reference_attention(
        call.q, call.k, call.v, visible=visible_keys(call), scale=call.scale, causal=call.causal, mask=call.mask
    )
    return AttentionResult(out, lse if call.return_lse else None, "tampered")


def scaled(factor: float) -> Callable[[AttentionCall], AttentionResult]:
    def run(call: AttentionCall) -> AttentionResult:
        scale = call.q.shape[3] ** -0.5 if call.scale is None else call.scale
        return right(call._replace(scale=scale * factor))

    return run


def ignoring(**fields: object) -> Callable[[AttentionCall], AttentionResult]:
    return lambda call: right(with_fields(call, **fields))


def with_lse(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[AttentionCall], AttentionResult]:
    def run(call: AttentionCall) -> AttentionResult:
        result = right(call)
        return result if result.lse is None else result._replace(lse=change(result.lse))

    return run


def with_out(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[AttentionCall], AttentionResult]:
    def run(call: AttentionCall) -> AttentionResult:
        result = right(call)
        return result._replace(out=change(result.out))

    return run


def other_key_heads(call: AttentionCall) -> AttentionResult:
    repeats = call.q.shape[2] // call.k.shape[2]
    k, v = (x.repeat(1, 1, repeats, 1) for x in (call.k, call.v))
    return right(with_fields(call, k=k, v=v))


def mean_of_keys_in_place(call: AttentionCall) -> AttentionResult:
    # The mean of the keys moves every score of a query alike, so the result stays right.
    call.k.sub_(call.k.mean(dim=1, keepdim=True))
    return right(call)


def not_installed(call: AttentionCall) -> AttentionResult:
    raise OSError("libfaulty.so: cannot open shared object file\nand more")


FAULTS = {
    "scale a tenth too large": (scaled(1.1), {"plain", "scale", "causal"}, "above the bound"),
    "scale of its own": (ignoring(scale=None), {"scale"}, "above the bound"),
    "padding is seen": (ignoring(layout=None), {"padding after", "padding before"}, "above the bound"),
    "masks are not seen": (ignoring(mask=None), {"boolean mask", "additive mask"}, "above the bound"),
    "not causal": (ignoring(causal=False), {"causal"}, "above the bound"),
    "other key heads": (other_key_heads, {"gqa"}, "above the bound"),
    "lse to base 2": (with_lse(lambda lse: lse * math.log2(math.e)), {"lse"}, "log-sum-exp is off"),
    "no lse": (with_lse(lambda lse: None), {"lse"}, "log-sum-exp is missing"),
    "half an lse": (with_lse(lambda lse: lse[:, :2]), {"lse"}, "log-sum-exp is [2, 2, 288]"),
    "not finite": (with_out(lambda out: out * math.nan), {"plain"}, "not finite"),
    "other dtype": (with_out(torch.Tensor.double), {"plain"}, "torch.float64, expected"),
    "other shape": (with_out(lambda out: out.transpose(1, 2)), {"plain"}, "the result is [2, 4, 288, 64]"),
    "in place": (mean_of_keys_in_place, {"plain"}, "belong to the caller"),
    "raises": (not_installed, {"plain"}, "OSError: libfaulty.so: cannot open shared object file"),
}


@pytest.fixture
def tampered() -> Iterator[type[Tampered]]:
    register_backend(Tampered)
    yield Tampered
    unregister_backend("tampered")


def test_without_a_fault_everything_passes(tampered: type[Tampered], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tampered, "fault", staticmethod(right), raising=False)
    results = results_of("tampered")
    assert all(result.passed for result in results.values())
    assert len(results) == len(CASES) - 2 + 2, "every case but the gate and the block mask, and two more dtypes"


@table("fault", FAULTS)
def test_every_fault_is_caught(fault: str, tampered: type[Tampered], monkeypatch: pytest.MonkeyPatch) -> None:
    run, cases, message = FAULTS[fault]
    monkeypatch.setattr(tampered, "fault", staticmethod(run), raising=False)
    results = list(results_of("tampered").values())
    failed = {result.test.case.name: result.problem for result in results if not result.passed}
    assert cases <= set(failed)
    assert message in failed[min(cases)]
    assert "\n" not in failed[min(cases)]
    for result in results:
        values = result.to_dict()
        assert values["passed"] == (not values["problem"])
        assert all(number is None or math.isfinite(number) for number in (values["error"], values["bound"]))


def test_a_scale_a_tenth_too_large_shows_in_every_dtype(
    tampered: type[Tampered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tampered, "fault", staticmethod(scaled(1.1)), raising=False)
    plain = [result for result in results_of("tampered").values() if result.test.case.name == "plain"]
    assert {result.test.dtype for result in plain} == {"float32", "bfloat16", "float16"}
    assert all(result.error is not None and 0.05 < result.error < 0.2 for result in plain)
    assert not any(result.passed for result in plain)


def test_a_backend_declares_what_its_self_test_needs(tampered: type[Tampered], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    @dataclasses.dataclass(frozen=True)
    class Options:
        keep: float = 1.0

    def run(call: AttentionCall) -> AttentionResult:
        seen.append(call.options)
        return scaled(1.1)(call)

    monkeypatch.setattr(tampered, "fault", staticmethod(run), raising=False)
    monkeypatch.setattr(tampered, "options_type", Options)
    monkeypatch.setattr(tampered, "self_test_options", {"keep": 0.5})
    assert not run_self_test(planned_tests("tampered", CPU)[0], "cpu").passed
    monkeypatch.setattr(tampered, "error_bound", 0.3)
    result = run_self_test(planned_tests("tampered", CPU)[0], "cpu")
    assert (result.passed, result.bound) == (True, 0.3)
    assert seen == [Options(0.5)] * 2


def test_what_gives_up_precision_or_pairs_says_so() -> None:
    lossy = {name for name in available_names() if (backend := find_backend(name)) and not backend.lossless}
    assert {"sage_attn", "sage_attn_3", "fp8_attn", *SPARSE} <= lossy
    assert lossy.isdisjoint({"torch_sdpa", "reference", "fa", "cudnn_attn", "flex_attn", "flashinfer_attn", "xformers"})
    for name in available_names():
        backend = find_backend(name)
        assert backend is not None
        assert backend.lossless <= (backend.error_bound is None)
        assert set(backend.self_test_options) <= set(option_names(backend.options_type))


def test_a_lost_device_is_noticed() -> None:
    assert device_answers("cpu")
    assert not device_answers("cuda:99")


def test_the_log_is_left_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("diffusion_runtime.attention")
    level = logger.level
    run_self_test(planned_tests("video_sparse_attn", CPU)[0], "cpu")
    assert caplog.records == []
    assert logger.level == level
