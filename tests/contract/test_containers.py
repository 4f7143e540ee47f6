"""containers/Dockerfile, as far as it can be checked where no docker daemon runs."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "containers" / "Dockerfile"
INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "USER", "VOLUME", "WORKDIR"}


def instructions() -> list[tuple[str, str]]:
    """(instruction, its text) with continued lines joined and comments left out."""
    lines = [line for line in FILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name, text) for name, text in pairs]


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    allowed = [
        line.removeprefix("!") for line in Path(f"{FILE}.dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    stages = [text.rpartition(" AS ")[2] for name, text in instructions() if name == "FROM" and " AS " in text]
    assert {name for name, _ in instructions()} <= INSTRUCTIONS
    for text in (text for name, text in instructions() if name == "COPY"):
        words = shlex.split(text)
        if words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
            continue
        for source in words[:-1]:
            assert (ROOT / source).exists(), source
            assert source in allowed


def test_it_runs_the_command_as_another_user_than_root_with_a_cache_volume() -> None:
    last = [(name, text) for name, text in instructions()]
    last = last[max(index for index, (name, _) in enumerate(last) if name == "FROM") :]
    values = dict(last)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert json.loads(values["ENTRYPOINT"])[0] in project["scripts"]
    assert values["USER"] not in ("root", "0")
    (volume,) = json.loads(values["VOLUME"])
    assert re.search(rf"HF_HOME={volume}/", values["ENV"])
    python = re.search(r"PYTHON_VERSION=(\S+)", FILE.read_text())
    assert python is not None
    assert f"Programming Language :: Python :: {python[1]}" in project["classifiers"]
