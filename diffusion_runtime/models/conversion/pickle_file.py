"""Tensors of a pickled checkpoint (.pt), by `torch.load(weights_only=True)` and nothing else: no function that a file
names is called except those that make tensors.

The sizes that a file declares are checked against the file before torch opens it, and tensors stay in pages of the file
(mmap) until they are read.
"""

from __future__ import annotations

import itertools
import pickle
import pickletools
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from diffusion_runtime.errors import ConfigError, ModelLoadError, first_line, shown, shown_name
from diffusion_runtime.untrusted.files import check_file
from diffusion_runtime.weights.tensor_files import TensorFile, TensorHead
from diffusion_runtime.weights.tensor_part import Ranges
from diffusion_runtime.weights.weight_files import listed

MAX_ENTRIES = 20_000
"""Of the archive. Wan 14B has 1,095 tensors, and a checkpoint of training four such models."""
MAX_PICKLE_BYTES = 4 * 2**20
"""Of the pickle beside the tensors. Every byte may be an instruction, and torch reads about a million per second: so a
file of few tensors has a short one, of at most these bytes for each entry and some for the rest."""
_PICKLE_BYTES_OF_ENTRY, _PICKLE_BYTES_OF_REST = 2048, 256 * 2**10
MAX_WORK_PER_BYTE = 50
"""Values that the instructions of a pickle may go through for each of its bytes. A tuple of a tuple of tuples is hashed
whole, and a text may be copied again and again: a few hundred bytes can ask for years, or for all memory."""
MAX_SHARING = 2
"""How many times the bytes of a file its tensors may be together: some models tie two of theirs."""
MAX_DEPTH = 6
TOP = "(top)"
"""The key of a file whose tensors stand at its top."""
_KINDS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# Parts that data-parallel training, torch.compile and checkpointing put between the names of modules.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module", "_forward_module"})
# Names of the wrapper of the model's class, in front of all names.
_MODEL = "model."


@dataclass(frozen=True)
class PickledTensors:
    """The tensors of one key of a checkpoint, by their names in the file."""

    key: str
    tensors: Mapping[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def read_checkpoint(path: Path, key: str = "FILE") -> tuple[PickledTensors, ...]:
    """Return the mappings of tensors in a file, each under its key; tensors of nested mappings are joined by dots from
    the first key on. key: what named the file, for messages.

    Raises ConfigError for a path that no file has, ModelLoadError for a file that is no checkpoint of tensors, with its
    other contents.
    """
    check_file(path, key, missing=ModelLoadError)
    _check_archive(path)
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelLoadError(
            f"{path}: not a pickle of tensors: it asks for {_asked_for(path) or first_line(error)}. Opening it could "
            "run code, so it is not opened; ask its authors for a state dict"
        ) from error
    except Exception as error:
        # A damaged pickle raises whatever its instructions lead to.
        raise ModelLoadError(
            f"{path}: damaged, or not a checkpoint of torch ({first_line(error)}): copy or download it again"
        ) from error
    if not isinstance(content, Mapping):
        raise ModelLoadError(f"{path}: expected a mapping of names to tensors, got {shown(content)}")
    groups = tuple(_groups(path, content))
    if not groups:
        raise ModelLoadError(f"{path}: there is no tensor in it; keys: {listed(map(str, content))}")
    return groups


def _check_archive(path: Path) -> None:
    """Check that a file is an archive of torch that unpacks to no more than its size. Raises ModelLoadError."""
    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ModelLoadError(f"{path}: a damaged archive ({first_line(error)}); copy or download it again") from error
    if not is_archive:
        raise ModelLoadError(
            f"{path}: expected an archive as torch.save writes since 1.6; older pickles, and files of another kind, "
            "are not read: save it again with a newer torch"
        )
    if len(entries) > MAX_ENTRIES:
        raise ModelLoadError(f"{path}: expected at most {MAX_ENTRIES} entries, got {len(entries)}")
    packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ModelLoadError(f"{path}: torch packs no tensors, and these are: {listed(map(shown_name, packed))}")
    size = sum(entry.file_size for entry in entries)
    if size > path.stat().st_size:
        raise ModelLoadError(f"{path}: claims {size} bytes, and has {path.stat().st_size}")
    most = min(MAX_PICKLE_BYTES, _PICKLE_BYTES_OF_REST + _PICKLE_BYTES_OF_ENTRY * len(entries))
    for entry in entries:
        if not entry.filename.endswith("data.pkl"):
            continue
        if entry.file_size > most:
            raise ModelLoadError(
                f"{path}: expected a pickle of at most {most} bytes beside {len(entries) - 1} other entries, got "
                f"{entry.file_size}"
            )
        try:
            with zipfile.ZipFile(path) as archive:
                _check_work(path, archive.read(entry))
        except (zipfile.BadZipFile, OSError, ValueError, LookupError) as error:
            raise ModelLoadError(
                f"{path}: a damaged pickle ({first_line(error)}); copy or download it again"
            ) from error


# Instructions that put values into the one below them.
_FILLING = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD", "ADDITEMS"})
_STORING, _FETCHING = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), ("GET", "BINGET", "LONG_BINGET")
# It makes as many bytes as it is told, and torch allows it.
_REFUSED = ("builtins bytearray", "__builtin__ bytearray")


def _check_work(path: Path, code: bytes) -> None:
    """Check that a pickle asks for no more than its own size, without running it: each value is the number of others
    that making or hashing it goes through. Raises ModelLoadError, and what pickletools raises for a damaged one."""
    stack: list[list[int]] = []
    memo: dict[object, list[int]] = {}
    marks: list[int] = []
    work = 0
    for operation, argument, _ in pickletools.genops(code):
        name = operation.name
        if name == "MARK":
            marks.append(len(stack))
        elif name in _FETCHING:
            stack.append(memo[argument])
        elif name in _STORING:
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "GLOBAL" and argument in _REFUSED:
            raise ModelLoadError(f"{path}: not a pickle of tensors: it asks for {argument}; ask for a state dict")
        else:
            below = len(operation.stack_before)
            if pickletools.markobject in operation.stack_before:
                below = len(stack) - marks.pop() + operation.stack_before.index(pickletools.markobject)
            taken = stack[len(stack) - below :] if below else []
            del stack[len(stack) - below :]
            values = sum(value for (value,) in taken)
            work += values
            if name in _FILLING:
                # What it holds stays what it is, and is only counted.
                taken[0][0] += len(taken) - 1
                stack.append(taken[0])
            elif operation.stack_after:
                stack.append([1 + values + (len(argument) if isinstance(argument, str | bytes) else 0)])
        if work > MAX_WORK_PER_BYTE * len(code):
            raise ModelLoadError(
                f"{path}: not a pickle of tensors: its {len(code)} bytes go through more than {work} values; ask for a "
                "state dict"
            )


def _asked_for(path: Path) -> str:
    """Return the functions and classes that a refused pickle names, read without running it; empty where that fails."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:
        return ""
    return listed(map(shown_name, sorted(names)))


def _groups(path: Path, content: Mapping[object, object]) -> Iterator[PickledTensors]:
    top = _named(((str(name), value) for name, value in content.items() if isinstance(value, torch.Tensor)), path)
    if top:
        yield PickledTensors(TOP, _checked(path, top))
    for name, value in content.items():
        if isinstance(value, Mapping):
            tensors = _named(_flattened(path, value, "", 1, itertools.count(1)), path)
            if tensors:
                yield PickledTensors(str(name), _checked(path, tensors))


def _named(tensors: Iterable[tuple[str, torch.Tensor]], path: Path) -> dict[str, torch.Tensor]:
    """Return tensors by name. Raises ModelLoadError for two of one name, and for more than a file of its size holds: a
    few mappings that name each other many times are millions of tensors."""
    named: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name in named:
            raise ModelLoadError(f"{path}: two tensors are {shown_name(name)}")
        if len(named) == MAX_ENTRIES:
            raise ModelLoadError(f"{path}: expected at most {MAX_ENTRIES} tensors under one key")
        named[name] = tensor
    return named


def _flattened(
    path: Path, content: Mapping[object, object], prefix: str, depth: int, visits: Iterator[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    if depth > MAX_DEPTH:
        raise ModelLoadError(f"{path}: expected tensors at most {MAX_DEPTH} mappings deep")
    if next(visits) > MAX_ENTRIES:
        raise ModelLoadError(f"{path}: expected at most {MAX_ENTRIES} mappings under one key")
    for name, value in content.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _flattened(path, value, f"{prefix}{name}.", depth + 1, visits)


def _checked(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Check that tensors are plain numbers in the file, and no more than it holds. Raises ModelLoadError."""
    odd = [
        name
        for name, tensor in tensors.items()
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.device.type != "cpu"
    ]
    if odd:
        raise ModelLoadError(f"{path}: expected plain tensors, these are not: {listed(map(shown_name, odd))}")
    # One number with strides of 0 can claim to be 10^12.
    larger = [name for name, tensor in tensors.items() if tensor.nbytes > tensor.untyped_storage().nbytes()]
    if larger:
        raise ModelLoadError(
            f"{path}: tensors larger than what the file holds of them: {listed(map(shown_name, larger))}"
        )
    storages = {each.data_ptr(): each.nbytes() for each in (tensor.untyped_storage() for tensor in tensors.values())}
    held, claimed = sum(storages.values()), sum(tensor.nbytes for tensor in tensors.values())
    if claimed > MAX_SHARING * held:
        raise ModelLoadError(
            f"{path}: its tensors are {claimed} bytes, and share {held}: expected at most {MAX_SHARING} times as many"
        )
    return {name: tensor.detach() for name, tensor in tensors.items()}


def without_wrappers(name: str) -> str:
    """Return the name of a tensor in the model itself: `model._fsdp_wrapped_module.blocks.0.ffn.0.weight` is
    `blocks.0.ffn.0.weight`."""
    plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return plain.removeprefix(_MODEL)


class PickleFile(TensorFile):
    """The tensors of one key, under the names that the model gives them. Raises ModelLoadError for two of one name."""

    metadata: Mapping[str, str] = {}

    def __init__(self, path: Path, group: PickledTensors) -> None:
        self.path = path
        self._tensors: dict[str, torch.Tensor] = {}
        for name, tensor in group.tensors.items():
            plain = without_wrappers(name)
            if plain in self._tensors:
                raise ModelLoadError(f"{path}: two tensors are {shown_name(plain)} once their wrappers are left out")
            self._tensors[plain] = tensor
        self.heads = {
            name: TensorHead(tuple(tensor.shape), _KINDS.get(tensor.dtype, str(tensor.dtype)))
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, rows: slice | None = None, columns: Ranges | None = None) -> torch.Tensor:
        if columns is not None:
            raise ConfigError("a pickled checkpoint is read by rows alone")
        tensor = self._tensors[name]
        return tensor if rows is None else tensor[rows]

    def close(self) -> None:
        self._tensors = {}


def choose(
    path: Path, groups: tuple[PickledTensors, ...], key: str | None, preferred: tuple[str, ...]
) -> PickledTensors:
    """Return the group of a key, or the first preferred one that is there; the only one where there is one alone.

    Raises ConfigError that lists the groups.
    """
    by_key = {group.key: group for group in groups}
    there = listed(f"{shown_name(group.key)} ({len(group.tensors)} tensors)" for group in groups)
    if key is not None:
        if key not in by_key:
            raise ConfigError(f"--key: {path} has no {shown_name(key)}; there are {there}")
        return by_key[key]
    for name in preferred:
        if name in by_key:
            return by_key[name]
    if len(groups) == 1:
        return groups[0]
    raise ConfigError(f"{path} holds {there}: say which by --key")
