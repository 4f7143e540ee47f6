"""`info FILE`: what a generated file is, and how it was made."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_runtime.cli.tables import attention_table, facts_table, remarks_of, seconds_text
from diffusion_runtime.cli.terminal import json_text, printable, put_on_stdout

if TYPE_CHECKING:
    from diffusion_runtime.media import MediaFile

SCHEMA = "diffusion_runtime.info/1"


def run_info(path: str, *, as_json: bool) -> int:
    """The verb: what is known of `path`, on standard output. Raises OutputError."""
    from diffusion_runtime.media import read_media_file

    media = read_media_file(path)
    if as_json:
        put_on_stdout(json_text(_to_json_object(media)))
        return 0
    _show(media)
    return 0


def _to_json_object(media: MediaFile) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "path": str(media.path),
        "format": media.format,
        "width": media.width,
        "height": media.height,
        "num_frames": media.num_frames,
        "fps": media.fps,
        "num_bytes": media.num_bytes,
        "recipe": media.recipe,
        "attention_report": media.attention_report,
        "timings": media.timings,
        "audio": media.audio,
    }


def _show(media: MediaFile) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, file=sys.stdout)
    facts: list[tuple[str, object]] = [("file", media.path)]
    if media.num_frames:
        facts += [("size", f"{media.width} x {media.height}"), ("frames", media.num_frames)]
    if media.fps and media.num_frames > 1:
        facts += [("fps", f"{media.fps:g}"), ("length", f"{media.num_frames / media.fps:.2f} s")]
    if media.audio is not None:
        facts.append(("sound", _describe_sound(media.audio, media.path)))
    facts.append(("bytes", f"{media.num_bytes:,}"))
    console.print(facts_table(facts, f"{media.format} file"))
    if media.recipe is None:
        console.print("No recipe: this file or its sidecar was not written by diffusion-runtime, or lost it.")
        return
    recipe = dict(media.recipe)
    if media.attention_report is not None:
        # What was planned is said again by what ran.
        recipe.pop("attention", None)
    console.print(facts_table(_flatten(recipe), "\nRecipe"))
    if media.attention_report is not None:
        console.print(attention_table([media.attention_report]))
        for remark in remarks_of([media.attention_report]):
            console.print(Text(printable(remark)))
    if media.timings:
        console.print(Text(f"Timings: {seconds_text(media.timings)}"))


def _describe_sound(audio: Mapping[str, Any], path: Path) -> str:
    """audio: maybe a stranger's; what it lacks is not said."""
    units = (("seconds", "s"), ("num_channels", "channels"), ("sample_rate", "Hz"))
    parts = [f"{audio[key]:g} {unit}" for key, unit in units if isinstance(audio.get(key), int | float)]
    return ", ".join([*parts, f"in {path.with_suffix('.wav').name}"] if audio.get("is_beside") is True else parts)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """`{"request": {"seed": 1}}` as ("request.seed", "1"); lists and empty mappings as JSON."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{name}.")
        elif value not in (None, [], {}):
            yield name, value if isinstance(value, str) else json.dumps(value)
