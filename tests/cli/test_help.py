"""Help fits a terminal, and loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from cli_support import Command, process_environment
from tables import table

from diffusion_runtime.cli import verbs

HEAVY = ("torch", "diffusers", "transformers", "numpy", "PIL", "yaml", "imageio_ffmpeg")


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["completion", "bash"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from diffusion_runtime.cli.app import run; "
        f"assert run({arguments!r}) == 0; print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=process_environment(), capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "[]"


# Imported by a help that needs none of it: the flags of verbs that were not named, and what those are made of.
UNNAMED = {
    "--help": ("options", "generate", "compare", "tune", "bench", "doctor", "completion"),
    "generate --help": ("explain", "compare", "tune", "bench", "doctor", "calibrate", "completion", "models"),
    "doctor --help": ("generate", "settings", "compare", "bench"),
}


def test_help_imports_no_verb_that_was_not_named(tmp_path: Path) -> None:
    for line, unnamed in UNNAMED.items():
        modules = [f"diffusion_runtime.cli.{name}" for name in unnamed]
        if line == "--help":
            modules += ["diffusion_runtime.request", "diffusion_runtime.config"]
        code = (
            "import sys; from diffusion_runtime.cli.app import run; "
            f"assert run({line.split()!r}) == 0; print([name for name in {modules!r} if name in sys.modules])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=process_environment(), capture_output=True, text=True
        )
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), (line, done.stderr)


def test_summaries_are_the_first_sentences_of_the_verbs() -> None:
    """What the help of all verbs shows without importing them is what their own help begins with."""
    commands = typer.main.get_command(verbs.program()).commands  # type: ignore[attr-defined]
    assert list(verbs.VERBS) == list(commands)
    for name, verb in verbs.VERBS.items():
        first = " ".join(commands[name].help.partition("\n\n")[0].split())
        assert first == verb.summary, name


GROUPS = ("", "bench", "config")
VERBS = (
    "generate,backends,doctor,models,info,calibrate,compare,bench attention,config schema,"
    "models list,models download,models convert"
)


@table("verb", [*GROUPS, *VERBS.split(","), "completion"])
def test_help_fits_80_columns_uncut_and_shows_an_example(
    verb: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = command(*verb.split(), "--help")
    assert shown.code == 0
    assert max(len(line) for line in shown.out.splitlines()) <= 80
    # What stands for the rest of a name that was cut.
    assert "…" not in shown.out
    is_group = verb in GROUPS
    assert is_group or "\n diffusion-runtime " in shown.out
    assert verb or "Start with: diffusion-runtime generate" in shown.out


def test_help_groups_the_flags(command: Command) -> None:
    shown = command("generate", "--help").out
    places = [shown.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places)
    assert "--dotted-attention" not in shown


@table("verb", ["explain", "compare", "tune"])
def test_verbs_that_write_no_clip_have_no_flag_of_one(verb: str, command: Command) -> None:
    for flag in (["--stream", "x.mp4"], ["--interactive"], ["--attention-plot", "x.png"], ["--dry-run"]):
        refused = command(verb, "a star", *flag)
        expected = f"No such option: {flag[0]} is of `generate`, which writes clips; leave it out"
        assert (refused.code, expected in refused.said) == (2, True), refused.said


PANELS = (
    "What to make",
    "Size and steps",
    "Attention",
    "Where it runs",
    "8-bit linear layers",
    "Tensor parallel",
    "Output",
)


def test_no_arguments_show_the_help(command: Command) -> None:
    assert command().out == command("--help").out


def test_the_version_stands_alone_on_standard_output(command: Command) -> None:
    from diffusion_runtime import __version__

    assert command("--version").out == f"diffusion-runtime {__version__}\n"
