"""`measured`: the fastest lossless backend for each call shape, found once and remembered on disk."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from attention_calls import attention_call
from exact_attention import assert_is_exact, exact, visible_by
from machines import EVERYTHING, cuda, other
from tables import table
from torch.nn.attention.flex_attention import create_block_mask

from diffusion_runtime.attention import (
    AttentionCall,
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    AttentionRecorder,
    AttentionResult,
    AttentionSpec,
    Availability,
    Backend,
    Capability,
    LayerInfo,
    LocalAttention,
    TokenLayout,
    attention,
    force_attention_backend,
    list_backends,
    measured,
    register_backend,
    select_backend,
    unregister_backend,
)
from diffusion_runtime.attention.autotune import shape_class
from diffusion_runtime.attention.backends.interface import NoOptions
from diffusion_runtime.attention.backends.masks import block_mask_as_boolean
from diffusion_runtime.attention.backends.reference import reference_attention
from diffusion_runtime.attention.machine_cache import Choice, MeasuredCache, cache_folder, machine_facts
from diffusion_runtime.attention.self_test import planned_tests, run_self_test
from diffusion_runtime.core.hardware import Hardware, detect_hardware
from diffusion_runtime.errors import BackendUnavailableError, ConfigError


class Counting(Backend):
    """A backend of the tests that counts its calls. seconds: how long a call takes."""

    seconds = 0.0
    calls = 0
    capability = Capability(dtypes=frozenset({"float32"}), features=frozenset({"lse", "scale"}))

    def probe(self, hardware: Hardware) -> Availability:
        return Availability("1")

    def run(self, call: AttentionCall) -> AttentionResult:
        type(self).calls += 1
        if self.seconds:
            time.sleep(self.seconds)
        return self.compute(call)

    def compute(self, call: AttentionCall) -> AttentionResult:
        out, lse = reference_attention(call.q, call.k, call.v, scale=call.scale)
        return AttentionResult(out, lse if call.return_lse else None, f"kernel of {self.name}")


class Swift(Counting):
    """Faster than anything: it knows the result of the inputs that it was made for."""

    name = "swift"
    summary = "a backend of the tests"
    known: torch.Tensor | None = None

    def compute(self, call: AttentionCall) -> AttentionResult:
        if self.known is None or self.known.shape != call.q.shape or call.return_lse:
            return super().compute(call)
        return AttentionResult(self.known, None, "kernel of swift")


class Sluggish(Counting):
    name = "sluggish"
    summary = "a backend of the tests"
    seconds = 0.02


class Wrong(Counting):
    name = "wrong"
    summary = "a backend of the tests"

    def compute(self, call: AttentionCall) -> AttentionResult:
        return AttentionResult(call.v, None, "kernel of wrong")


class Raising(Counting):
    name = "raising"
    summary = "a backend of the tests"

    def compute(self, call: AttentionCall) -> AttentionResult:
        raise OSError("libraising.so: cannot open shared object file")


class Masking(Counting):
    """The only candidate that takes block masks."""

    name = "masking"
    summary = "a backend of the tests"
    capability = Capability(dtypes=frozenset({"float32"}), features=frozenset({"block_mask"}))

    def compute(self, call: AttentionCall) -> AttentionResult:
        out, _ = reference_attention(call.q, call.k, call.v, mask=block_mask_as_boolean(call.block_mask))
        return AttentionResult(out, None, "kernel of masking")


class Infinite(Counting):
    name = "infinite"
    summary = "a backend of the tests"

    def compute(self, call: AttentionCall) -> AttentionResult:
        return AttentionResult(call.v / 0, None, "kernel of infinite")


class Lossy(Swift):
    name = "lossy"
    summary = "a backend of the tests"
    lossless = False


class Meanwhile(Counting):
    """While it runs, another process finishes measuring the same class, and could time torch_sdpa alone."""

    name = "meanwhile"
    summary = "a backend of the tests"

    def compute(self, call: AttentionCall) -> AttentionResult:
        hardware = detect_hardware("cpu")
        cache = MeasuredCache(machine_facts(hardware, measured.candidates(hardware)))
        cache.write(shape_class(call), Choice("torch_sdpa", {"torch_sdpa": 1.0}))
        return super().compute(call)


TEST_BACKENDS: tuple[type[Counting], ...] = (Swift, Sluggish, Wrong, Raising, Infinite, Lossy, Meanwhile)
# As large as torch needs to be slower than a function that returns what it holds.
SHAPE = (1, 256, 2, 64)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of its own, an empty memory, and no choice in the environment."""
    monkeypatch.setenv("DIFFUSION_RUNTIME_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DIFFUSION_ATTENTION_BACKEND", raising=False)
    for backend in TEST_BACKENDS:
        backend.calls = 0
    measured.forget()
    yield
    for backend in TEST_BACKENDS:
        # A test registers those it needs.
        with contextlib.suppress(ConfigError):
            unregister_backend(backend.name)
    measured.forget()


@pytest.fixture
def qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *SHAPE)
    Swift.known = reference_attention(q, k, v)[0]
    Lossy.known = Swift.known
    return q, k, v


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def call_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **changes: object) -> AttentionCall:
    return attention_call(q, k, v, measured.MeasuredOptions(), **changes)


def ran(qkv: Inputs, backend: str = "measured") -> str:
    """The implementation that the report of one layer's call names."""
    layer = LocalAttention(SHAPE[2], SHAPE[3], policy=AttentionPolicy(config=AttentionConfig.parse(backend)))
    recorder = AttentionRecorder()
    layer(*qkv, AttentionContext(recorder=recorder))
    (row,) = recorder.report().rows
    assert row.backend == backend
    return row.implementation


def files() -> list[Path]:
    return sorted(cache_folder().rglob("*.json"))


def test_the_fastest_is_found_and_the_report_names_it(qkv: Inputs, caplog: pytest.LogCaptureFixture) -> None:
    register_backend(Swift)
    register_backend(Sluggish)
    with caplog.at_level(logging.INFO, "diffusion_runtime.attention"):
        assert ran(qkv) == "swift: kernel of swift (measured)"
    assert "measured attention for self-b1-q256-k256-h2-kv2-d64-float32: swift " in caplog.text
    (path,) = files()
    kept = json.loads(path.read_text())
    assert kept["backend"] == "swift"
    assert set(kept["milliseconds"]) == {"swift", "sluggish", "torch_sdpa"}
    assert kept["milliseconds"]["sluggish"] >= 20
    assert kept["milliseconds"]["sluggish"] > kept["milliseconds"]["swift"]
    assert kept["machine"]["torch"] == torch.__version__


def test_what_was_measured_is_taken_without_measuring_again(qkv: Inputs) -> None:
    register_backend(Swift)
    register_backend(Sluggish)
    attention(*qkv, backend="measured")
    counted = Sluggish.calls
    attention(*qkv, backend="measured")
    # Another process would begin with an empty memory and the same files.
    measured.forget()
    assert ran(qkv) == "swift: kernel of swift (measured)"
    assert Sluggish.calls == counted


def test_the_files_decide_even_if_the_machine_would_now_measure_otherwise(qkv: Inputs) -> None:
    register_backend(Swift)
    register_backend(Sluggish)
    attention(*qkv, backend="measured")
    (path,) = files()
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "backend": "sluggish"}))
    measured.forget()
    assert ran(qkv) == "sluggish: kernel of sluggish (measured)"


def test_another_process_that_timed_fewer_backends_decides(qkv: Inputs, caplog: pytest.LogCaptureFixture) -> None:
    register_backend(Meanwhile)
    with caplog.at_level(logging.INFO, "diffusion_runtime.attention"):
        assert ran(qkv) == "torch_sdpa: flash (measured)"
    assert caplog.messages[-1].endswith(": torch_sdpa 1 ms")


def test_lengths_of_one_class_share_a_measurement(qkv: Inputs) -> None:
    register_backend(Sluggish)
    attention(*qkv, backend="measured")
    counted = Sluggish.calls
    attention(*(x[:, :250] for x in qkv), backend="measured")
    assert (Sluggish.calls, len(files())) == (counted, 1)
    attention(*(x[:, :190] for x in qkv), backend="measured")
    assert Sluggish.calls > counted
    assert len(files()) == 2


def test_one_that_gives_up_precision_never_runs(qkv: Inputs) -> None:
    register_backend(Lossy)
    register_backend(Sluggish)
    assert ran(qkv).startswith("torch_sdpa: ")
    assert Lossy.calls == 0


@table(
    ("backend", "said"),
    [
        (Wrong, "measured leaves wrong out: its result differs from that of torch_sdpa by"),
        (Raising, "measured leaves raising out: OSError: libraising.so"),
        (Infinite, "measured leaves infinite out: ValueError: its result is not finite"),
    ],
)
def test_one_that_is_wrong_or_broken_is_left_out_and_named(
    backend: type[Counting], said: str, qkv: Inputs, caplog: pytest.LogCaptureFixture
) -> None:
    register_backend(backend)
    assert ran(qkv) == "torch_sdpa: flash (measured)"
    assert said in caplog.text
    assert backend.calls == 1


def test_an_explicit_choice_is_never_overridden(qkv: Inputs) -> None:
    register_backend(Swift)
    register_backend(Sluggish)
    assert ran(qkv, "sluggish") == "kernel of sluggish"
    assert files() == []
    config = AttentionConfig.parse({"default": "measured", "per_role": {"cross": "reference"}})
    chosen = {
        role: select_backend(role, head_dim=64, dtype="float32", device="cpu", num_heads=2, config=config).backend
        for role in ("self", "cross")
    }
    assert chosen == {"self": "measured", "cross": "reference"}
    with force_attention_backend("sluggish"):
        calls = Sluggish.calls
        attention(*qkv, backend="measured")
    assert Sluggish.calls == calls + 1


@table("spelling", ["measured", "MEASURED", "Measured"])
def test_the_name_parses_wherever_a_name_does(spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = {"head_dim": 64, "dtype": "float32", "device": "cpu", "num_heads": 2}
    assert AttentionSpec(f"{spelling},torch_sdpa").candidates == ("measured", "torch_sdpa")
    assert select_backend(cli=spelling, **requirements).backend == "measured"  # type: ignore[arg-type]
    rule = {"schedule": [{"steps": "0-1", "backend": spelling}]}
    assert AttentionConfig.parse(rule).schedule[0].spec.name == "measured"
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", spelling)
    assert select_backend(**requirements).backend == "measured"  # type: ignore[arg-type]


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="measure"):
        AttentionSpec("measured", {"measured": True})


def test_without_measuring_the_files_decide_and_else_the_platform(qkv: Inputs) -> None:
    register_backend(Sluggish)
    register_backend(Swift)
    spec = AttentionSpec("measured", {"measure": False})
    recorder = AttentionRecorder()
    layer = LocalAttention(SHAPE[2], SHAPE[3], policy=AttentionPolicy(config=AttentionConfig(default=spec)))
    layer(*qkv, AttentionContext(recorder=recorder))
    assert [row.implementation for row in recorder.report().rows] == ["torch_sdpa: flash (not measured)"]
    assert (Sluggish.calls, files()) == (0, [])
    attention(*qkv, backend="measured")
    measured.forget()
    counted = Sluggish.calls
    layer(*qkv, AttentionContext(recorder=recorder))
    assert [row.implementation for row in recorder.report().rows][1] == "swift: kernel of swift (measured)"
    assert Sluggish.calls == counted


def test_a_single_candidate_is_not_measured(qkv: Inputs) -> None:
    assert ran(qkv) == "torch_sdpa: flash (only candidate)"
    assert files() == []


def test_calls_go_to_those_that_can_do_what_they_need(qkv: Inputs) -> None:
    register_backend(Swift)
    register_backend(Sluggish)
    q, k, v = qkv
    layout = TokenLayout.text(256, (200,))
    # The test backends know no padding, and torch_sdpa is the only one left.
    out = attention(q, k, v, backend="measured", layout=layout)
    assert_is_exact(out, None, exact(q, k, v, visible_by(layout, 1, 256, False), 0.125))
    assert (Swift.calls, Sluggish.calls) == (0, 0)
    out, lse = attention(q, k, v, backend="measured", scale=0.2, return_lse=True)
    assert_is_exact(out, lse, exact(q, k, v, visible_by(None, 1, 256, False), 0.2))
    assert Sluggish.calls > 0
    with pytest.raises(BackendUnavailableError, match="cannot do gate"):
        attention(q, k, v, backend="measured", gate=q)


def test_measuring_holds_no_tensor_and_changes_none(qkv: Inputs) -> None:
    import weakref

    register_backend(Sluggish)
    inputs = [x.clone() for x in qkv]
    attention(*inputs, backend="measured")
    assert all(torch.equal(used, given) for used, given in zip(inputs, qkv, strict=True))
    held = [weakref.ref(x) for x in inputs]
    inputs.clear()
    assert [ref() for ref in held] == [None] * 3


def test_a_graph_that_is_captured_is_not_disturbed(qkv: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    register_backend(Sluggish)
    monkeypatch.setattr(measured, "must_not_wait", lambda x: True)
    assert ran(qkv) == "torch_sdpa: flash (not measured)"
    assert (Sluggish.calls, files()) == (0, [])
    # A later call, which may be measured, is.
    monkeypatch.undo()
    assert ran(qkv).endswith("(measured)")


def test_under_torch_compile(qkv: Inputs) -> None:
    register_backend(Sluggish)

    @torch.compile(backend="eager")
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        call = call_of(2 * q, k, v)
        return measured.MeasuredBackend().run(call).out + 1

    expected = reference_attention(2 * qkv[0], *qkv[1:])[0] + 1
    torch.testing.assert_close(model(*qkv), expected, rtol=1e-5, atol=1e-5)


DAMAGE = {
    "empty": b"",
    "not json": b"{\x00",
    "other json": b"[1, 2]",
    "other schema": b'{"schema": "x", "backend": "swift", "milliseconds": {"swift": 1}}',
    "no backend": b'{"schema": "diffusion_runtime.measured_attention/1", "milliseconds": {}}',
    "times that are none": b'{"schema": "diffusion_runtime.measured_attention/1", "backend": "swift", '
    b'"milliseconds": {"swift": "x"}}',
}


@table("damage", DAMAGE)
def test_a_damaged_file_is_said_and_rebuilt(damage: str, qkv: Inputs, caplog: pytest.LogCaptureFixture) -> None:
    register_backend(Swift)
    register_backend(Sluggish)
    attention(*qkv, backend="measured")
    (path,) = files()
    path.write_bytes(DAMAGE[damage])
    measured.forget()
    caplog.clear()
    assert ran(qkv) == "swift: kernel of swift (measured)"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith(f"the measurement in {path} cannot be read (")
    assert json.loads(path.read_text())["backend"] == "swift"


def test_a_folder_that_cannot_be_made_costs_a_line(
    qkv: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DIFFUSION_RUNTIME_CACHE", str(tmp_path / "file"))
    register_backend(Sluggish)
    assert ran(qkv).endswith("(measured)")
    assert "cannot be kept" in caplog.text
    counted = Sluggish.calls
    assert ran(qkv).endswith("(measured)")
    assert Sluggish.calls == counted, "this process remembers"


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == tmp_path / "cache" / "attention"
    monkeypatch.delenv("DIFFUSION_RUNTIME_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "diffusion-runtime" / "attention"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == tmp_path / "home" / ".cache" / "diffusion-runtime" / "attention"


def test_another_machine_reads_other_files() -> None:
    here, there = MeasuredCache({"torch": "2.13.0"}), MeasuredCache({"torch": "2.14.0"})
    choice = Choice("fa", {"fa": 1.0, "torch_sdpa": 1.5})
    here.write("self-q64", choice)
    assert here.read("self-q64") == choice
    assert there.read("self-q64") is None
    assert here.read("cross-q64") is None


def test_the_first_of_several_writers_decides() -> None:
    cache = MeasuredCache({"torch": "2.13.0"})
    first, second = Choice("fa", {"fa": 1.0}), Choice("torch_sdpa", {"torch_sdpa": 0.9})
    assert cache.write("self-q64", first) == first
    assert cache.write("self-q64", second) == first
    assert cache.read("self-q64") == first


def test_writers_at_once_lose_nothing_and_leave_nothing() -> None:
    barrier = threading.Barrier(4)

    def write(number: int) -> list[Choice]:
        barrier.wait(30)
        cache, mine = MeasuredCache({}), Choice(f"b{number}", {f"b{number}": float(number)})
        for turn in range(20):
            cache.write(f"mine-{number}-{turn}", mine)
        return [cache.write(f"shared-{turn}", mine) for turn in range(20)]

    with ThreadPoolExecutor(4) as writers:
        kept = list(writers.map(write, range(4)))
    cache = MeasuredCache({})
    assert all(cache.read(f"mine-{number}-{turn}") is not None for number in range(4) for turn in range(20))
    # All four were told the same, which is what the files say.
    for turn in range(20):
        assert {choices[turn].backend for choices in kept} == {cache.read(f"shared-{turn}").backend}  # type: ignore[union-attr]
    assert all(path.suffix == ".json" for path in cache_folder().rglob("*") if path.is_file())


@table(
    ("changes", "ending"),
    [
        ({}, "float32"),
        ({"return_lse": True, "causal": True}, "float32-causal-lse"),
        ({"scale": 0.2}, "float32"),
        ({"layout": TokenLayout((1, 8, 8), 0, 192, (100,))}, "float32-cut"),
        ({"layout": TokenLayout((1, 8, 8), 192, 0, (100,))}, "float32-gathered"),
        ({"layout": TokenLayout((1, 8, 8), 192, 0, (192,))}, "float32"),
        ({"mask": torch.ones(1, 1, 256, 256, dtype=torch.bool)}, "float32-boolean_mask-mask11xx"),
        ({"mask": torch.zeros(1, 1, 1, 256)}, "float32-additive_mask-mask111x"),
    ],
)
def test_shape_classes(changes: dict[str, object], ending: str, qkv: Inputs) -> None:
    assert shape_class(call_of(*qkv, **changes)) == f"self-b1-q256-k256-h2-kv2-d64-{ending}"


def test_unequal_lengths_and_roles_are_classes_of_their_own() -> None:
    q, k, v = torch.randn(3, 3, 100, 4, 8)
    call = call_of(
        q[:, :65], k[:, :, :2], v[:, :, :2], layer=LayerInfo(role="cross"), layout=TokenLayout.text(100, (9, 9, 8))
    )
    assert shape_class(call) == "cross-b3-q96-k128-h4-kv2-d8-float32-unequal"


def test_what_it_says_of_itself_on_other_machines() -> None:
    hopper = cuda((9, 0), *EVERYTHING)
    names = [backend.name for backend in measured.candidates(hopper)]
    assert names[:2] == ["fa", "torch_sdpa"]
    assert {"fa4", "cudnn_attn", "flashinfer_attn", "flex_attn"} <= set(names)
    assert not {"sage_attn", "sage_attn_3", "reference", "measured", "vmoba_attn"} & set(names)
    assert [backend.name for backend in measured.candidates(other("cpu", programs=("g++",)))] == ["torch_sdpa"]
    (info,) = [info for info in list_backends(hopper) if info.name == "measured"]
    assert (info.usable, info.version) == (True, f"among {len(names)}")
    assert "float64" in info.capability.dtypes


def test_looking_at_a_machine_measures_nothing(qkv: Inputs) -> None:
    register_backend(Sluggish)
    hardware = detect_hardware("cpu")
    list_backends(hardware)
    tests = planned_tests("measured", hardware)
    assert {test.case.name for test in tests} >= {"plain", "gqa", "lse"}
    for test in tests:
        result = run_self_test(test, "cpu")
        assert result.passed, result.problem
        assert result.implementation.startswith("torch_sdpa: ")
    assert (Sluggish.calls, files()) == (0, [])


def test_options_of_a_candidate_are_its_defaults(qkv: Inputs) -> None:
    seen: list[object] = []

    class Optioned(Counting):
        name = "optioned"
        summary = "a backend of the tests"
        options_type = measured.MeasuredOptions

        def compute(self, call: AttentionCall) -> AttentionResult:
            seen.append(call.options)
            return super().compute(call)

    register_backend(Optioned)
    try:
        attention(*qkv, backend="measured", options={"measure": True})
    finally:
        unregister_backend("optioned")
    assert set(seen) == {measured.MeasuredOptions()}
    assert NoOptions not in map(type, seen)


def test_a_block_mask_is_another_call_than_the_same_one_without() -> None:
    """Calls of one shape, first without and then with a block mask: the second goes to who takes such masks."""
    register_backend(Masking)
    try:
        q, k, v = torch.randn(3, 1, 256, 2, 16)
        blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu")
        backend = measured.MeasuredBackend()
        call = attention_call(q, k, v, measured.MeasuredOptions())
        assert not backend.run(call).implementation.startswith("masking")
        found = backend.run(call._replace(block_mask=blocks))
    finally:
        unregister_backend("masking")
    assert found.implementation.startswith("masking: kernel of masking")
    torch.testing.assert_close(found.out, reference_attention(q, k, v, causal=True)[0])
