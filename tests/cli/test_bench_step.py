"""`bench step`: the table, one JSON object, files, and what is refused before anything is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import Command
from tables import table

from diffusion_runtime.benchmark.device_time import TimeShares
from diffusion_runtime.benchmark.step_result import StepBenchmark, StepRow
from diffusion_runtime.cli.bench_step import show

# The smallest clip of the embedded model, as few samples as there can be.
QUICK = ("bench", "step", "--device", "cpu", "--height", "64", "--width", "64", "--num-frames", "1", "--repeats", "1")


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_the_table_of_a_part(command: Command) -> None:
    shown = command(*QUICK, "--layers", "3")
    assert shown.code == 0
    assert "shapes, 1 frame of 64 x 64, 16 tokens, batch 1, 3 of 6 blocks" in shown.out
    row = next(line.split() for line in shown.out.splitlines() if line.startswith("ours, eager "))
    milliseconds, attention, linear, rest = map(float, row[2:6])
    assert milliseconds == pytest.approx(attention + linear + rest, rel=0.03)
    assert "\ndiffusers, eager " in shown.out
    assert "attention by torch_sdpa: ours, eager\n" in shown.out
    assert "These figures are of 3 of 6 blocks." in shown.out
    # The rows under way, and nothing of a model that is only described.
    assert shown.err.splitlines() == ["building ours, eager", "ours, eager", "building diffusers'", "diffusers, eager"]
    assert max(map(len, shown.out.splitlines())) <= 80


def test_figures_stand_point_below_point_in_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    shares = TimeShares(307.3, 82.2, 30.3, ())
    modes = (
        StepRow("diffusers, compile", "measured", samples=(621.06,), host_ms=6.31, shares=shares, detail="fa"),
        StepRow("ours, fp8", "measured", samples=(41.3,), host_ms=5.27, difference=0.07, detail="fa, 8-bit products"),
        StepRow("ours, compile", "failed", "RuntimeError: no compiler"),
    )
    show(StepBenchmark("a model", "a device", {}, "bfloat16", 30, 30, 2e14, 8192, modes))
    lines = capsys.readouterr().out.splitlines()
    rows = [next(line for line in lines if line.startswith(mode.name)) for mode in modes]
    assert [row.index(".") for row in rows[:2]] == [rows[0].index("621.1") + 3] * 2
    assert [len(row) for row in rows] == [len(rows[0])] * 3
    assert len(rows[0]) <= 80
    # All times share their decimals, across columns too.
    assert " 6.3 " in rows[0]
    assert " 5.3 " in rows[1]
    assert "ours, compile: failed: RuntimeError: no compiler" in lines


def test_one_object_and_files(command: Command, tmp_path: Path) -> None:
    path, picture = tmp_path / "new" / "step.json", tmp_path / "step.png"
    shown = command(*QUICK, "--no-diffusers", "--json", "--quiet", "-o", path, "--plot", picture)
    assert (shown.code, shown.err) == (0, "")
    result = json.loads(shown.out)
    assert result == json.loads(path.read_text())
    assert result["schema"] == "diffusion_runtime.bench_step/1"
    assert [row["name"] for row in result["rows"]] == ["ours, eager"]
    assert result["rows"][0]["whole_milliseconds"] == result["rows"][0]["milliseconds"]
    assert picture.read_bytes().startswith(b"\x89PNG")


REFUSALS = {
    "an unknown model": (("flux.1-def",), "neither a folder nor a published model. Did you mean 'flux.1-dev'"),
    "the beginning of a model": (("moss",), "Did you mean 'moss-image-base' or 'moss-image-sft'? Expected a name that"),
    "nothing like a model": (("none",), "nor a published model. Expected a name that `diffusion-runtime models` lists"),
    "a size between": (("--height", "65"), "height: expected a multiple of 16, got 65"),
    "an unknown mode": (("--mode", "eager,quick"), "--mode: expected some of eager,graphs,fp8"),
    "graphs without a GPU": (
        ("--mode", "graphs"),
        "replayed from a CUDA graph here: needs a CUDA or ROCm GPU, got cpu",
    ),
    "too many layers": (("--layers", "7"), "--layers: expected 1 to 6 for this model, got 7"),
    "a plot that is none": (("--plot", "step.txt"), "--plot: expected a file that ends in"),
}


@table(("flags", "said"), REFUSALS.values(), REFUSALS)
def test_what_is_refused(flags: tuple[str, ...], said: str, command: Command) -> None:
    shown = command(*QUICK, *flags)
    assert shown.code == 2
    assert said in " ".join(shown.err.split())
    assert shown.out == ""
