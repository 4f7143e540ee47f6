"""The json files of a diffusers folder, read with errors that name the file and the key."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from diffusion_runtime.errors import ModelLoadError, nearest, shown

INDEX_FILE = "model_index.json"
LFS_PREFIX = b"version https://git-lfs"

T = TypeVar("T")


def read_json(path: Path) -> dict[str, Any]:
    """The mapping a json file holds. Raises ModelLoadError when it is missing, unreadable or not a mapping."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise ModelLoadError(
            f"{path} is missing; a diffusers model folder has it, so copy or download the whole folder"
        ) from error
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if content.startswith(LFS_PREFIX):
        raise ModelLoadError(f"{path} is a Git-LFS pointer, not the file itself; run `git lfs pull` in that folder")
    try:
        values = json.loads(content)
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid json ({error}); copy or download it again") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: expected a json object with keys, got {_kind(values)}")
    return values


def component_class(folder: Path, component: str) -> tuple[str, str]:
    """(library, class name) of a component, as model_index.json says. Raises ModelLoadError."""
    path = folder / INDEX_FILE
    entry = read_json(path).get(component)
    if entry is None:
        raise ModelLoadError(f"{path}: key {component!r} is missing; expected [library, class name]")
    pair = entry if isinstance(entry, list) else []
    if len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise ModelLoadError(f"{path}: key {component!r}: expected [library, class name], got {entry!r}")
    return pair[0], pair[1]


def refuse_other_pipelines(folder: Path, known: Collection[str]) -> None:
    """Raises ModelLoadError for a folder whose pipeline is none of `known`: it does something else with a transformer
    of the same class, such as editing an image."""
    path = folder / INDEX_FILE
    name = read_json(path).get("_class_name")
    if name is not None and name not in known:
        raise ModelLoadError(
            f"{path}: key '_class_name': expected {' or '.join(known)}, got {name!r}: this runtime has no native model "
            "for what that pipeline does; `--backend diffusers` runs it"
        )


def refuse_unknown_index_keys(folder: Path, known: Collection[str]) -> None:
    """Raises ModelLoadError for a value in model_index.json that is no component, no note and not among `known`: what
    it asks for would be left out. null asks for nothing."""
    path = folder / INDEX_FILE
    for key, value in read_json(path).items():
        if not key.startswith("_") and not isinstance(value, list) and value is not None and key not in known:
            raise ModelLoadError(
                f"{path}: key {key!r}: {shown(value)} is unknown to this runtime.{nearest(key, known)} What it asks "
                "for would be left out; `--backend diffusers` runs the folder"
            )


def read_config(folder: Path, component: str) -> ConfigFile:
    """The config.json of a component's folder. Raises ModelLoadError."""
    path = folder / component / "config.json"
    return ConfigFile(path, read_json(path))


class ConfigFile:
    """A config.json whose values are read one by one, with their types checked; keys beginning with `_` are notes.

    path: for messages; values: as parsed.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def settings(self) -> dict[str, Any]:
        """Every key and value that is not a note."""
        return {key: value for key, value in self.values.items() if not key.startswith("_")}

    def whole_number(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer of `minimum` or more. Raises ModelLoadError when it is missing or something else."""
        value = self._value(key, default)
        if type(value) is not int or value < minimum:
            raise self.error(key, f"a whole number of {minimum} or more", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float or an integer. Raises ModelLoadError when it is missing or something else."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "a number", value)
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """true or false. Raises ModelLoadError when it is missing or something else."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def whole_numbers(self, key: str, length: int) -> tuple[int, ...]:
        """`length` integers of 1 or more. Raises ModelLoadError when they are missing or something else."""
        value = self._value(key, None)
        if not isinstance(value, list) or len(value) != length or any(type(v) is not int or v < 1 for v in value):
            raise self.error(key, f"a list of {length} whole numbers of 1 or more", value)
        return tuple(value)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """`length` floats. Raises ModelLoadError when they are missing or something else."""
        value = self._value(key, None)
        plain = isinstance(value, list) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in value)
        if not plain or len(value) != length:
            raise self.error(key, f"a list of {length} numbers", value)
        return tuple(float(v) for v in value)

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Raises ModelLoadError for a key that is not among `known`: what it asks for would be left out."""
        for key in self.settings():
            if key not in known:
                raise ModelLoadError(
                    f"{self.path}: key {key!r} is unknown to this runtime.{nearest(key, known)} The model was made for "
                    "something newer, or is of another kind than its class says"
                )

    def error(self, key: str, expected: str, value: object) -> ModelLoadError:
        """An error to raise for a key whose value is not what was expected."""
        return ModelLoadError(f"{self.path}: key {key!r}: expected {expected}, got {shown(value)}")

    def _value(self, key: str, default: T | None) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelLoadError(f"{self.path}: key {key!r} is missing")
        return default


def _kind(value: object) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
