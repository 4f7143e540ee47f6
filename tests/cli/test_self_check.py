"""The self-check of third-party attention kernels, on the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import REPOSITORY, Command, process_environment
from warm_python import run_python

from diffusion_runtime.attention import (
    AttentionCall,
    AttentionResult,
    Availability,
    Backend,
    Capability,
    register_backend,
    unregister_backend,
)
from diffusion_runtime.attention.backends.reference import reference_attention
from diffusion_runtime.attention.backends.refusals import forget_wrong
from diffusion_runtime.core.hardware import Hardware

Flags = tuple[str, ...]


class Doubled(Backend):
    """Twice what is right, as somebody else's package."""

    name = "doubled"
    summary = "a backend of the tests"
    capability = Capability(dtypes=frozenset({"float32"}))
    self_check_platforms = frozenset({"cpu"})

    def probe(self, hardware: Hardware) -> Availability:
        return Availability("0.7")

    def run(self, call: AttentionCall) -> AttentionResult:
        return AttentionResult(2 * reference_attention(call.q, call.k, call.v)[0], None, "doubled")


@pytest.fixture(autouse=True)
def doubled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("DIFFUSION_RUNTIME_CACHE", str(tmp_path / "cache"))
    register_backend(Doubled)
    forget_wrong()
    yield
    forget_wrong()
    unregister_backend("doubled")


def test_a_failure_is_exit_code_3_with_the_figure_and_the_fix(command: Command, tiny_flags: Flags) -> None:
    result = command("generate", "a star", *tiny_flags, "--attention-backend", "doubled")
    assert (result.code, result.out) == (3, "")
    assert "loading the transformer" not in result.said
    assert "self-check of doubled (0.7), head size" in result.said, "said before it begins"
    assert "plain: the error 1.0e+00 is above the bound 2.0e-05" in result.said
    assert "(--no-self-check)" in result.said
    taken = command("generate", "a star", *tiny_flags, "--attention-backend", "doubled,torch_sdpa")
    assert taken.code == 0, taken.err
    assert "doubled not used: its self-check failed here" in taken.said


def test_a_dry_run_says_what_will_be_checked_and_that_it_is_off(command: Command, tiny_flags: Flags) -> None:
    arguments = ("generate", "a star", *tiny_flags, "--attention-backend", "doubled", "--dry-run")
    result = command(*arguments)
    assert result.code == 0
    assert "self-check of doubled (0.7), head size 16, float32: made when the model is loaded" in result.said
    Path("mine.yaml").write_text("runtime:\n  self_check: false\n")
    for off in (("--no-self-check",), ("--set", "runtime.self_check=false"), ("--config", "mine.yaml")):
        assert "float32: off: its numbers are not checked on this machine" in command(*arguments, *off).said
        told = command(*arguments, *off, "--json").json
        assert [check["status"] for check in told["self_checks"]] == ["off"]
        assert told["runtime"]["self_check"] is False
    assert [check["status"] for check in command(*arguments, "--json").json["self_checks"]] == ["due"]
    wrong = command(*arguments, "--set", "runtime.self_check=maybe")
    assert wrong.code == 2
    assert "self_check: expected true or false, got 'maybe'" in wrong.said


def test_without_it_the_choice_runs_and_the_report_says_so(command: Command, tiny_flags: Flags) -> None:
    result = command("generate", "a star", *tiny_flags, "--attention-backend", "doubled", "--no-self-check", "--json")
    assert result.code == 0, result.err
    (path,) = (item["path"] for item in result.json["items"])
    report = json.loads(Path(path).with_suffix(".json").read_text())["attention_report"]
    assert {row["backend"] for row in report["rows"]} == {"doubled"}
    assert any("off: its numbers are not checked on this machine" in note for note in report["notes"])


_WRONG_ON_THE_FIRST = """
import os
from diffusion_runtime.attention import AttentionResult, Availability, Backend, Capability
from diffusion_runtime.attention.backends.reference import reference_attention

class WrongOnTheFirst(Backend):
    name = "wrong_on_the_first"
    summary = "wrong on rank 0"
    capability = Capability(dtypes=frozenset({"float32"}))
    self_check_platforms = frozenset({"cpu"})
    def probe(self, hardware):
        return Availability("0.7")
    def run(self, call):
        right = reference_attention(call.q, call.k, call.v)[0]
        return AttentionResult(right * (2 if os.environ.get("RANK") == "0" else 1), None, "by rank")
"""


def test_several_processes_take_what_the_first_found(tmp_path: Path, tiny_flags: Flags) -> None:
    """The first process's kernels are wrong and the second one's are right: both take the next candidate."""
    (tmp_path / "wrong_on_the_first.py").write_text(_WRONG_ON_THE_FIRST)
    info = tmp_path / "wrong_on_the_first-0.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-on-the-first\nVersion: 0.7\n")
    (info / "entry_points.txt").write_text(
        "[diffusion_runtime.attention_backends]\nwrong = wrong_on_the_first:WrongOnTheFirst\n"
    )
    done = run_python(
        *("-m", "diffusion_runtime", "generate", "a star", *tiny_flags),
        *("--device", "cpu", "--num-gpus", 2, "--ulysses-degree", 2),
        *("--attention-backend", "wrong_on_the_first,torch_sdpa"),
        cwd=tmp_path,
        env=process_environment(PYTHONPATH=os.pathsep.join([str(REPOSITORY), str(tmp_path)])),
        max_ranks=2,
    )
    assert done.returncode == 0, done.stderr
    sidecar = json.loads(next((tmp_path / "outputs").glob("*.json")).read_text())
    assert {row["backend"] for row in sidecar["attention_report"]["rows"]} == {"torch_sdpa"}
    assert any("its self-check failed here" in note for note in sidecar["attention_report"]["notes"])
    assert "self-check of wrong_on_the_first (0.7)" in " ".join(done.stderr.split())
