"""Seconds per stage that are expected of a generation: the curve through measured sizes, the figures that are kept, and
what the commands say of them."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from cli_support import Command
from PIL import Image
from tables import table

from diffusion_runtime.cli.config_file import read_config
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.explanation.expected_time import Point, expected_time, fitted, powers
from diffusion_runtime.explanation.stage_times import Measured, StageTimes, Work, how_of, options_of, works_of
from diffusion_runtime.loading import prepare
from diffusion_runtime.request.generation_request import GenerationRequest


def of_size(size: float, value: float) -> Point:
    return Point(powers(size), value)


def quadratic(size: float) -> float:
    return 0.5 + 2e-3 * size + 3e-6 * size**2


@table(
    "points, at, expected",
    [
        ([], 100, None),
        ([(100, 2.0)], 100, 2.0),
        # The median of what was measured there, whatever is around it.
        ([(100, 2.0), (100, 9.0), (100, 3.0), (50, 1.0), (200, 4.0)], 100, 3.0),
        # Beyond the sizes that were measured nothing is said.
        ([(100, 2.0)], 120, None),
        ([(100, 2.0), (200, 3.0)], 99, None),
        ([(100, 2.0), (200, 3.0)], 201, None),
        ([(100, 2.0), (200, 3.0)], 150, 2.5),
        ([(size, quadratic(size)) for size in (100, 400, 1600)], 800, quadratic(800)),
        ([(size, quadratic(size)) for size in (100, 400, 700, 1600)], 200, quadratic(200)),
        # A term that would be negative is left out: these grow slower than their size, and never fall.
        ([(100, 1.0), (400, 1.0), (800, 1.0)], 600, 1.0),
        ([(100, 0.0), (400, 0.0), (800, 0.0)], 600, 0.0),
    ],
)
def test_fit(points: list[tuple[float, float]], at: float, expected: float | None) -> None:
    found = fitted([of_size(*point) for point in points], powers(at))
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-6, abs=1e-9))


def test_noise_between_sizes_stays_below_the_quadratic_term() -> None:
    """Relative errors count: the smallest size, a thousandth of the largest, is met as well."""
    points = [
        of_size(size, quadratic(size) * factor)
        for size, factor in ((64, 1.05), (512, 0.97), (4096, 1.03), (16384, 0.98))
    ]
    for at in (100, 1000, 8000):
        assert fitted(points, powers(at)) == pytest.approx(quadratic(at), rel=0.1)


def test_figures_hold_for_equal_settings_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DIFFUSION_RUNTIME_CACHE", str(tmp_path))
    prepared = prepare(RuntimeConfig("shapes", device="cpu"), is_dry_run=True)
    recipe, rules = prepared.description.to_dict(), prepared.rules
    asked = GenerationRequest("a ring", height=64, width=64, num_frames=5, num_inference_steps=10)
    request = rules.resolve(asked)
    times = StageTimes(recipe, "shapes")
    how = how_of(recipe, rules, request, is_offloaded=False)
    cold = {"text": 0.5, "denoise": 3.0, "decode": 2.0, "write": 1.0}
    warm = {"text": 0.25, "denoise": 2.0, "decode": 1.0, "write": 0.5}
    work = Work(1, 32, 32**2)
    steps = Work(4, 4 * 32, 4 * 32**2)
    measured = Measured(how, (5, 64, 64), steps, work, 4, "mp4", cold, warm, 0.375)
    assert times.keep(dataclasses.replace(measured, warm=cold))
    assert times.keep(measured)
    assert times.read() == (measured,)
    first = expected_time(recipe, rules, request, "mp4")
    # Ten steps of three eighths of a second, and what the first generation took for more than its four.
    assert dict(first.seconds) == {"text": 0.5, "denoise": 5.25, "decode": 2.0, "write": 1.0}
    assert first.total == 8.75
    # Of a draft of which four steps are there.
    rest = expected_time(recipe, rules, request, "mp4", num_done=4)
    assert (rest.num_steps, rest.seconds["denoise"]) == (6, 3.75)
    work = Work(1, 48, 48**2)
    one_step = dataclasses.replace(measured, size=(9, 64, 64), step_work=work, once_work=work, num_steps=1, step=None)
    assert times.keep(one_step)
    longer = rules.resolve(dataclasses.replace(asked, num_frames=9))
    assert expected_time(recipe, rules, longer, "mp4").seconds["denoise"] == 10 * 2.0 + 1.0
    later = expected_time(recipe, rules, request, "gif", is_first=False)
    assert dict(later.seconds) == {"text": 0.25, "denoise": 4.25, "decode": 1.0}
    assert later.total is None
    assert "bench generate shapes --height 64 --width 64 --num-frames 5" in later.advice
    for changed in (
        dataclasses.replace(asked, step_cache="easycache"),
        dataclasses.replace(asked, guidance_scale=1.0),
        dataclasses.replace(asked, sampler="euler"),
    ):
        assert expected_time(recipe, rules, rules.resolve(changed), "mp4").seconds == {}, changed
    assert expected_time(recipe, rules, request, "mp4", is_offloaded=True).seconds == {}
    other = {**recipe, "made_with": {**recipe["made_with"], "torch": "1.0"}}
    assert StageTimes(other, "shapes").path != times.path
    values = json.loads(times.path.read_text())
    values["measured"][0]["warm"]["denoise"] = "fast"
    times.path.write_text(json.dumps(values))
    assert times.read() == ()
    assert "cannot be read" in caplog.text
    monkeypatch.setenv("DIFFUSION_RUNTIME_CACHE", os.devnull)
    assert not StageTimes(recipe, "shapes").keep(measured)


def test_a_chunked_video_is_counted_by_its_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds that are made of passes, tokens and pairs are found again: of another number of chunks, whose keys in
    sight grow until the window is full, and of another number of steps, which the first chunk does not have."""
    monkeypatch.setenv("DIFFUSION_RUNTIME_CACHE", str(tmp_path))
    prepared = prepare(RuntimeConfig("shapes-causal", device="cpu"), is_dry_run=True)
    recipe, rules = prepared.description.to_dict(), prepared.rules

    def request(frames: int, side: int, steps: int) -> GenerationRequest:
        asked = GenerationRequest("a ring", height=side, width=side, num_frames=frames, num_inference_steps=steps)
        return rules.resolve(asked)

    def seconds(work: Work) -> float:
        return 0.01 * work.passes + 1e-4 * work.tokens + 1e-7 * work.pairs

    times = StageTimes(recipe, "shapes-causal")
    for size in ((9, 64, 64), (61, 96, 96), (21, 144, 144), (121, 64, 64)):
        asked = request(*size[:2], 4)
        steps, once = works_of(rules, asked)
        warm = {"text": 0.1, "denoise": seconds(steps) + seconds(once), "decode": 1.0, "write": 1.0}
        how = how_of(recipe, rules, asked, is_offloaded=False)
        assert times.keep(Measured(how, size, steps, once, 4, "mp4", warm, warm, seconds(steps) / 4))
    for frames, side, num_steps in ((33, 80, 4), (61, 80, 8), (21, 112, 6), (61, 96, 4)):
        asked = request(frames, side, num_steps)
        steps, once = works_of(rules, asked)
        expected = expected_time(recipe, rules, asked, "mp4")
        assert expected.seconds["denoise"] == pytest.approx(seconds(steps) + seconds(once)), (frames, side)
    # The first chunk has as many steps as before; a step more of the others is one pass of each.
    four, five = (works_of(rules, request(21, 64, steps))[0].passes for steps in (4, 5))
    assert five - four == 2
    assert "denoise" not in expected_time(recipe, rules, request(21, 160, 4), "mp4").seconds


def test_commands_say_what_is_expected(
    command: Command, tiny_flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFUSION_RUNTIME_CACHE", str(tmp_path))
    generate = ("generate", "a ring", *tiny_flags, "-o", "a.npy")
    before = command(*generate, "--dry-run")
    assert "not measured on this machine" in before.said
    assert "bench generate" in before.said
    size = tiny_flags[2:]
    monkeypatch.setattr("diffusion_runtime.benchmark.generation._file_format", lambda _: "npy")
    assert command("bench", "generate", tiny_flags[1], *size, "--no-diffusers", "--repeats", "1").code == 0
    planned = command(*generate, "--dry-run", "--json").json["items"][0]["expected_time"]
    assert sorted(planned["seconds"]) == ["decode", "denoise", "text", "write"]
    assert planned["advice"] == ""
    explained = command("explain", *tiny_flags, "--json").json["expected_time"]
    assert explained["seconds_per_step"] == planned["seconds_per_step"]
    done = command(*generate, "--json")
    assert done.json["items"][0]["expected_timings"] == planned["seconds"]
    assert "expected from figures of this machine: " in done.said


@table(
    "values",
    [
        {"num_frames": 85, "context_frames": 29, "prompt_switches": [("2s", "a blue star"), (49, "a 'red' ring")]},
        {"num_frames": 5, "init_path": "first.png", "strength": 0.5},
    ],
)
def test_the_benchmark_of_an_advice_is_of_the_same_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    """`how_of` depends on all that --set tells it, files and prompts of later times included."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 64)).save("first.png")
    prepared = prepare(RuntimeConfig("shapes", device="cpu"), is_dry_run=True)
    recipe, rules = prepared.description.to_dict(), prepared.rules
    size = {"height": 64, "width": 64, "num_frames": values["num_frames"]}
    request = rules.resolve(GenerationRequest("a ring", **(size | values)))
    again = rules.resolve(
        GenerationRequest("a ring", **size, **read_config(None, options_of(recipe, rules, request)).settings)
    )
    assert again.prompt_switches == request.prompt_switches
    assert how_of(recipe, rules, again, is_offloaded=False) == how_of(recipe, rules, request, is_offloaded=False)
