"""The self-check at load: third-party kernels that compute wrongly are refused before any weight is read.

The backends here declare that they are checked on a CPU, where nothing else is.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import cuda

from diffusion_runtime import GenerationRequest, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import (
    AttentionCall,
    AttentionConfig,
    AttentionPolicy,
    AttentionResult,
    Availability,
    Backend,
    Capability,
    LayerInfo,
    LocalAttention,
    list_backends,
    register_backend,
    select_backend,
    unregister_backend,
)
from diffusion_runtime.attention import select as selection
from diffusion_runtime.attention.backends.reference import reference_attention, visible_keys
from diffusion_runtime.attention.backends.refusals import forget_wrong, remember_wrong
from diffusion_runtime.attention.backends.registry import available_names, find_backend
from diffusion_runtime.attention.self_check import SelfChecker, uses_of
from diffusion_runtime.attention.self_test import tests_of_use as cases_of_use
from diffusion_runtime.attention.self_test_cases import case_with_keys
from diffusion_runtime.core.hardware import Hardware, detect_hardware
from diffusion_runtime.errors import BackendUnavailableError, ConfigError
from diffusion_runtime.loading import inspect_pipeline


class Foreign(Backend):
    """The reference as somebody else's package, with a factor on the scale that a test sets."""

    name = "foreign"
    summary = "a backend of the tests"
    capability = Capability(features=frozenset({"key_padding", "gqa", "scale", "lse"}))
    self_check_platforms = frozenset({"cpu"})
    version = "1.0"
    factor = 1.0
    calls: list[AttentionCall] = []  # noqa: RUF012

    def probe(self, hardware: Hardware) -> Availability:
        return Availability(type(self).version)

    def run(self, call: AttentionCall) -> AttentionResult:
        self.calls.append(call)
        scale = (call.q.shape[3] ** -0.5 if call.scale is None else call.scale) * type(self).factor
        out, lse = reference_attention(call.q, call.k, call.v, visible=visible_keys(call), scale=scale)
        return AttentionResult(out, lse if call.return_lse else None, "foreign kernel")


@pytest.fixture(autouse=True)
def foreign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Foreign]]:
    monkeypatch.setenv("DIFFUSION_RUNTIME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Foreign, "factor", 1.0)
    monkeypatch.setattr(Foreign, "calls", [])
    register_backend(Foreign)
    forget_wrong()
    yield Foreign
    forget_wrong()
    unregister_backend("foreign")


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores a fifth too large."""
    monkeypatch.setattr(Foreign, "factor", 1.2)


def kept_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.json"))


def described(attention: Any, **more: Any) -> Any:
    return inspect_pipeline(RuntimeConfig("shapes", device="cpu", attention=attention, **more))


@pytest.mark.usefixtures("wrong")
def test_a_choice_that_computes_wrongly_is_refused_before_the_weights(tmp_path: Path) -> None:
    stages: list[str] = []
    with pytest.raises(BackendUnavailableError) as caught:
        load_pipeline("shapes", device="cpu", attention="foreign", on_stage=stages.append)
    said = str(caught.value)
    assert stages == ["choosing attention"]
    assert "foreign: its self-check failed here: plain: the error " in said
    assert "is above the bound 2.0e-05" in said
    assert "foreign (1.0), head size 64, float32" in said
    assert "fix: choose another backend, install another version of it, or turn the check off (--no-self-check)" in said
    assert kept_files(tmp_path) == [], "a package may be built again under the same version"


@pytest.mark.usefixtures("wrong")
def test_the_next_candidate_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for attention in ("foreign,torch_sdpa", None):
        forget_wrong()
        monkeypatch.setattr(selection, "platform_candidates", lambda hardware: ("foreign", "torch_sdpa"))
        pipeline: Any = load_pipeline("shapes", device="cpu", attention=attention)
        rows = pipeline.recipe["attention"]
        assert {row["backend"] for row in rows} == {"torch_sdpa"}
        assert all("its self-check failed here" in row["rejected"][0][1] for row in rows)
        assert all(
            layer.decisions.possible[0][1].backend == "torch_sdpa" for layer in pipeline.transformer.attention_layers()
        )
    # What is known to be wrong is refused wherever the process chooses next, where nobody said that it may run.
    with pytest.raises(BackendUnavailableError, match="self-check failed"):
        select_backend(head_dim=64, dtype="float32", device="cpu", num_heads=6, config="foreign")
    assert (
        select_backend(head_dim=32, dtype="float32", device="cpu", num_heads=6, config="foreign").backend == "foreign"
    )


def test_what_passes_is_kept_and_said(foreign: type[Foreign], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "diffusion_runtime.attention")
    assert [check.status for check in described("foreign").self_checks] == ["due"]
    assert foreign.calls == [], "a look at a model makes no check"
    pipeline: Any = load_pipeline("shapes", device="cpu", attention="foreign")
    num_checked = len(foreign.calls)
    assert num_checked >= 5
    messages = [message for message in caplog.messages if message.startswith("self-check of foreign (1.0)")]
    assert "small cases against float64" in messages[0], "said before, for what takes minutes"
    assert "passed: error " in messages[1]
    request = GenerationRequest("a red circle", num_frames=1, height=32, width=32, num_inference_steps=1)
    notes = pipeline(request).attention_report.notes
    assert any("self-check of foreign (1.0), head size 64, float32: passed: error" in note for note in notes)
    (kept,) = kept_files(tmp_path)
    foreign.calls.clear()
    assert [check.status for check in described("foreign").self_checks] == ["kept"]
    load_pipeline("shapes", device="cpu", attention="foreign")
    assert foreign.calls == []
    kept.write_text(kept.read_text()[:50])
    load_pipeline("shapes", device="cpu", attention="foreign")
    assert len(foreign.calls) == num_checked, "a damaged file counts for nothing"
    assert any("cannot be read" in message for message in caplog.messages)


@pytest.mark.parametrize("changed", ["version", "torch", "chip", "head size", "dtype"])
def test_another_machine_or_form_is_another_check(
    changed: str, foreign: type[Foreign], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was kept speaks for one version, chip, torch, head size and dtype."""

    def check(head_dim: int = 16, dtype: torch.dtype = torch.float32) -> int:
        policy = AttentionPolicy(config=AttentionConfig.parse("foreign"), dtype=dtype, environment=None)
        foreign.calls.clear()
        SelfChecker().build_checked(lambda: [LocalAttention(2, head_dim, policy=policy)], lambda built: built)
        return len(foreign.calls)

    assert check() > 0
    assert check() == 0
    if changed == "version":
        monkeypatch.setattr(foreign, "version", "1.0.post1")
    elif changed == "torch":
        monkeypatch.setattr(torch, "__version__", "99.0")
    elif changed == "chip":
        here = dataclasses.replace(detect_hardware("cpu"), device_name="another")
        monkeypatch.setattr("diffusion_runtime.attention.policy.detect_hardware", lambda device: here)
    assert check(32 if changed == "head size" else 16, torch.bfloat16 if changed == "dtype" else torch.float32) > 0


@pytest.mark.usefixtures("wrong")
def test_it_can_be_turned_off(foreign: type[Foreign]) -> None:
    with pytest.raises(BackendUnavailableError):
        load_pipeline("shapes", device="cpu", attention="foreign")
    foreign.calls.clear()
    # In the same process, which knows that its numbers are wrong.
    config = RuntimeConfig("shapes", device="cpu", attention="foreign", self_check=False)
    pipeline: Any = load_pipeline(config)
    assert foreign.calls == []
    request = GenerationRequest("a red circle", num_frames=1, height=32, width=32, num_inference_steps=1)
    report = pipeline(request).attention_report
    assert {row.backend for row in report.rows} == {"foreign"}
    assert any("off: its numbers are not checked on this machine" in note for note in report.notes)
    assert [check.status for check in inspect_pipeline(config).self_checks] == ["off"]
    with pytest.raises(ConfigError, match="self_check: expected true or false, got 'no'"):
        RuntimeConfig(self_check="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="self_check"):
        load_pipeline(RuntimeConfig("shapes"), self_check=False)


def test_a_cpu_costs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("self_test", "machine_cache"):
        monkeypatch.delitem(sys.modules, f"diffusion_runtime.attention.{name}", raising=False)
    assert described(None).self_checks == ()
    load_pipeline("shapes", device="cpu")
    assert not {"diffusion_runtime.attention.self_test", "diffusion_runtime.attention.machine_cache"} & set(sys.modules)
    assert not (tmp_path / "cache").exists()


def test_who_is_checked_is_declared() -> None:
    """Whatever needs a package, on every accelerator; torch's own kernels and ours nowhere."""
    checked = {name for name in available_names() if "cuda" in find_backend(name).self_check_platforms}  # type: ignore[union-attr]
    packages = {
        "fa",
        "fa2",
        "fa3",
        "fa4",
        "fp8_attn",
        "flashinfer_attn",
        "sage_attn",
        "sage_attn_3",
        "xformers",
        "aiter",
    }
    assert checked == packages
    assert not any("cpu" in find_backend(name).self_check_platforms for name in packages)  # type: ignore[union-attr]
    # A backend that says nothing is somebody else's.
    assert "cuda" in Backend.self_check_platforms


def test_a_use_holds_what_the_layers_ask() -> None:
    policy = AttentionPolicy(config=AttentionConfig.parse("foreign"), environment=None)
    layers = [
        LocalAttention(4, 16, 2, layer=LayerInfo(role="self"), policy=policy),
        LocalAttention(4, 16, layer=LayerInfo(role="cross"), policy=policy, scale=0.3),
        LocalAttention(4, 32, layer=LayerInfo(role="cross"), policy=policy),
    ]
    first, second = uses_of(layers)
    assert (first.head_dim, first.categories, first.needs) == (16, ("cross", "self"), ("gqa", "key_padding", "scale"))
    assert (second.head_dim, second.categories, second.needs) == (32, ("cross",), ("key_padding",))

    def titles(use: Any, num_keys: tuple[int, ...]) -> set[str]:
        form = {"head_dim": use.head_dim, "dtype": use.dtype, "categories": use.categories, "needs": use.needs}
        tests = cases_of_use("foreign", detect_hardware("cpu"), num_keys=num_keys, **form)
        assert {(test.head_dim, test.dtype) for test in tests} == {(use.head_dim, "float32")}
        return {test.case.name for test in tests}

    assert {"plain", "cross-attention", "gqa", "scale", "padding after", "777 keys"} <= titles(first, (777,))
    assert not {"lse", "causal", "boolean mask"} & titles(first, ())
    assert not {"plain", "gqa", "777 keys"} & titles(second, (777,))


def test_many_keys_end_alike_and_are_fewer() -> None:
    for number in (1, 77, 1024, 1025, 32760, 75600):
        bounded = case_with_keys(number).layout.num_tokens
        assert bounded <= 1024
        assert bounded % 256 == number % 256


def test_the_key_count_of_the_model_is_among_them(foreign: type[Foreign]) -> None:
    load_pipeline("shapes", device="cpu", attention="foreign")
    defaults = described("foreign").rules
    sizes = (defaults.defaults[name] for name in ("height", "width", "num_frames"))
    num_keys = case_with_keys(defaults.sampling.geometry.num_tokens(*sizes)).layout.num_tokens
    assert num_keys in {call.k.shape[1] for call in foreign.calls}


@pytest.mark.usefixtures("wrong")
def test_dense_steps_and_measured_candidates_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that hand calls to others: those others are what is checked."""
    from diffusion_runtime.attention import select

    monkeypatch.setattr(select, "platform_candidates", lambda hardware: ("foreign", "torch_sdpa"))
    pipeline: Any = load_pipeline("shapes", device="cpu", attention={"per_role": {"self": {"backend": "vmoba_attn"}}})
    layer = next(iter(pipeline.transformer.attention_layers()))
    requirements, dense = layer.decisions.requirements, layer.decisions.possible[0][1].dense
    assert dense is not None
    assert dense.backend == "torch_sdpa"
    forget_wrong()
    load_pipeline("shapes", device="cpu", attention="measured")
    assert "foreign" not in find_backend("measured").delegates(requirements)  # type: ignore[union-attr]


def test_processes_agree_on_what_the_first_one_found(foreign: type[Foreign]) -> None:
    """Rank 0 checks and tells. The others check nothing, and choose as it does although theirs would pass."""
    policy = AttentionPolicy(config=AttentionConfig.parse("foreign,torch_sdpa"), environment=None)

    def settle(from_first: Callable[[Callable[[], str]], str]) -> tuple[str, list[str]]:
        layers, checks = SelfChecker(from_first=from_first).build_checked(
            lambda: [LocalAttention(2, 16, policy=policy)], lambda built: built
        )
        return layers[0].decisions.possible[0][1].backend, [check.status for check in checks]

    told: list[str] = []

    def of_first(make: Callable[[], str]) -> str:
        told.append(make())
        return told[-1]

    foreign.factor = 1.2
    assert settle(of_first) == ("torch_sdpa", ["failed"])
    foreign.factor = 1.0
    foreign.calls.clear()
    forget_wrong()
    waiting = iter(told)
    assert settle(lambda make: next(waiting)) == ("torch_sdpa", ["failed"])
    assert foreign.calls == []
    assert json.loads(told[0])[0]["problem"].startswith("plain: the error ")


@pytest.mark.usefixtures("wrong")
def test_a_device_that_is_lost_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_runtime.attention.self_test.device_answers", lambda device: False)
    with pytest.raises(BackendUnavailableError, match="took the device cpu down"):
        load_pipeline("shapes", device="cpu", attention="foreign,torch_sdpa")


@pytest.mark.usefixtures("wrong")
def test_attach_checks_as_well() -> None:
    from tiny_denoisers import video_cross

    from diffusion_runtime.diffusers_bridge.attach import attach

    model, _ = video_cross()
    with pytest.raises(BackendUnavailableError, match="self-check failed"):
        attach(model, "foreign")
    with attach(model, "foreign", self_check=False) as handle:
        assert any("off: its numbers are not checked" in note for note in handle.report().notes)
    with attach(model, "foreign,torch_sdpa") as handle:
        layers = [layer for module in handle.modules for layer in module.layers]
        assert {decision.backend for layer in layers for _, decision in layer.decisions.possible} == {"torch_sdpa"}


@pytest.mark.usefixtures("wrong")
def test_a_pipeline_of_diffusers_is_checked_before_it_is_loaded(tiny_wan_folder: Path, foreign: type[Foreign]) -> None:
    place: dict[str, Any] = {"device": "cpu", "backend": "diffusers"}
    stages: list[str] = []
    with pytest.raises(BackendUnavailableError, match="self-check failed"):
        load_pipeline(str(tiny_wan_folder), attention="foreign", on_stage=stages.append, **place)
    assert stages == ["choosing attention"]
    foreign.factor = 1.0
    forget_wrong()
    config = RuntimeConfig(str(tiny_wan_folder), attention="foreign", **place)
    assert [check.status for check in inspect_pipeline(config).self_checks] == ["due"]
    load_pipeline(config)
    assert [check.status for check in inspect_pipeline(config).self_checks] == ["kept"]


def test_no_other_machine_is_refused() -> None:
    """A self-check speaks of the machine of this process; a choice for another one is judged by what is declared."""
    remember_wrong("fa4", 64, "bfloat16", "its self-check failed here")
    machine = cuda((9, 0), "flash-attn-4")
    chosen = select_backend(head_dim=64, dtype="bfloat16", device=machine, num_heads=2, config="fa4")
    assert chosen.backend == "fa4"


@pytest.mark.gpu
def test_packages_on_this_gpu_pass_and_are_kept() -> None:
    """Whatever is installed here, with the embedded model's layers."""
    names = [info.name for info in list_backends("cuda") if info.usable]
    third_party = [name for name in names if "cuda" in find_backend(name).self_check_platforms]  # type: ignore[union-attr]
    for name in third_party:
        for status in ("passed", "kept"):
            pipeline: Any = load_pipeline("shapes", device="cuda", attention=name)
            request = GenerationRequest("a red circle", num_frames=1, height=32, width=32, num_inference_steps=1)
            notes = pipeline(request).attention_report.notes
            expected = "passed: error" if status == "passed" else "passed on an earlier load: error"
            assert any(note.startswith(f"self-check of {name} (") and expected in note for note in notes), notes
