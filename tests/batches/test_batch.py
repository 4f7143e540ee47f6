"""`batch` as users run it: nothing is made twice whenever a process is killed, and a wrong row stops it before it
begins."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_support import Result, command_process, process_environment
from sample_media import make_media
from tables import table

from diffusion_runtime.cli import app as cli

SMALL = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 2}
SECONDS = 120.0


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: Path, *words: str, input_text: str = "") -> Result:
    return command_process("batch", *words, cwd=folder, input_text=input_text)


def manifest(folder: Path) -> list[dict[str, Any]]:
    path = folder / "out" / "manifest.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def results(folder: Path) -> dict[str, str]:
    files = [path for path in (folder / "out").iterdir() if path.suffix in (".png", ".mp4")]
    return {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Call it with a folder and words: exit code and standard error of `batch` in this process."""
    # The command tunes the allocator of its process unless the user did.
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "134217728")

    def run_here(folder: Path, *words: str) -> tuple[int, str]:
        with contextlib.chdir(folder):
            code = cli.run(["batch", *words])
        return code, capsys.readouterr().err

    return run_here


def test_a_batch_that_is_killed_goes_on_and_makes_nothing_twice(
    here: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [{"id": f"r{at}", **SMALL, "num_frames": 1 + 4 * (at % 2)} for at in range(8)]
    write(tmp_path, [*rows, {"id": "bad", **SMALL, "size": "64x63"}])
    words = ("-m", "diffusion_runtime", "batch", "rows.jsonl", "-o", "out", "--max-batch-size", "2")
    process = subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=process_environment())
    deadline = time.monotonic() + SECONDS
    while len(manifest(tmp_path)) < 3 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(SECONDS)
    # Another kill: between a file and its line, and in the middle of a line.
    path = tmp_path / "out" / "manifest.jsonl"
    *kept, last = path.read_text().split("\n")[:-1]
    path.write_text("".join(f"{line}\n" for line in kept) + last[:50])
    lost = tmp_path / "out" / json.loads(last)["path"]
    before = lost.stat().st_mtime_ns

    done = run(tmp_path, "rows.jsonl", "-o", "out", "--resume", "--json")
    assert done.code == 5, done.err
    assert "1 rows failed, the first: rows.jsonl:9: " in done.said
    assert done.json["made"] + done.json["made_before"] == 8
    assert done.json["made_before"] >= len(kept) + 1
    assert lost.stat().st_mtime_ns == before
    found = manifest(tmp_path)
    assert sorted(line["id"] for line in found) == sorted(row["id"] for row in rows)
    assert results(tmp_path) == {line["id"]: line["sha256"] for line in found}
    assert {line["attention_report"]["num_calls"] for line in found} == {20}
    (failure,) = map(json.loads, (tmp_path / "out" / "failures.jsonl").read_text().splitlines())
    assert (failure["id"], failure["row"], failure["kind"]) == ("bad", 9, "RequestError")
    assert not list((tmp_path / "out").glob(".*.partial"))

    # What is in the manifest needs no engine; a row that was edited is made again.
    write(tmp_path, rows)
    assert here(tmp_path, "rows.jsonl", "-o", "out", "--resume")[0] == 0
    assert "holds a batch already: --resume goes on" in " ".join(here(tmp_path, "rows.jsonl", "-o", "out")[1].split())
    content = base64.b64encode(make_media(1, 8, 8).to_bytes("png")).decode()
    write(tmp_path, [*rows[:-1], {**rows[-1], "seed": 9}])
    lines = "".join(json.dumps(row) + "\n" for row in [*rows[:-1], {**rows[-1], "seed": 9}])
    unread = json.dumps({"id": "image", **SMALL, "image": f"data:image/png;base64,{content}"})
    done = run(tmp_path, "-", "-o", "out", "--resume", "--json", input_text=f"{lines}{lines[:60]}\n{unread}\n")
    assert (done.code, done.json["made"], done.json["made_before"], done.json["failed"]) == (5, 1, 7, 2), done.err
    kinds = [json.loads(line) for line in (tmp_path / "out" / "failures.jsonl").read_text().splitlines()]
    assert "standard input:9: not valid JSON" in kinds[0]["error"]
    assert "image" in kinds[1]["error"], "the embedded model takes no image"
    assert os.listdir(tmp_path / "out").count("image.png") == 0


@table(
    "second, words, message",
    [
        ({"id": "a"}, (), "rows.jsonl:2: id 'a' is an earlier row's"),
        ({"id": "A"}, (), "rows.jsonl:2: id 'A' is an earlier row's"),
        ({"hight": 1}, (), "rows.jsonl:2: unknown field 'hight'"),
        ({"size": "64x63"}, (), "rows.jsonl:1: height: expected"),
        ({}, ("--replicas", "2"), "--replicas: needs --ray"),
        ({}, ("--ray", "local", "--replicas", "3..2"), "--replicas: expected N or MIN..MAX"),
        ({}, ("--ray", "local", "--max-batch-size", "0"), "--max-batch-size: expected 1 or more"),
    ],
)
def test_rows_that_cannot_be_made_stop_it_before_anything_is(
    here: Callable[..., tuple[int, str]], tmp_path: Path, second: dict[str, Any], words: tuple[str, ...], message: str
) -> None:
    first = {"id": "a", **SMALL, **({"size": "64x63"} if second.get("size") else {})}
    write(tmp_path, [first, {"id": "b", **SMALL, **second}])
    code, err = here(tmp_path, "rows.jsonl", "-o", "out", *words)
    assert (code, message in " ".join(err.split())) == (2, True), err
    assert not (tmp_path / "out").exists() or manifest(tmp_path) == []


def test_a_dry_run_says_what_cannot_run_and_writes_nothing(tmp_path: Path) -> None:
    write(tmp_path, [{"id": "a", **SMALL}, {"id": "b", **SMALL, "seed": 3}, {"id": "c", **SMALL, "size": "64x63"}])
    done = run(tmp_path, "rows.jsonl", "-o", "out", "--dry-run")
    assert "rows.jsonl:3: cannot be made: " in done.said
    assert "3 rows of 2 settings, of which 1 cannot run, into out: nothing was made" in done.said
    assert done.code == 5
    assert os.listdir(tmp_path) == ["rows.jsonl"]
