"""Names and prompts of strangers in every verb: no control character and no bidirectional override is printed."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_support import Command
from sample_media import make_media

from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.tables import facts_table, figures_table, plain_table
from diffusion_runtime.cli.terminal import put_on_stdout, put_path_on_stdout
from diffusion_runtime.untrusted.printable import printable

# Clear the screen, set the title, the same in C1, text from right to left.
HOSTILE = "a\x1b[2J\x1b]0;t\x07\x9b31m\u202e\u2066b"
DRIVING = frozenset("\x1b\x07\x9b\u202e\u2066")


def test_printable_keeps_what_is_written_and_drops_what_drives_a_terminal() -> None:
    assert printable(HOSTILE) == "a[2J]0;t31mb"
    plain = "Zoë שלום\u200f 红 \U0001f469\u200d\U0001f3a8\tone\ntwo"
    assert printable(plain) == plain


def test_a_console_prints_no_title_cell_or_text_that_drives_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.text import Text

    console = console_on_stdout()
    console.print(HOSTILE, markup=False)
    console.print(Text(HOSTILE))
    console.print(plain_table(["x", HOSTILE], [["y", HOSTILE]], HOSTILE))
    console.print(facts_table([(HOSTILE, HOSTILE)], HOSTILE))
    console.print(figures_table([HOSTILE, "x"], [[HOSTILE, "1.0"]]))
    out = capsys.readouterr().out
    assert out.count("a[2J") >= 8
    assert not DRIVING & set(out)


def test_a_path_is_exact_for_a_program_and_printable_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnTerminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, expected in ((io.StringIO(), HOSTILE), (OnTerminal(), printable(HOSTILE))):
        monkeypatch.setattr(sys, "stdout", stream)
        put_path_on_stdout(Path(HOSTILE))
        put_on_stdout(HOSTILE)
        assert stream.getvalue() == f"{expected}\n{expected}\n"


def test_hostile_names_through_the_verbs(
    command: Command, tiny_wan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What `bench generate` measures here is for no later plan.
    monkeypatch.setenv("DIFFUSION_RUNTIME_CACHE", str(tmp_path))
    model = Path(HOSTILE)
    shutil.copytree(tiny_wan_folder, model)
    make_media(4, 32, 32).save(f"{HOSTILE}.mp4")
    Path(f"{HOSTILE}.yaml").write_text(f'model_path: "{HOSTILE.encode("unicode_escape").decode()}"\n')
    size: tuple[Any, ...] = ("--height", "32", "--width", "32", "--num-frames", "5", "--device", "cpu")
    wrong = []
    for arguments in (
        ("generate", HOSTILE, "--dry-run", "--model-path", model, *size),
        ("generate", "a ring", "--model-path", model, *size, "--num-inference-steps", "1", "-o", f"out{HOSTILE}/"),
        ("generate", "a ring", "--dry-run", "--config", f"{HOSTILE}.yaml"),
        ("generate", "a ring", "--dry-run", "--model-path", f"{HOSTILE}-missing"),
        ("generate", HOSTILE, "--sampler", HOSTILE),
        ("explain", HOSTILE, "--model-path", model, *size, "--html", f"{HOSTILE}.html"),
        ("bench", "step", model, "--device", "cpu", "--repeats", "1", *size[:6]),
        ("bench", "generate", model, "--device", "cpu", "--no-diffusers", "--repeats", "1", *size[:6]),
        ("compare", "a ring", "--setting", f"{HOSTILE}:", "--setting", "b:"),
        ("info", f"{HOSTILE}.mp4"),
        ("info", model),
        ("info", f"{HOSTILE}.safetensors"),
        ("models", "convert", f"{HOSTILE}.pt", f"{HOSTILE}.safetensors"),
        (HOSTILE,),
        ("generate", f"--{HOSTILE}"),
    ):
        result = command(*arguments)
        # A pipe gets the exact bytes of a result's path.
        out = "\n".join(line for line in result.out.splitlines() if not Path(line).exists())
        if found := DRIVING & set(out + result.err):
            wrong.append(
                (arguments[:2], result.code, found, [line for line in result.err.splitlines() if found & set(line)])
            )
    assert not wrong, "\n".join(map(str, wrong))
