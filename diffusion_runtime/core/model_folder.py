"""Model folder: the json files of a diffusers folder, each read once, with errors that name the file and the key."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from diffusion_runtime.errors import ModelLoadError, nearest, shown
from diffusion_runtime.untrusted.component_sizes import MAX_LAYERS, check_sizes
from diffusion_runtime.untrusted.files import check_file, read_file
from diffusion_runtime.untrusted.json_text import MAX_JSON_BYTES, parse_json_file

INDEX_FILE = "model_index.json"
# What a folder of diffusers' modular pipelines has instead, or in addition.
MODULAR_INDEX_FILE = "modular_model_index.json"
# Of modular blocks that are code in the folder itself.
MODULAR_CONFIG_FILE = "modular_config.json"

# A folder of links to the weights of a component (models/part_files.py) is inside one whose name ends so.
LINKS = ".links"
# Next to such links, where they lead to a file of several components: the prefix of this one's tensors.
PART_MARK = "part_of_file.json"

# What libraries read of a folder, in addition to weights. The largest published tokenizer.json has 33 MB.
_READ_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".safetensors")
MAX_TEXT_BYTES = 256 * 1024 * 1024

# Of the published models the widest has 12,288 channels.
MAX_SIZE = 2**20

T = TypeVar("T")


@dataclass(frozen=True)
class HubPart:
    """A component in another repository of the hub. revision: the commit, once it is known."""

    hub_id: str
    subfolder: str
    revision: str | None
    variant: str | None


@dataclass(frozen=True)
class ModularIndex:
    """The index of a modular folder. class_name, blocks: of diffusers; index: as model_index.json has it, of an
    ordinary pipeline where one stands for it; elsewhere: components in other repositories; defaults: request values."""

    class_name: str
    index: Mapping[str, Any]
    elsewhere: Mapping[str, HubPart]
    blocks: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workflow:
    """A mode of a folder that holds several transformers. stand_ins: component of the model -> the component that takes
    its place."""

    name: str
    stand_ins: Mapping[str, str]


class ModelFolder:
    """An opened model folder: a json file that is asked for several times is read once, so that all parts of one load
    see the same content. `folder / name` is a path inside it. downloads_gb: of a published model, of each component
    whose weights are still on the hub, in 10 ** 9 bytes; None where all are here. parts: where components are that come
    from elsewhere. is_packaged: whether the json is this package's own. modular: its modular index, where that counts,
    in place of model_index.json. workflow: the mode it is opened for, None for the first one. absent: components that
    its index names and that are not here."""

    def __init__(
        self,
        path: Path,
        downloads_gb: Mapping[str, float] | None = None,
        parts: Mapping[str, Path] = MappingProxyType({}),
        *,
        is_packaged: bool = False,
        modular: ModularIndex | None = None,
        workflow: Workflow | None = None,
        absent: frozenset[str] = frozenset(),
    ) -> None:
        self.path = path
        self.downloads_gb = downloads_gb
        self.parts = parts
        self.is_packaged = is_packaged
        self.modular = modular
        self.workflow = workflow
        self.absent = absent
        self._contents: dict[Path, bytes] = {}
        self._mappings: dict[Path, dict[str, Any]] = {}

    def __truediv__(self, name: str | Path) -> Path:
        if self.modular is not None and name == INDEX_FILE:
            return self.path / MODULAR_INDEX_FILE
        first, *rest = Path(name).parts or ("",)
        if first in self.parts:
            return self.parts[first].joinpath(*rest)
        stand_ins = {} if self.workflow is None else self.workflow.stand_ins
        return self.path.joinpath(stand_ins.get(first, first), *rest)

    def with_workflow(self, workflow: Workflow) -> ModelFolder:
        """Return the same folder opened for a workflow: its index names the components that take the place of
        others."""
        return self._copy(workflow=workflow)

    def without(self, components: Iterable[str]) -> ModelFolder:
        """Return the same folder with an index that does not name these components."""
        return self._copy(absent=self.absent.union(components))

    def on_disk(self, components: Iterable[str]) -> list[str]:
        """Return the names that these components have in their repository, and those of components that others take
        the place of."""
        stand_ins = {} if self.workflow is None else self.workflow.stand_ins
        standing = set(stand_ins.values())
        return [*(stand_ins.get(each, each) for each in components if each not in standing), *stand_ins]

    def with_parts(self, parts: Mapping[str, Path]) -> ModelFolder:
        """Return the same folder with components from elsewhere."""
        return self._copy(parts={**self.parts, **parts})

    def with_modular(self, modular: ModularIndex, parts: Mapping[str, Path]) -> ModelFolder:
        """Return the same folder by a modular index, with its components where they are."""
        return self._copy(modular=modular, parts={**self.parts, **parts})

    def _copy(self, **changes: Any) -> ModelFolder:
        kept = {
            "downloads_gb": self.downloads_gb,
            "parts": self.parts,
            "modular": self.modular,
            "workflow": self.workflow,
            "absent": self.absent,
        }
        return ModelFolder(self.path, is_packaged=self.is_packaged, **{**kept, **changes})

    def without_downloads(self, components: Collection[str]) -> ModelFolder:
        """Return the same folder, marking these components as not to be downloaded."""
        if self.downloads_gb is None:
            return self
        left = {name: size for name, size in self.downloads_gb.items() if name not in components}
        return self._copy(downloads_gb=left)

    @property
    def download_gb(self) -> float | None:
        """Size of what a run downloads, in 10 ** 9 bytes; None where all is here."""
        return None if self.downloads_gb is None else sum(self.downloads_gb.values())

    def __str__(self) -> str:
        return str(self.path)

    def read_json(self, *names: str) -> dict[str, Any]:
        """Read a JSON object once. names: of the folders in between and the file. Returns the caller's own copy."""
        if names == (INDEX_FILE,) and self.modular is not None:
            return copy.deepcopy(dict(self.modular.index))
        path = self / Path(*names)
        if path not in self._mappings:
            self._contents[path] = _read(path)
            self._mappings[path] = _parse(path, self._contents[path])
        values = copy.deepcopy(self._mappings[path])
        if names == (INDEX_FILE,):
            values = {name: value for name, value in values.items() if name not in self.absent}
        return values if names != (INDEX_FILE,) or self.workflow is None else standing_in(self.workflow, values)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the json files of the model and its parts, in hexadecimal: folders with different digests are
        different models. Reads those that nothing has read yet."""
        digest = hashlib.sha256(b"" if self.workflow is None else self.workflow.name.encode())
        whole = [self.path / INDEX_FILE, self.path / "generation.json"]
        if self.modular is None:
            files = [(path.relative_to(self.path).as_posix(), path) for path in self.path.glob("[!.]*/*.json")]
        else:
            # Places in the index differ from one machine to another.
            digest.update(json.dumps(self.modular.index, sort_keys=True).encode() + b"\0")
            files = [(f"{name}/{path.name}", path) for name, part in self.parts.items() for path in part.glob("*.json")]
        for name, path in sorted([*((path.name, path) for path in whole), *files]):
            if path.is_file():
                known = self._contents.get(path)
                content = read_file(path, max_bytes=MAX_TEXT_BYTES, error=ModelLoadError) if known is None else known
                digest.update(name.encode() + b"\0" + content + b"\0")
        return digest.hexdigest()


def standing_in(workflow: Workflow, index: Mapping[str, T]) -> dict[str, T]:
    """Return the components of an index with those of a workflow in the places of others. Raises ModelLoadError for an
    index that lacks one."""
    found = dict(index)
    for component, stand_in in workflow.stand_ins.items():
        if stand_in not in found:
            raise ModelLoadError(
                f"workflow: {workflow.name}: the model's index names no {stand_in}; use a folder that has it"
            )
        found[component] = found.pop(stand_in)
    return found


def workflow_of(folder: AnyFolder) -> str | None:
    """Return the name of the workflow that a folder is opened for; None for the first one."""
    return folder.workflow.name if isinstance(folder, ModelFolder) and folder.workflow is not None else None


# A folder whose files are read once, or one whose files are read whenever they are asked for.
AnyFolder: TypeAlias = ModelFolder | Path


def read_json(path: Path) -> dict[str, Any]:
    """Read the mapping a json file holds. Raises ModelLoadError when it is missing, unreadable or not a mapping."""
    return _parse(path, _read(path))


def part_prefix(folder: Path) -> str:
    """Return the prefix of the component's tensors in the files of its folder: empty but in a folder of links to a file
    that holds several components. Raises ModelLoadError."""
    mark = folder / PART_MARK
    if not folder.parent.name.endswith(LINKS) or not mark.is_file():
        return ""
    return str(read_json(mark).get("prefix", ""))


def read_index(folder: AnyFolder) -> dict[str, Any]:
    """model_index.json. Raises what read_json raises."""
    return read_json_in(folder, INDEX_FILE)


def read_json_in(folder: AnyFolder, *names: str) -> dict[str, Any]:
    """Read a json file of a model folder. names: as in ModelFolder.read_json. Raises what read_json raises."""
    opened = folder if isinstance(folder, ModelFolder) else ModelFolder(folder)
    return opened.read_json(*names)


def _read(path: Path) -> bytes:
    if not os.path.exists(path):
        if path.name == INDEX_FILE and (path.parent / MODULAR_INDEX_FILE).is_file():
            raise ModelLoadError(
                f"{path} is missing: this is the folder of a modular pipeline, of which the whole model can be run and "
                f"nothing else; give a folder with {INDEX_FILE}"
            )
        raise ModelLoadError(
            f"{path} is missing; a diffusers model folder has it, so copy or download the whole folder"
        )
    return read_file(path, max_bytes=MAX_JSON_BYTES, error=ModelLoadError)


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    # diffusers writes schedulers whose bounds are infinite.
    values = parse_json_file(content, path, error=ModelLoadError, allow_constants=True)
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: expected a json object with keys, got {_kind(values)}")
    return values


def check_model_files(folder: Path) -> None:
    """Check that the files of a model folder and its components can be opened: by this runtime and by libraries, which
    open files by name. model_index.json, which is always read, is checked when it is read.

    Raises ModelLoadError for a FIFO, device or socket under the name of a file, Git-LFS pointers, and texts too large
    to be read whole.
    """
    try:
        folders = [folder, *(path for path in sorted(folder.iterdir()) if path.is_dir() and path.name[0] != ".")]
        files = [
            path
            for place in folders
            for path in sorted(place.iterdir())
            if path.suffix in _READ_SUFFIXES and path != folder / INDEX_FILE
        ]
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {error.strerror}") from error
    for path in files:
        # A link to nothing is a missing file, which is reported where it is needed.
        if path.exists() and not path.is_dir():
            is_text = path.suffix != ".safetensors"
            check_file(path, max_bytes=MAX_TEXT_BYTES if is_text else None, error=ModelLoadError)


def component_class(folder: AnyFolder, component: str) -> tuple[str, str]:
    """Return (library, class name) of a component by model_index.json. Raises ModelLoadError."""
    path = folder / INDEX_FILE
    entry = read_index(folder).get(component)
    if entry is None:
        raise ModelLoadError(f"{path}: key {shown(component)} is missing; expected [library, class name]")
    pair = entry if isinstance(entry, list) else []
    if len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise ModelLoadError(f"{path}: key {shown(component)}: expected [library, class name], got {shown(entry)}")
    return pair[0], pair[1]


def refuse_other_pipelines(folder: AnyFolder, known: Collection[str]) -> None:
    """Raises ModelLoadError for a folder whose pipeline is none of `known`: it does something else with a transformer
    of the same class, such as editing an image."""
    path = folder / INDEX_FILE
    name = read_index(folder).get("_class_name")
    if name is not None and name not in known:
        raise ModelLoadError(
            f"{path}: key '_class_name': expected {' or '.join(known)}, got {shown(name)}: this runtime has no "
            "native model "
            "for what that pipeline does; `--backend diffusers` runs it"
        )


def refuse_unknown_index_keys(folder: AnyFolder, known: Collection[str]) -> None:
    """Raises ModelLoadError for a value in model_index.json that is no component, no note and not among `known`: what
    it asks for would be left out. null asks for nothing."""
    path = folder / INDEX_FILE
    for key, value in read_index(folder).items():
        if not key.startswith("_") and not isinstance(value, list) and value is not None and key not in known:
            raise ModelLoadError(
                f"{path}: key {key!r}: {shown(value)} is unknown to this runtime.{nearest(key, known)} What it asks "
                "for would be left out; `--backend diffusers` runs the folder"
            )


def read_config(folder: AnyFolder, component: str) -> ConfigFile:
    """Read the config.json of a component's folder. Raises ModelLoadError."""
    return ConfigFile(folder / component / "config.json", read_json_in(folder, component, "config.json"))


_HEAD = "attention_head_dim"


class ConfigFile:
    """A config.json whose values are read one by one, with their types checked; keys beginning with `_` are notes.

    path: for messages; values: as parsed.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def settings(self) -> dict[str, Any]:
        """Return every key and value that is not a note. Raises ModelLoadError for numbers that no component has."""
        check_sizes(self.values, self.path)
        return {key: value for key, value in self.values.items() if not key.startswith("_")}

    def whole_number(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """Return an integer from `minimum` to `maximum`. Raises ModelLoadError when it is missing or something else."""
        value = self._value(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.error(key, f"a whole number from {minimum} to {maximum}", value)
        return value

    def layer_count(self, key: str, default: int | None = None) -> int:
        """Return a number of layers. Raises ModelLoadError when it is missing or something else."""
        return self.whole_number(key, default, maximum=MAX_LAYERS)

    def even_number(self, key: str, default: int | None = None) -> int:
        """Return an even integer. Raises ModelLoadError when it is missing or something else."""
        value = self.whole_number(key, default)
        if value % 2:
            raise self.error(key, "an even number", value)
        return value

    def rotary_axes(
        self, key: str, size: int, length: int = 3, *, default: tuple[int, ...] | None = None, of: str = _HEAD
    ) -> tuple[int, ...]:
        """Return how many channels of a head carry each axis of the rotary positions. size: of a head, named `of`.
        length: number of axes. default: where the key is missing or null. Raises ModelLoadError when they are missing,
        odd, or not those of the head."""
        axes = default if default and self.values.get(key) is None else self.whole_numbers(key, length)
        if sum(axes) != size or any(axis % 2 for axis in axes):
            raise self.error(key, f"even numbers whose sum is {of}, {size}", list(axes))
        return axes

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite float or an integer. Raises ModelLoadError when it is missing or something else."""
        value = self._value(key, default)
        if not _is_number(value):
            raise self.error(key, "a number", value)
        return float(value)

    def one_of(self, key: str, choices: tuple[str, ...]) -> str:
        """Return one of the texts `choices`, the first where the key is missing. Raises ModelLoadError for another."""
        value = self.values.get(key, choices[0])
        if value not in choices:
            raise self.error(key, " or ".join(map(repr, choices)), value)
        return str(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """true or false. Raises ModelLoadError when it is missing or something else."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def whole_numbers(self, key: str, length: int) -> tuple[int, ...]:
        """`length` integers from 1 to MAX_SIZE. Raises ModelLoadError when they are missing or something else."""
        value = self._value(key, None)
        fits = isinstance(value, list) and all(type(v) is int and 1 <= v <= MAX_SIZE for v in value)
        if not fits or len(value) != length:
            raise self.error(key, f"a list of {length} whole numbers from 1 to {MAX_SIZE}", value)
        return tuple(value)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """`length` finite floats. Raises ModelLoadError when they are missing or something else."""
        value = self._value(key, None)
        if not isinstance(value, list) or len(value) != length or not all(map(_is_number, value)):
            raise self.error(key, f"a list of {length} numbers", value)
        return tuple(float(v) for v in value)

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Raises ModelLoadError for a key that is not among `known`: what it asks for would be left out."""
        for key in self.settings():
            # A quantization is judged before, with the files of the weights.
            if key not in known and key != "quantization_config":
                raise ModelLoadError(
                    f"{self.path}: key {shown(key)} is unknown to this runtime.{nearest(key, known)} The model was "
                    "made for something newer, or is of another kind than its class says"
                )

    def refuse_other_values(self, fixed: Mapping[str, object], why: str) -> None:
        """Raises ModelLoadError for a key of `fixed` with another value than it has there; true is not 1; a
        key may be missing. why: that value, for the message."""
        for key, only in fixed.items():
            value = self.values.get(key, only)
            if value != only or isinstance(value, bool) != isinstance(only, bool):
                raise self.error(key, f"{_in_json(only)}, {why}", value)

    def error(self, key: str, expected: str, value: object) -> ModelLoadError:
        """Return an error to raise for a key whose value is not what was expected."""
        return ModelLoadError(f"{self.path}: key {shown(key)}: expected {expected}, got {shown(value)}")

    def _value(self, key: str, default: T | None) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelLoadError(f"{self.path}: key {shown(key)} is missing")
        return default


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _in_json(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else shown(value)


def _kind(value: object) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
