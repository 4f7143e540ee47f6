"""Pairs of clips, a line of JSON for each prompt: a file of them that grows, and a summary of what they say."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from diffusion_runtime.quality.paired_test import mcnemar
from diffusion_runtime.quality.shapes.scoring import wilson


def summary(lines: Sequence[dict[str, Any]], kinds: Iterable[str]) -> dict[str, Any]:
    """Return the prompt accuracy of both sides with its 95 % interval, how many clips turned right or wrong with
    McNemar's p, latent distance and PSNR: of all lines and of those of each kind.

    lines: {"kind", "right": {reference: bool, other: bool}, "latent_relative_l2", "psnr_db"}.
    """

    def part(of_kind: Sequence[dict[str, Any]]) -> dict[str, Any]:
        sides = {name: [bool(line["right"][name]) for line in of_kind] for name in of_kind[0]["right"]}
        test = mcnemar(*sides.values())
        return {
            "num_prompts": len(of_kind),
            "joint": {name: dataclasses.asdict(wilson(sum(right), len(right))) for name, right in sides.items()},
            "turned_wrong": test.only_first,
            "turned_right": test.only_second,
            "p": test.p,
            "latent_relative_l2": statistics.mean(line["latent_relative_l2"] for line in of_kind),
            "psnr_db": statistics.mean(line["psnr_db"] for line in of_kind),
        }

    of_kinds = {kind: [line for line in lines if line["kind"] == kind] for kind in kinds}
    return {"all": part(lines), **{kind: part(of_kind) for kind, of_kind in of_kinds.items() if of_kind}}


def read_lines(pairs: Path) -> list[dict[str, Any]]:
    """Return the lines so far, and take a last one out of the file that was cut off."""
    if not pairs.exists():
        return []
    *whole, rest = pairs.read_text().split("\n")
    if rest:
        pairs.write_text("".join(f"{line}\n" for line in whole))
    return [json.loads(line) for line in whole]


def add_lines(pairs: Path, lines: Iterable[dict[str, Any]]) -> None:
    with pairs.open("a") as file:
        file.write("".join(f"{json.dumps(line)}\n" for line in lines))


def write_whole(path: Path, document: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)
