"""`bench attention`: tables, one JSON object, files, and what is refused before minutes are spent."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import Command

from diffusion_runtime.attention import (
    AttentionCall,
    AttentionResult,
    Availability,
    Backend,
    Capability,
    register_backend,
    unregister_backend,
)
from diffusion_runtime.core.hardware import Hardware

# The smallest shape, as few samples as there can be.
QUICK = ("bench", "attention", "--device", "cpu", "--shapes", "shapes-draft", "--repeats", "1")


@pytest.fixture(autouse=True)
def no_choice_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIFFUSION_ATTENTION_BACKEND", raising=False)
    monkeypatch.setenv("COLUMNS", "80")


class Zeros(Backend):
    name = "zeros"
    summary = "a backend of the tests"
    capability = Capability()

    def probe(self, hardware: Hardware) -> Availability:
        return Availability("1")

    def run(self, call: AttentionCall) -> AttentionResult:
        return AttentionResult(call.q * 0, None, "nothing")


@pytest.fixture
def zeros() -> Iterator[None]:
    register_backend(Zeros)
    yield
    unregister_backend("zeros")


def test_the_table(command: Command) -> None:
    shown = command(*QUICK)
    assert shown.code == 0
    assert "shapes-draft: 512 tokens, 4 heads of 64" in shown.out
    row = next(line.split() for line in shown.out.splitlines() if " torch_sdpa " in line)
    milliseconds, fastest, slowest, _, share, error = map(float, row[1:7])
    # Shown with three digits and four.
    assert 0.99 * fastest <= milliseconds <= 1.01 * slowest
    assert 0 < share < 2
    assert 0 < error < 2e-5
    assert row[7] == "flash"
    assert "Not timed: " in shown.out
    assert "reference" in shown.out
    assert "1/1 shapes-draft" in shown.err
    assert max(map(len, shown.out.splitlines())) <= 80


def test_a_wrong_backend_has_a_row_that_says_so_and_exit_code_1(command: Command, zeros: None) -> None:
    shown = command(*QUICK, "--backends", "torch_sdpa,zeros")
    assert shown.code == 1
    said = " ".join(shown.out.split())
    assert "zeros - - - - 1.0e+00 wrong: the error 1.0e+00 is above the bound 2.0e-05" in said


def test_one_object_and_files(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "new" / "bench.json"
    shown = command(*QUICK, "--backends", "sdpa,vsa", "--json", "--quiet", "--output-path", path)
    assert (shown.code, shown.err) == (0, "")
    assert shown.json["schema"] == "diffusion_runtime.bench/1"
    assert [row["backend"] for row in shown.json["rows"]] == ["torch_sdpa", "video_sparse_attn"]
    assert all(row["num_samples"] == 1 for row in shown.json["rows"])
    assert json.loads(path.read_text()) == shown.json


def test_a_picture(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = command(*QUICK, "--plot", tmp_path / "bench.png")
    assert shown.code == 0
    assert f"wrote {tmp_path / 'bench.png'}" in shown.said
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_type_before_measuring(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    shown = command(*QUICK, "--plot", tmp_path / "bench.png")
    assert (shown.code, shown.out) == (2, "")
    assert shown.said == "error: --plot needs matplotlib; type: pip install 'diffusion-runtime[plot]'"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--shapes", "flux"), 2, "unknown shape 'flux'. Did you mean 'flux-1024'?"),
        (("--backends", "torch_sdpq"), 2, "unknown attention backend 'torch_sdpq'. Did you mean 'torch_sdpa'"),
        (("--backends", "torch_sdpa,fa"), 3, "fa: runs on cuda, rocm, not on cpu"),
        (("--repeats", "0"), 2, "--repeats"),
        (("--device", "toaster"), 2, "expected auto, cpu, cuda"),
        (("--plot", "bench.doc"), 2, "expected a file that ends in .png, .svg, .pdf, .jpg, .webp, got 'bench.doc'"),
        (("--output-path", "."), 1, "is a folder; give the name of a file in it"),
    ],
)
def test_bad_input(command: Command, arguments: tuple[str, ...], code: int, said: str) -> None:
    shown = command(*QUICK, *arguments)
    assert (shown.code, shown.out) == (code, "")
    assert said in shown.said


def test_bad_input_as_an_object(command: Command) -> None:
    shown = command(*QUICK, "--backends", "fa", "--json")
    assert (shown.json["schema"], shown.json["kind"], shown.json["exit_code"]) == (
        "diffusion_runtime.bench/1",
        "BackendUnavailableError",
        3,
    )


def test_the_help_fits_and_names_the_extra(command: Command) -> None:
    shown = command("bench", "attention", "--help")
    assert shown.code == 0
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "'diffusion-runtime[plot]'" in shown.out
    assert "\n diffusion-runtime bench attention" in shown.out
