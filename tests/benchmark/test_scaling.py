"""Plans of several GPUs: what is run, what becomes of rows that fail, and what the model of a step says."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import scaling_gpu, scaling_processes, scaling_rows
from benchmarks.scaling_gpu import shown, teams
from benchmarks.scaling_model import Degrees, fit, measured_rows, models, predict, programs
from benchmarks.scaling_rows import Row, plan, predicted

ROOT = Path(__file__).parents[2]
MOST_OFF = 0.1


def test_every_committed_measurement_of_two_gpus_is_predicted() -> None:
    constants = fit()
    off = {name: made / measured - 1 for name, _, measured, made, _ in measured_rows(constants)}
    assert len(off) == 13
    others = [(each.name, each.predicted, each.measured) for each in programs(2)]
    off |= {name: made / measured - 1 for name, made, measured in others if measured is not None}
    assert len(off) == 13 + len(others)
    wrong = {name: f"{share:+.1%}" for name, share in off.items() if abs(share) > MOST_OFF}
    assert not wrong, "correct benchmarks/scaling_model.py"


def test_the_page_has_the_tables() -> None:
    script: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "write_scaling_tables.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert script["with_tables"](page) == page, "python scripts/write_scaling_tables.py"


def test_a_model_of_one_gpu_is_its_measurement() -> None:
    constants = fit()
    for model in models().values():
        for quantization, milliseconds in model.milliseconds.items():
            made = predict(model, Degrees(), constants, quantization=quantization)
            assert made.total == pytest.approx(milliseconds), model.name
            assert made.exchanges == 0


def test_heads_that_do_not_divide_wait_for_who_has_most() -> None:
    constants, wan = fit(), models()["wan2.1-1.3b"]
    whole = predict(wan, Degrees(), constants).attention
    assert predict(wan, Degrees(ulysses=8), constants).attention == pytest.approx(whole * 2 / 12)
    assert predict(wan, Degrees(ulysses=4, ring=2), constants).attention == pytest.approx(whole / 8)


@pytest.mark.parametrize("num", [2, 4, 8])
def test_a_plan(num: int) -> None:
    rows, constants = plan(num), fit()
    assert len({row.name for row in rows}) == len(rows)
    alone = set()
    for row in rows:
        if row.kind == "step":
            assert row.degrees.num_processes in (1, num), row.name
            if row.degrees.num_processes == 1:
                alone.add(row.alone)
            # A speed-up is over what ran before it.
            assert row.alone in alone, row.name
        assert row.name in shown({"name": row.name, **predicted(row, constants)})
    bars = [index for index, row in enumerate(rows) if row.bar is not None]
    assert all(index < len(rows) / 2 for index in bars)
    assert num == 2 or {"step", "clip", "stream", "program"} == {row.kind for row in rows}
    assert [row for team in teams(rows) for row in team] == rows
    assert all(len(team) == 1 for team in teams(rows) if team[0].kind == "program")


class _ScriptedTeam:
    """Ranks that end as `script` says: by row, a reason to fail, or none. Rows without an entry have a figure."""

    script: ClassVar[dict[str, str]] = {}
    wrong: ClassVar[set[str]] = set()
    begins = True
    teams: ClassVar[list[list[str]]] = []

    def __init__(self, rows: Sequence[Row], _: object) -> None:
        self.teams.append([row.name for row in rows])
        self.has_begun = False

    def result_of(self, row: Row, seconds: float) -> dict[str, Any]:
        assert seconds > 0
        self.has_begun = self.begins
        if row.name in self.script:
            raise scaling_processes.Failed(self.script[row.name])
        return {"ms": 1.0, **({"reason": "WRONG: ..."} if row.name in self.wrong else {})}

    def end(self, seconds: float = 0.0) -> None: ...


def _run(
    rows: list[Row], path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = 100.0, **script: Any
) -> list[dict[str, Any]]:
    for name, value in {"script": {}, "begins": True, "teams": [], **script}.items():
        monkeypatch.setattr(_ScriptedTeam, name, value)
    monkeypatch.setattr(scaling_gpu, "Team", _ScriptedTeam)
    arguments = argparse.Namespace(seconds=seconds, row_factor=1.0, small=True)
    document = scaling_gpu._Document(path, {"rows": []}, fit(), True)
    scaling_gpu.run_all(rows, arguments, document)
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found


def _rows(*names: str) -> list[Row]:
    return [Row(name, "step", 2, model="wan2.1-1.3b", size="480p") for name in names]


def test_a_row_that_fails_is_kept_and_the_next_begins_with_fresh_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _run(_rows("a", "b", "c"), tmp_path / "x.json", monkeypatch, script={"b": "out of memory"})
    assert [row.get("reason") for row in found] == [None, "out of memory", None]
    assert _ScriptedTeam.teams == [["a", "b", "c"], ["c"]]


def test_rows_that_are_wrong_end_the_run_with_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    monkeypatch.setattr(sys, "argv", ["x", "--plan", "two", "--device", "cpu", "--small", "--output", str(path)])
    monkeypatch.setattr(scaling_gpu, "plan", lambda _: _rows("a", "b", "c"))
    monkeypatch.setattr(scaling_gpu, "Team", _ScriptedTeam)
    monkeypatch.setattr(_ScriptedTeam, "script", {"c": "out of memory"})
    monkeypatch.setattr(_ScriptedTeam, "wrong", {"b"})
    with pytest.raises(SystemExit, match=r"than one GPU is: b$"):
        scaling_gpu.main()
    assert len(json.loads(path.read_text())["rows"]) == 3


def test_ranks_that_do_not_begin_are_started_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _run(_rows("a", "b", "c"), tmp_path / "x.json", monkeypatch, script={"a": "no module"}, begins=False)
    assert len(_ScriptedTeam.teams) == 2
    assert found[0]["reason"] == "no module"
    assert ["did not begin" in row["reason"] for row in found] == [False, True, True]


def test_what_no_time_was_left_for_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _run(_rows("a", "b"), tmp_path / "x.json", monkeypatch, seconds=0.0)
    assert [row["reason"] for row in found] == ["left out: no time was left"] * 2


def test_a_program_that_fails_says_why() -> None:
    row = Row("x", "program", 2, arguments=("json.tool", "/nowhere/at/all"))
    found = scaling_processes.run_program(row, 60.0, argparse.Namespace(small=False))
    assert "/nowhere/at/all" in found["reason"]
    row = Row("x", "program", 2, arguments=("http.server", "0"))
    assert "took more than 1 s" in scaling_processes.run_program(row, 1.0, argparse.Namespace(small=False))["reason"]


def _on_two_processes(program: str, *arguments: str) -> list[str]:
    """Run a program in two processes; the standard output of each."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # Files: a rank that waits for its pipe to be read keeps the other from ending.
    outputs = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=output,
        )
        for rank, output in enumerate(outputs)
    ]
    assert [process.wait(300) for process in ranks] == [0, 0]
    said = []
    for output in outputs:
        with output:
            output.seek(0)
            said.append(output.read())
    return said


PIPELINE = """
import json
from benchmarks.scaling_rows import SMALL, SMALL_DECODERS
from diffusion_runtime import GenerationRequest, join_processes
from diffusion_runtime.benchmark.random_pipeline import random_pipeline
from diffusion_runtime.config import RuntimeConfig

changes = {"transformer/config.json": SMALL["wan2.1-1.3b"], **SMALL_DECODERS["wan2.1-1.3b"]}
request = GenerationRequest("x", seed=1, height=64, width=96, num_frames=5, num_inference_steps=2)
config = RuntimeConfig(device="cpu", dtype="float32")
with join_processes() as world:
    together = random_pipeline("wan2.1-1.3b", config, lambda _: None, changes, world)(request)
    print(json.dumps([together.frames.tolist(), [row.implementation for row in together.attention_report.libraries]]))
"""


def test_a_random_pipeline_on_two_processes_is_that_of_one() -> None:
    import numpy

    from diffusion_runtime import GenerationRequest
    from diffusion_runtime.benchmark.random_pipeline import random_pipeline
    from diffusion_runtime.config import RuntimeConfig

    changes = {
        "transformer/config.json": scaling_rows.SMALL["wan2.1-1.3b"],
        **scaling_rows.SMALL_DECODERS["wan2.1-1.3b"],
    }
    alone = random_pipeline("wan2.1-1.3b", RuntimeConfig(device="cpu", dtype="float32"), lambda _: None, changes)(
        GenerationRequest("x", seed=1, height=64, width=96, num_frames=5, num_inference_steps=2)
    )
    for said in _on_two_processes(PIPELINE):
        frames, libraries = json.loads(said.splitlines()[-1])
        difference = numpy.abs(numpy.asarray(frames, dtype=int) - alone.frames.astype(int))
        # Rounded otherwise, at most by one of 255.
        assert difference.max() <= 1
        assert difference.mean() < 0.01
        assert any("bands of rows on 2 processes" in text for text in libraries)
