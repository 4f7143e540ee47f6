"""`info FILE`: metadata of a generated file: size, recipe, attention report, timings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.flag_syntax import WEIGHT_SUFFIXES
from diffusion_runtime.cli.report_remarks import remarks_of
from diffusion_runtime.cli.tables import attention_table, facts_table
from diffusion_runtime.cli.terminal import json_text, put_on_stdout
from diffusion_runtime.session.reporter import seconds_text
from diffusion_runtime.untrusted.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from diffusion_runtime.media import MediaFile
    from diffusion_runtime.media.content_credentials import Manifest

SCHEMA = "diffusion_runtime.info/1"
# A recipe of this program has some 60 values, and a prompt is the longest.
_MAX_VALUES = 100
_MAX_VALUE_CHARACTERS = 2000
_MAX_REMARKS = 50
_MAX_PROBLEMS = 5


def run_info(path: str, *, as_json: bool) -> int:
    """The verb: what is known of `path`, on standard output. Raises OutputError."""
    from diffusion_runtime.media import read_media_file
    from diffusion_runtime.media.content_credentials import read_manifest

    media = read_media_file(path, also=WEIGHT_SUFFIXES)
    manifest = read_manifest(media.path, media.format)
    if as_json:
        put_on_stdout(json_text(_to_json_object(media, manifest)))
        return 0
    _show(media, manifest)
    return 0


def run_latents_info(path: str, *, as_json: bool) -> int:
    """The verb for saved latents: how far they are, and the recipe. Raises OutputError and ConfigError."""
    from diffusion_runtime.generation.saved_latents import read_head

    recipe, progress = read_head(Path(path))
    num_bytes = Path(path).stat().st_size
    if as_json:
        values = {"path": path, "format": "latents", "num_bytes": num_bytes, "progress": progress, "recipe": recipe}
        put_on_stdout(json_text({"schema": SCHEMA, **values}))
        return 0
    console = console_on_stdout()
    done, total, unit = (_cut(str(progress.get(name))) for name in ("done", "of", "unit"))
    facts = [("file", path), ("done", f"{done} of {total} {unit}"), ("bytes", f"{num_bytes:,}")]
    console.print(facts_table(facts, "Saved latents"))
    _show_recipe(recipe, console)
    console.print(f"`diffusion-runtime finish {shlex.quote(path)}` goes on from them.", markup=False)
    return 0


def _to_json_object(media: MediaFile, manifest: Manifest | None) -> dict[str, Any]:
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
        "c2pa": None if manifest is None else manifest.to_dict(),
    }


def _show(media: MediaFile, manifest: Manifest | None) -> None:
    from rich.text import Text

    console = console_on_stdout()
    facts: list[tuple[str, object]] = [("file", media.path)]
    if media.num_frames:
        facts += [("size", f"{media.width} x {media.height}"), ("frames", media.num_frames)]
    if media.fps and media.num_frames > 1:
        facts += [("fps", f"{media.fps:g}"), ("length", f"{media.num_frames / media.fps:.2f} s")]
    if media.audio is not None:
        facts.append(("sound", _describe_sound(media.audio, media.path)))
    facts.append(("bytes", f"{media.num_bytes:,}"))
    console.print(facts_table(facts, f"{media.format} file"))
    if manifest is not None:
        console.print(facts_table(_manifest_rows(manifest), "\nC2PA manifest"))
    if media.recipe is None:
        console.print("No recipe: this file or its sidecar was not written by diffusion-runtime, or lost it.")
        return
    recipe = dict(media.recipe)
    if media.attention_report is not None:
        # The report of what ran repeats the plan.
        recipe.pop("attention", None)
    _show_recipe(recipe, console)
    if media.attention_report is not None:
        console.print(attention_table([media.attention_report]))
        for remark in remarks_of([media.attention_report])[:_MAX_REMARKS]:
            console.print(Text(printable(_cut(remark))))
    if media.timings:
        console.print(Text(f"Timings: {seconds_text(media.timings)}"))


def _show_recipe(recipe: Mapping[str, Any], console: Console) -> None:
    values = list(_flatten(recipe))
    console.print(facts_table(values[:_MAX_VALUES], "\nRecipe"))
    if len(values) > _MAX_VALUES:
        console.print(f"and {len(values) - _MAX_VALUES} more values; --json has all")


def _manifest_rows(manifest: Manifest) -> list[tuple[str, object]]:
    """Return what a manifest of an untrusted file says, and whether its signature holds, as rows."""
    if manifest.holds is None:
        return [("signature", f"not checked: {manifest.problems[0]}")]
    problems = "; ".join(_cut(printable(each)) for each in manifest.problems[:_MAX_PROBLEMS])
    signer = f"{manifest.signed_by} ({manifest.issuer})" if manifest.issuer else manifest.signed_by
    trust = "on a list of trusted ones" if manifest.is_trusted else "on no list of trusted ones that is known here"
    rows = (
        ("signature", "holds: the file is as it was signed" if manifest.holds else f"DOES NOT HOLD: {problems}"),
        ("signed by", f"{signer}, {manifest.algorithm}; the certificate is {trust}" if signer else ""),
        ("written by", manifest.generator),
        ("made by", f"a model ({manifest.source_type})" if manifest.is_made_by_model else manifest.source_type),
        ("recipe", "inside the manifest" if manifest.recipe is not None else "not in the manifest"),
    )
    return [(name, _cut(printable(text))) for name, text in rows if text]


def _describe_sound(audio: Mapping[str, Any], path: Path) -> str:
    """audio: maybe of an untrusted file; what it lacks is left out."""
    units = (("seconds", "s"), ("num_channels", "channels"), ("sample_rate", "Hz"))
    parts = [f"{audio[key]:g} {unit}" for key, unit in units if isinstance(audio.get(key), int | float)]
    return ", ".join([*parts, f"in {path.with_suffix('.wav').name}"] if audio.get("is_beside") is True else parts)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """`{"request": {"seed": 1}}` as ("request.seed", "1"); lists and empty mappings as JSON."""
    for key, value in values.items():
        name = f"{prefix}{key[:80]}"
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{name}.")
        elif value not in (None, [], {}):
            yield name, _cut(value if isinstance(value, str) else json.dumps(value))


def _cut(text: str) -> str:
    """A value as far as a person reads it; `info --json` has all of it."""
    if len(text) <= _MAX_VALUE_CHARACTERS:
        return text
    return f"{text[:_MAX_VALUE_CHARACTERS]}... ({len(text)} characters)"
