"""--log-format json: JSON lines with stable keys; NO_COLOR and TERM=dumb: text without escape codes."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from cli_support import REPOSITORY, Command
from tables import table

EVENT_KEYS = {
    "message": set(),
    "log": {"logger"},
    "progress": {"item", "stage", "step", "num_steps", "seconds"},
    "table": {"columns", "rows"},
    "error": {"kind", "exit_code"},
}


def test_every_key_is_documented() -> None:
    text = (REPOSITORY / "docs" / "command_line.md").read_text(encoding="utf-8")
    keys = {"time", "level", "event", "message", "trace", "num_bytes", "total_bytes", *EVENT_KEYS}.union(
        *EVENT_KEYS.values()
    )
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []


def lines_of(text: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert set(line) == {"time", "level", "event", "message", *EVENT_KEYS[line["event"]]}, line
        assert datetime.datetime.fromisoformat(line["time"]).utcoffset() == datetime.timedelta(0)
        assert line["level"] in ("debug", "info", "warning", "error")
    return lines


def test_a_generation_reports_in_json_lines(command: Command, tiny_flags: tuple[str, ...]) -> None:
    shown = command("generate", "a star", *tiny_flags, "--log-format", "json")
    assert shown.code == 0
    lines = lines_of(shown.err)
    assert shown.out.splitlines() == [
        line["message"].removeprefix("wrote ") for line in lines if "wrote" in line["message"]
    ]
    steps = [(line["stage"], line["step"], line["num_steps"]) for line in lines if line["event"] == "progress"]
    assert [step for step in steps if step[0] == "denoise"] == [("denoise", step, 2) for step in range(3)]
    (report,) = (line for line in lines if line["event"] == "table")
    assert (report["message"], report["columns"][:3]) == ("Attention that ran", ["role", "backend", "calls"])
    assert [row[0] for row in report["rows"]] == ["self", "cross"]
    assert {len(row) for row in report["rows"]} == {len(report["columns"])}
    assert any(line["event"] == "log" and line["logger"] == "diffusion_runtime.attention" for line in lines)
    refused = command("generate", "a\x1b[31m star", *tiny_flags, "--log-format", "json")
    assert (refused.code, "\x1b" in refused.err) == (2, False)
    quiet = command("generate", "a star", *tiny_flags, "--log-format", "json", "-q")
    assert (quiet.code, quiet.err) == (0, "")


@table(
    "arguments, kind, code",
    [
        (["generate", "x", "--log-format", "json", "--attention-backend", "no_such"], "ConfigError", 2),
        (["generate", "x", "--log-format=json", "--no-such-flag"], "UsageError", 2),
        (["bench", "attention", "--shapes", "no_such", "--log-format", "json"], "ConfigError", 2),
    ],
)
def test_a_failure_is_one_line_with_its_kind(arguments: list[str], kind: str, code: int, command: Command) -> None:
    shown = command(*arguments)
    (line,) = lines_of(shown.err)
    assert (line["event"], line["kind"], line["exit_code"], shown.code) == ("error", kind, code, code)


def test_another_format_is_refused(command: Command) -> None:
    shown = command("generate", "x", "--log-format", "jsno")
    assert shown.code == 2
    assert "--log-format: unknown value 'jsno'. Did you mean 'json'?" in shown.said


@table("variable, value, is_plain", [("NO_COLOR", "1", False), ("TERM", "dumb", True), ("TERM", "xterm", None)])
def test_colour_is_left_out(
    variable: str, value: str, is_plain: bool | None, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, which FORCE_COLOR stands for. Without NO_COLOR and a dumb terminal there is colour."""
    for name in ("NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, text in {"FORCE_COLOR": "1", "TERM": "xterm", variable: value}.items():
        monkeypatch.setenv(name, text)
    error, listing, page = command("generate", " "), command("backends", "--device", "cpu"), command("models", "--help")
    texts = (error.err, listing.out, listing.err, page.out)
    if is_plain:
        assert not any("\x1b" in text for text in texts)
    # Colours are codes 30 to 49 and 90 to 107; bold and dim are not.
    codes = [code for text in texts for part in text.split("\x1b[")[1:] for code in part.partition("m")[0].split(";")]
    coloured = [code for code in codes if code.isdigit() and (30 <= int(code) <= 49 or 90 <= int(code) <= 107)]
    assert bool(coloured) == (is_plain is None), coloured
