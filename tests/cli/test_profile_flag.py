"""`generate --profile`: one trace of the first request, what is said about it, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from cli_support import Command
from tables import table


def names(path: Path, category: str) -> list[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == category]


def test_the_first_of_two_requests(command: Command, tiny_flags: tuple[str, ...], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    made = command("generate", "a star", *tiny_flags, "--seed", "1-2", "-o", tmp_path / "x", "--profile", trace)
    assert made.code == 0
    assert "profile: of the first of 2 requests alone" in made.said
    assert f"wrote {trace}" in made.said
    assert "operators and kernels of step 1 of 2, counted from 0" in made.said
    assert names(trace, "stages") == ["text", "denoise", "decode", "write"]
    assert names(trace, "steps") == ["step 0", "step 1"]
    assert any(name.startswith("attention self, layer 0") for name in names(trace, "user_annotation"))
    assert str(trace) not in made.out


def test_a_passthrough_has_stages_and_steps(command: Command, tiny_flags: tuple[str, ...], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    flags = ("--backend", "diffusers", "--json", "--profile", trace)
    made = command("generate", "a star", *tiny_flags, *flags)
    assert made.code == 0
    assert "stages and steps have names, guidance branches and attention none" in made.said
    assert made.json["num_items"] == 1
    assert names(trace, "stages") == ["text", "denoise", "decode", "write"]
    assert names(trace, "steps") == ["step 0", "step 1"]
    assert names(trace, "user_annotation") == ["step 1"]
    # One after the other, although the pipeline tells of the end of its steps when it has decoded.
    found = [each for each in json.loads(trace.read_text())["traceEvents"] if each.get("cat") == "stages"]
    for before, after in pairwise(found):
        assert before["ts"] + before["dur"] <= after["ts"] + 1


REFUSALS = {
    "a dry run": (("--profile", "t.json", "--dry-run"), 2, "leave out --dry-run or --profile"),
    "another extension": (("--profile", "t.txt"), 2, "--profile: expected a file that ends in .json, got t.txt"),
    "a folder that is not there": (("--profile", "no/t.json"), 1, "--profile: there is no folder no; make it"),
}


@table(("flags", "code", "said"), REFUSALS.values(), REFUSALS)
def test_what_is_refused(
    flags: tuple[str, ...], code: int, said: str, command: Command, tiny_flags: tuple[str, ...]
) -> None:
    refused = command("generate", "a star", *tiny_flags, *flags)
    assert refused.code == code
    assert said in refused.said
    assert "loading" not in refused.said
    assert refused.out == ""


def test_a_request_that_fails_leaves_no_trace(command: Command, tiny_flags: tuple[str, ...], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    failed = command("generate", "a star", *tiny_flags, "--height", "33", "--profile", trace)
    assert failed.code != 0
    assert not trace.exists()
