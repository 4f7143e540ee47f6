"""Batches: what fails does not stop the rest, what is interrupted keeps what is finished."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sample_media import make_media

from diffusion_runtime.cli.terminal import Terminal
from diffusion_runtime.core.progress import Progress
from diffusion_runtime.errors import (
    BackendUnavailableError,
    DeviceMemoryError,
    DiskFullError,
    ModelLoadError,
    OutputError,
)
from diffusion_runtime.media import GeneratedMedia
from diffusion_runtime.media.file_writer import OpenSink
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.session.batch import BatchResult, Item, run_batch, title_of
from diffusion_runtime.session.failures import Failure
from diffusion_runtime.session.outputs import Outputs


def make(item: Item, on_progress: Callable[[Progress], None], open_sink: OpenSink | None = None) -> GeneratedMedia:
    """Media whose prompt may name what goes wrong instead."""
    request = item.request
    wrong: dict[str, BaseException] = {
        "memory": DeviceMemoryError("too large"),
        "full": DiskFullError("no room"),
        "unexpected": KeyError("inside"),
        "interrupt": KeyboardInterrupt(),
    }
    if request.prompt in wrong:
        raise wrong[request.prompt]
    return make_media(num_frames=1, recipe={"request": request.to_dict()})


def run_prompts(folder: Path, *prompts: str) -> tuple[BatchResult, list[Path]]:
    told: list[Path] = []
    items = [Item(GenerationRequest(prompt=prompt, num_frames=1)) for prompt in prompts]
    result = run_batch(items, make, Outputs(folder), Terminal(), told.append)
    return result, told


@pytest.mark.parametrize(
    ("prompts", "exit_code", "num_files"),
    [
        (("a", "b"), 0, 2),
        (("a", "memory", "b"), 5, 2),
        (("memory", "unexpected"), 4, 0),
        (("unexpected", "memory"), 1, 0),
        (("a", "memory", "interrupt", "b"), 130, 1),
        (("interrupt", "a"), 130, 0),
    ],
)
def test_exit_codes(tmp_path: Path, prompts: tuple[str, ...], exit_code: int, num_files: int) -> None:
    result, told = run_prompts(tmp_path, *prompts)
    assert result.exit_code == exit_code
    assert sorted(tmp_path.glob("*.png")) == sorted(told)
    assert len(told) == num_files
    assert sorted(tmp_path.iterdir()) == sorted([*told, *(path.with_suffix(".json") for path in told)])


def test_a_failed_item_is_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, _ = run_prompts(tmp_path, "a", "memory", "unexpected")
    written, short, unexpected = [outcome.to_dict() for outcome in result.outcomes]
    assert written["path"] == str(tmp_path / "a-seed0.png")
    assert written["attention_report"]["num_calls"] == 3
    assert short == {"prompt": "memory", "seed": 0, "error": "too large", "kind": "DeviceMemoryError", "exit_code": 4}
    assert unexpected["kind"] == "KeyError"
    assert "run again with --verbose" in unexpected["error"]
    said = capsys.readouterr().err
    assert "error: [2/3] memory, seed 0: too large" in said
    assert "Traceback" not in said


def test_a_full_disk_ends_the_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, told = run_prompts(tmp_path, "a", "full", "b", "c")
    assert told == [tmp_path / "a-seed0.png"]
    assert [outcome.failure is None for outcome in result.outcomes] == [True, False]
    assert (result.disk_is_full, result.num_items, result.exit_code) == (True, 4, 5)
    said = capsys.readouterr().err
    assert "error: [2/4] full, seed 0: no room; 2 of 4 were not begun: make room, and --resume goes on" in said


def test_an_item_that_cannot_be_made_is_not_tried(tmp_path: Path) -> None:
    items = [
        Item(GenerationRequest(prompt="a", num_frames=1), Failure.of(OutputError("not possible"))),
        Item(GenerationRequest(prompt="b", num_frames=1)),
    ]
    result = run_batch(items, make, Outputs(tmp_path), Terminal(), None)
    assert result.exit_code == 5
    assert [path.name for path in tmp_path.glob("*.png")] == ["b-seed0.png"]


def test_a_taken_name_is_numbered_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = [Item(GenerationRequest(prompt="a", num_frames=1, seed=seed)) for seed in (1, 2)]
    outputs = Outputs.parse(str(tmp_path / "x.png"), None)
    result = run_batch(items, make, outputs, Terminal(), None)
    assert [outcome.path for outcome in result.outcomes] == [tmp_path / "x.png", tmp_path / "x-2.png"]
    assert "x.png exists already; this one is x-2.png" in capsys.readouterr().err


@pytest.mark.parametrize("output_path", ["x.gif", ""])
def test_a_name_whose_sidecar_is_taken_is_numbered_and_said(
    output_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All formats of a name share one sidecar."""
    stem = "x" if output_path else "a-seed0"
    for name in (f"{stem}.png", f"{stem}.json"):
        (tmp_path / name).touch()
    outputs = Outputs.parse(f"{tmp_path}/{output_path}", "gif")
    request = GenerationRequest(prompt="a", num_frames=1, seed=0)
    said = f"{stem}.json, the sidecar of {stem}.png, exists already, and {stem}.gif would share it"
    (planned,) = outputs.predict([request])
    assert said in (outputs.explain_number(request, planned) or "")
    (outcome,) = run_batch([Item(request)], make, outputs, Terminal(), None).outcomes
    assert outcome.path == planned == tmp_path / f"{stem}-2.gif"
    assert f"{said}; this one is {stem}-2.gif" in capsys.readouterr().err


class TorchStyle:
    class OutOfMemoryError(RuntimeError):
        """Named as torch names its own."""


@pytest.mark.parametrize(
    ("error", "kind", "exit_code", "said"),
    [
        (BackendUnavailableError("no fa here"), "BackendUnavailableError", 3, "no fa here"),
        (ModelLoadError("cut off"), "ModelLoadError", 1, "cut off"),
        (MemoryError(), "DeviceMemoryError", 4, "--preset draft"),
        (TorchStyle.OutOfMemoryError("CUDA out of memory\nlong"), "DeviceMemoryError", 4, "CUDA out of memory;"),
        (ValueError("first\nsecond"), "ValueError", 1, "unexpected ValueError: first; run again"),
        (ZeroDivisionError(), "ZeroDivisionError", 1, "no message"),
    ],
)
def test_every_error_has_a_message_a_kind_and_a_code(error: Exception, kind: str, exit_code: int, said: str) -> None:
    failure = Failure.of(error)
    assert (failure.kind, failure.exit_code) == (kind, exit_code)
    assert said in failure.message
    assert "\n" not in failure.message


def test_a_title_is_short() -> None:
    request = GenerationRequest(prompt="a\n very " + "long " * 30 + "prompt", seed=3)
    title = title_of(request, 2, 4)
    assert title.startswith("[2/4] a very long long")
    assert title.endswith("…, seed 3")
    assert len(title) < 70
