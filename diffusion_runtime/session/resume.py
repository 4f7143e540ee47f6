"""Resume: which results of an interrupted run exist already (`--resume`).

A result is done when its file and its sidecar are both there and were made by the same request and images, model,
attention, and the same values of every option that changes the output (`RuntimeOption.changes_output`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffusion_runtime.attention.roles import TEXT_ENCODER
from diffusion_runtime.config import RuntimeConfig, runtime_options
from diffusion_runtime.errors import OutputError, UsageError
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.session.outputs import Outputs

# What of a recipe's `model` and of each row of its `attention` must be the same. The device may be another one, and so
# may the way in which processes share the work: neither changes what is made.
_MODEL_KEYS = ("path", "commit", "family", "config_sha256", "dtype")
_ATTENTION_KEYS = ("role", "when", "layers", "backend", "options")
# Of its `runtime`: what changes the output and is not compared as what it led to.
_RUNTIME_KEYS = tuple(
    name for name, option in runtime_options().items() if option.changes_output and option.recorded_as is None
)


def find_finished(
    requests: Sequence[GenerationRequest], outputs: Outputs, description: Mapping[str, Any]
) -> list[Path | None]:
    """Return for each resolved request the file that holds its result, or None if it has to be made.

    description: PipelineDescription.to_dict() of the model that would make it. A sidecar, or a sound, whose file is
    missing, which a process that was killed while writing may leave, is removed when it is the request's. Raises
    UsageError for a name that a file with another recipe has, which the result could not get.
    """
    from diffusion_runtime.generation.input_files import input_digests
    from diffusion_runtime.media import numbered

    taken: set[Path] = set()
    finished: list[Path | None] = []
    numbers = _numbers_in(outputs.folder)
    all_wanted = [
        output_identity({**description, "request": request.recorded(), "inputs": input_digests(request)})
        for request in requests
    ]
    for request, wanted in zip(requests, all_wanted, strict=True):
        target = outputs.target(request)
        found, is_free = None, False
        unrelated: list[tuple[Path, Mapping[str, Any] | None]] = []
        for path in [numbered(target, number) for number in sorted({1} | numbers.get(target.stem, set()))]:
            if path in taken:
                continue
            if not path.exists():
                _remove_orphans(path, wanted)
                is_free = True
                continue
            identity = _recipe_identity(path)
            if identity == wanted:
                found = path
                break
            if identity not in all_wanted and not is_free:
                unrelated.append((path, identity))
        if found is None and unrelated:
            path, other = unrelated[0]
            raise UsageError(
                f"--resume: {path} was not made by this command: {_difference(other, wanted)}. Move it, or choose "
                "another --output-path"
            )
        if found is not None:
            taken.add(found)
        finished.append(found)
    return finished


def output_identity(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe fields that determine the output, as JSON values."""
    import json

    model = recipe.get("model")
    attention = recipe.get("attention")
    rows = attention if isinstance(attention, list) else []
    runtime = recipe.get("runtime")
    # A recipe of an earlier version lacks what there was one way of.
    chosen = {**dataclasses.asdict(RuntimeConfig()), **(runtime if isinstance(runtime, Mapping) else {})}
    request, asked = recipe.get("request"), recipe.get("asked")
    if isinstance(request, Mapping) and isinstance(asked, Mapping):
        # Of a length that was chosen for the prompt.
        request = {**request, **asked}
    kept = {
        "request": request,
        "inputs": recipe.get("inputs", {}),
        "weights": recipe.get("weights", {}),
        "runtime": {key: chosen[key] for key in _RUNTIME_KEYS},
        "model": {key: model.get(key) for key in _MODEL_KEYS} if isinstance(model, Mapping) else None,
        "attention": [_attention_identity(row) for row in rows if isinstance(row, Mapping)],
        "text_attention": _text_attention(chosen),
    }
    if recipe.get("continued") is not None:
        # Steps that other values made.
        kept["continued"] = recipe["continued"]
    plain: dict[str, Any] = json.loads(json.dumps(kept, sort_keys=True))
    return plain


def _attention_identity(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a row of attention determines the output; of a sparse backend also what makes its dense calls."""
    dense = row.get("dense")
    beside = {"dense": _attention_identity(dense)} if isinstance(dense, Mapping) else {}
    return {**{key: row.get(key) for key in _ATTENTION_KEYS}, **beside}


def _text_attention(runtime: Mapping[str, Any]) -> Any:
    """Return the choice for text encoders, which have no row of attention; None for their default."""
    levels = [runtime.get(name) for name in ("attention_override", "attention")]
    choices = [level.get("per_role") for level in levels if isinstance(level, Mapping)]
    named = [each[TEXT_ENCODER] for each in choices if isinstance(each, Mapping) and TEXT_ENCODER in each]
    return named[0] if named else None


def _difference(identity: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> str:
    """Return why a file's recipe is not the wanted one."""
    differing = {key for key in wanted if identity is None or identity.get(key) != wanted[key]}
    if identity is not None and (differing == {"inputs"} or differing == {"weights"}):
        (kind,) = differing
        before = identity[kind] if isinstance(identity[kind], Mapping) else {}
        changed = [name for name in wanted[kind] if before.get(name) != wanted[kind][name]]
        files = {"step_cache": "its calibration", "attention": "a file of its attention"}
        what = files.get(changed[0]) if len(changed) == 1 else None
        return f"{what or ('an image' if kind == 'inputs' else 'a file of weights')} has changed since"
    return "its recipe is another one, or missing"


def _numbers_in(folder: Path) -> dict[str, set[int]]:
    """Return the numbers in `folder` of each name without its number, such as `out` of `out-2.mp4`."""
    numbers: dict[str, set[int]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        name, _, number = path.stem.rpartition("-")
        if number.isdecimal() and number == str(int(number)) and int(number) > 1:
            numbers.setdefault(name, set()).add(int(number))
    return numbers


def _recipe_identity(path: Path) -> dict[str, Any] | None:
    """Return the identity of a file whose sidecar exists, whether or not the file does; None for any other."""
    from diffusion_runtime.media import read_own_sidecar

    try:
        sidecar = read_own_sidecar(path)
    except OutputError:
        return None
    recipe = None if sidecar is None else sidecar.get("recipe")
    return output_identity(recipe) if isinstance(recipe, Mapping) else None


def _remove_orphans(path: Path, wanted: Mapping[str, Any]) -> None:
    """Removes the sidecar and the sound of a file that is missing, when they were written with it."""
    from diffusion_runtime.media import has_sound_beside, read_own_sidecar

    if _recipe_identity(path) != wanted:
        return
    if has_sound_beside(read_own_sidecar(path) or {}):
        if path.suffix.lower() == ".wav":
            # The sound of pictures that may well be there.
            return
        path.with_suffix(".wav").unlink(missing_ok=True)
    path.with_suffix(".json").unlink(missing_ok=True)
