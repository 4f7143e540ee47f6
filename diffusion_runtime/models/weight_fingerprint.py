"""Fingerprints of weight files that a run names: they show whether a file differs from the one a recipe was made with,
without reading all of it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from diffusion_runtime.config import LoraConfig, RuntimeConfig, weight_paths
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.decoders.latent_upsampler import upsampler_place
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.models.lora_sources import commits_of, recorded_loras
from diffusion_runtime.untrusted.files import open_file, user_path
from diffusion_runtime.weights.lora.shipped import lora_path
from diffusion_runtime.weights.weight_files import GGUF, SAFETENSORS

# By the field of RuntimeConfig that names a file or a folder; of LoRA files in their order, None for one that is not on
# this machine.
Fingerprints: TypeAlias = dict[str, str | list[str | None]]

_SUFFIXES = (*SAFETENSORS, GGUF)
# The parts of a larger file that are read: its head, which lists the tensors, and pieces all over it. Weights of equal
# shapes have equal heads and sizes; two trainings of one model differ in every piece.
_HEAD, _PIECE, _NUM_PIECES = 2**20, 2**13, 256


def weight_fingerprints(config: RuntimeConfig) -> Fingerprints:
    """Return the fingerprint of every weight file or folder, except the model's own, that a config names and that is on
    this machine."""
    found: Fingerprints = {}
    for field in dataclasses.fields(config):
        is_path = field.name.endswith("_path") and field.name != "model_path"
        # Or the name of a published one, which is not a file here.
        is_path |= field.name == "vae_decoder" and config.vae_decoder != "tiny"
        value = getattr(config, field.name) if is_path else None
        place = None if value is None else user_path(value, field.name)
        if place is not None and field.name == "upsampler_path":
            place = upsampler_place(place)
        digest = None if place is None else fingerprint(place)
        if digest is not None:
            found[field.name] = digest
    return with_loras(found, config.lora)


def weight_bytes(config: RuntimeConfig) -> dict[str, int]:
    """Return the size of every file of a part that a config names and that is on this machine."""
    places = {key: user_path(path, key) for key in weight_paths() if (path := getattr(config, key)) is not None}
    return {key: place.stat().st_size for key, place in places.items() if place.is_file()}


def folder_fingerprint(folder: ModelFolder, elsewhere: Collection[str]) -> str | None:
    """Return the SHA-256, in hexadecimal, of the fingerprints of the weights in a model's own folders; None for a model
    of the package, and where no weights are here, such as for random ones. elsewhere: components whose weights are not
    the folder's."""
    if folder.is_packaged or not folder.path.is_dir():
        return None
    places = [path for path in folder.path.iterdir() if path.is_dir() and path.name not in elsewhere]
    found = {place.name: digest for place in sorted(places) if (digest := fingerprint(place)) is not None}
    return hashlib.sha256(repr(found).encode()).hexdigest() if found else None


def with_loras(fingerprints: Fingerprints, loras: Sequence[LoraConfig]) -> Fingerprints:
    """Return the fingerprints with those of these LoRA files, located, in place of others; of the hub's also the
    commits."""
    others = {name: digest for name, digest in fingerprints.items() if name not in ("lora", "lora_commits")}
    if not loras:
        return others
    commits = commits_of(loras)
    of_hub: Fingerprints = {"lora_commits": commits} if any(commits) else {}
    return {**others, "lora": [fingerprint(lora_path(lora.path)) for lora in loras], **of_hub}


def with_loras_of(recipe: Mapping[str, Any], loras: Sequence[LoraConfig]) -> dict[str, Any]:
    """Return a recipe with these LoRA files, located, in place of others."""
    runtime = {**recipe["runtime"], "lora": recorded_loras(loras)}
    weights = with_loras(recipe.get("weights", {}), loras)
    others = {key: value for key, value in recipe.items() if key != "weights"}
    return {**others, "runtime": runtime, **({"weights": weights} if weights else {})}


def changed_weights(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths of weight files that a run still names and that were another file when a recipe was made.

    then: a recipe with any contents; now: the result of `PipelineDescription.to_dict`.
    """
    before = _by_path(then)
    changed = [path for path, digest in _by_path(now).items() if before.get(path) not in (None, digest)]
    return tuple(changed)


def fingerprint(place: Path) -> str | None:
    """Return the SHA-256, in hexadecimal, of a file's size, head and pieces, of a folder those of its weight files;
    None where there is none."""
    digest = hashlib.sha256()
    try:
        is_folder = place.is_dir()
        files = sorted(path for path in place.iterdir() if path.suffix in _SUFFIXES) if is_folder else [place]
        for path in files:
            with open_file(path) as file:
                size = file.seek(0, 2)
                digest.update(f"{path.name if is_folder else ''} {size};".encode())
                for start, length in _parts(size):
                    file.seek(start)
                    digest.update(file.read(length))
    except (DiffusionRuntimeError, OSError):
        return None
    return digest.hexdigest() if files else None


def _parts(size: int) -> Sequence[tuple[int, int]]:
    """Return (start, length) of the parts of a file that are read."""
    if size <= _HEAD + _NUM_PIECES * _PIECE:
        return [(0, size)]
    step = (size - _HEAD - _PIECE) / (_NUM_PIECES - 1)
    return [(0, _HEAD), *((_HEAD + int(index * step), _PIECE) for index in range(_NUM_PIECES))]


def _by_path(recipe: Mapping[str, Any]) -> dict[str, object]:
    runtime, weights = recipe.get("runtime"), recipe.get("weights")
    if not isinstance(runtime, Mapping) or not isinstance(weights, Mapping):
        return {}
    pairs = []
    for name, digest in weights.items():
        value = runtime.get(name)
        if name == "lora" and isinstance(value, list) and isinstance(digest, list):
            pairs += [
                (lora.get("path"), each) for lora, each in zip(value, digest, strict=False) if isinstance(lora, Mapping)
            ]
        else:
            pairs.append((value, digest))
    return {path: digest for path, digest in pairs if isinstance(path, str)}
