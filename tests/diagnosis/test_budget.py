"""What a diagnosis does in limited time: no check that compiles, none after the time is over, and it says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from diffusion_runtime.attention import AttentionCall, AttentionResult, Availability, Backend, Capability
from diffusion_runtime.attention.backends.reference import reference_attention, visible_keys
from diffusion_runtime.attention.backends.registry import available_names, find_backend, register_backend
from diffusion_runtime.attention.backends.registry import unregister_backend as unregister
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.diagnosis import examination
from diffusion_runtime.diagnosis.examination import Diagnosis, examine
from diffusion_runtime.diagnosis.packages import check_packages
from diffusion_runtime.diagnosis.problems import TimeBudget

SECONDS = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class Slow(Backend):
    """Takes 15 s of CLOCK per call."""

    name = "slow_attn"
    summary = "takes long"
    capability = Capability(dtypes=frozenset({"float32"}))
    calls = 0

    def probe(self, hardware: Hardware) -> Availability:
        return Availability("1")

    def run(self, call: AttentionCall) -> AttentionResult:
        type(self).calls += 1
        CLOCK.now += 15
        out, _ = reference_attention(call.q, call.k, call.v, visible=visible_keys(call), scale=call.scale)
        return AttentionResult(out, None, "slow")


class Compiling(Slow):
    """What it costs is declared, not known by name."""

    name = "compiling_attn"
    calls = 0

    def compiles_at_first_call(self, hardware: Hardware) -> bool:
        return True


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DIFFUSION_ATTENTION_BACKEND", raising=False)
    monkeypatch.setattr(examination, "check_packages", lambda *_: [])
    for backend in (Slow, Compiling):
        backend.calls = 0
        register_backend(backend)
    # These two alone: the others have tests of their own.
    listed = examination.list_backends
    names = (Slow.name, Compiling.name)
    monkeypatch.setattr(
        examination, "list_backends", lambda *a, **b: [info for info in listed(*a, **b) if info.name in names]
    )
    yield
    for backend in (Slow, Compiling):
        unregister(backend.name)


def examined(folder: Path, seconds: float | None, requested: Sequence[str] = ()) -> Diagnosis:
    return examine("cpu", requested, folder, lambda stage, detail: None, TimeBudget(seconds, CLOCK))


def test_in_limited_time_nothing_compiles_and_nothing_begins_after_it(tmp_path: Path) -> None:
    found = examined(tmp_path, SECONDS)
    assert (Slow.calls, Compiling.calls) == (2, 0), "the second test began after 15 of 20 s"
    assert len(found.self_tests) == 2
    assert found.exit_code == 0
    said = {each.what: each.why for each in found.left_out}
    assert said["backend compiling_attn"] == "it compiles its kernels at the first call"
    (rest,) = [what for what in said if what.endswith("tests of backend slow_attn")]
    assert said[rest] == "20 s were over"
    assert found.to_dict()["left_out"] == [{"what": what, "why": why} for what, why in said.items()]


def test_the_time_begins_with_the_command() -> None:
    """Before the imports, whose seconds are waited for too."""
    now = CLOCK()
    assert not TimeBudget(SECONDS, CLOCK, started=now - 15).is_spent
    late = TimeBudget(SECONDS, CLOCK, started=now - 18)
    assert late.is_spent
    assert late.import_seconds == 0


def test_all_of_it_and_what_was_asked_for_take_as_long_as_they_take(tmp_path: Path) -> None:
    full = examined(tmp_path, None)
    assert Compiling.calls == Slow.calls > 2
    assert full.left_out == ()
    assert len(full.self_tests) == 2 * Slow.calls
    calls = Compiling.calls
    asked = examined(tmp_path, SECONDS, [Compiling.name])
    assert asked.left_out == ()
    assert Compiling.calls == 2 * calls


def test_a_package_that_takes_long_to_import_is_not_called_broken() -> None:
    checks = {check.name: check for check in check_packages(lambda name: None, seconds=0.0)}
    assert checks["diffusers"].state == "not looked at"
    assert not checks["diffusers"].error


def test_backends_declare_whether_they_compile() -> None:
    """On a GPU those that compile are FlexAttention, Triton's and CuTe's; torch's own kernels are built."""
    versions = {"flash-attn-4": "4.0.0b36", "sageattention": "2.2.0", "flashinfer-python": "0.6", "triton": "3.7.1"}
    machine = Hardware("cuda", "NVIDIA H200", (9, 0), (9, 15), "2.13.0", versions)
    built = set()
    for name in available_names():
        backend = find_backend(name)
        if backend is not None and not backend.compiles_at_first_call(machine):
            built.add(name)
    assert {"torch_sdpa", "cudnn_attn", "reference", "fa3", "sage_attn", "slow_attn"} <= built
    assert not built & {"flex_attn", "fa4", "fa", "flashinfer_attn", "video_sparse_attn", "measured"}
