"""`tune` over everything, on a tiny random model: the file beside generations of its own, SIGKILL, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import Command

from diffusion_runtime import GenerationRequest, RuntimeConfig, load_pipeline
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.profiling.instruments import watched_latents
from diffusion_runtime.tuning import fastest
from diffusion_runtime.tuning.axes import AXES
from diffusion_runtime.tuning.clip_metrics import TunedPrompt
from diffusion_runtime.tuning.combination import Combination
from diffusion_runtime.tuning.trials import Trials
from diffusion_runtime.untrusted.yaml_text import read_yaml_file

SIZE = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 12}
PROMPTS = ("a red circle", "a blue star")


def words(folder: Path, *more: str) -> tuple[str, ...]:
    size = [word for name, value in SIZE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    return ("tune", "--model-path", str(folder), "--device", "cpu", *prompts, *size, *more)


def latents_of(pipeline: Pipeline, request: GenerationRequest) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    with watched_latents(pipeline, lambda _, latents: kept.append(latents.clone())):
        pipeline(request)
    return kept[-1]


def test_the_file_holds_a_setting_within_the_budget(
    command: Command, tiny_wan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Any time is saved on a machine that others use, as far as a test can know.
    monkeypatch.setattr(fastest, "SAVES_FROM", 1e9)
    monkeypatch.setattr(fastest.FastestSearch, "_is_faster", lambda *_: True)
    path = tmp_path / "fast.yaml"
    made = command(
        *words(tiny_wan_folder, "--budget", "latent<=0.5", "--over", "steps,step-cache,decoder,attention"),
        *("-o", str(path), "--json"),
    )
    assert made.code == 0, made.err
    # Before any weight is read: the minutes, the candidates, the clips.
    [said] = [line for line in made.err.splitlines() if line.startswith("tune: ")]
    assert "at most 20 min (--minutes) for " in said
    assert " candidates (" in said
    assert "a clip as given takes " in made.err
    assert "left out: teacache: " in made.err
    content: Any = read_yaml_file(path)
    record = content["tuning"]
    assert made.json["tuning"] == json.loads(json.dumps(record))
    assert record["budget_met"]
    assert list(tmp_path.iterdir()) == [path]
    # The figures are those of generations with the written file.
    setting = load_pipeline(RuntimeConfig.from_dict({**content["runtime"], "device": "cpu"}))
    given = load_pipeline(str(tiny_wan_folder), device="cpu")
    assert isinstance(setting, Pipeline)
    assert isinstance(given, Pipeline)
    mine = latents_of(setting, GenerationRequest(PROMPTS[1], seed=0, **content["request"]))
    its = latents_of(given, GenerationRequest(PROMPTS[1], seed=0, **SIZE))  # type: ignore[arg-type]
    found = float((mine - its).norm() / its.norm())
    assert 0 < found <= 0.5
    assert record["verified"]["setting"]["latent"] == pytest.approx(found, rel=1e-3)
    # Its parts were measured alone, and it is beside as many plain steps, where those are fewer.
    assert {each["axis"] for each in record["measured"]["alone"]} <= {axis.name for axis in AXES}
    planned = command("generate", "a red circle", "--config", path, "--device", "cpu", "--dry-run", "--json")
    assert planned.code == 0, planned.err


def test_nothing_within_the_budget_writes_what_was_given(
    command: Command, tiny_wan_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "fast.yaml"
    made = command(*words(tiny_wan_folder, "--budget", "latent<=0.0000001", "--over", "steps", "-o", str(path)))
    assert made.code == 6, made.err
    assert "nothing faster is within the budget; the file holds the setting as given" in made.said
    assert read_yaml_file(path)["request"]["num_inference_steps"] == 12
    assert max(map(len, made.err.splitlines()[-8:])) <= 240


def test_a_killed_search_goes_on_and_measures_nothing_again(
    command: Command, tiny_wan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fast.yaml"
    flags = words(tiny_wan_folder, "--budget", "latent<=0.5", "--over", "steps,guidance", "-o", str(path))
    journal = tmp_path / ".fast.yaml.journal.json"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-m", "diffusion_runtime", *flags], env=environment, stderr=subprocess.PIPE
    )
    try:
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            if journal.exists() and len(json.loads(journal.read_text())["values"]) >= 2:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()
    before = json.loads(journal.read_text())["values"]
    assert not path.exists()
    measured: list[str] = []
    row = Trials._row

    def seen(self: Trials, combination: Combination, prompt: TunedPrompt) -> dict[str, Any]:
        measured.append(self._name(combination, prompt))
        return row(self, combination, prompt)

    monkeypatch.setattr(Trials, "_row", seen)
    made = command(*flags, "--json")
    assert made.code in (0, 6), made.err
    assert f"going on with {len(before)} measurements of {journal}" in made.said
    assert list(tmp_path.iterdir()) == [path]
    assert measured
    assert not set(measured) & set(before)
