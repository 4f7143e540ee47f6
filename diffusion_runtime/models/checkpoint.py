"""Checkpoints: the folder of a model, and its weights: safetensors alone, one file or sharded, read tensor by tensor.

A pickle (.bin, .pt, .ckpt) can run code when it is opened, so none is ever read.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

import torch
from torch import nn

from diffusion_runtime.errors import ModelLoadError, first_line, nearest
from diffusion_runtime.layers.weight_range import unusable_numbers
from diffusion_runtime.model_folder import INDEX_FILE, AnyFolder, check_model_files
from diffusion_runtime.models.published import model_of_name
from diffusion_runtime.models.weight_files import (
    DAMAGED,
    check_whole,
    find_weight_files,
    listed,
    refuse_quantised,
    refuse_single_file,
)
from diffusion_runtime.untrusted.files import check_file, check_path, check_place, expand_home

if TYPE_CHECKING:
    from safetensors import safe_open

# The name of the model that ships inside the package, and where it is.
EMBEDDED = "shapes"
EMBEDDED_FOLDER = Path(__file__).parents[1] / "assets" / "shapes"

# owner/name, which no path that starts with a dot, a slash or a tilde is.
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# Only files of components: many repositories hold a second, single-file copy of the weights at the top.
_HUB_FILES = (INDEX_FILE, "generation.json", "*/*.json", "*/*.txt", "*/*.model", "*/*.jinja", "*/*.safetensors")
# A text encoder's weights are model*.safetensors; some folders hold them a second time under the name of diffusers'
# components, which nobody reads.
_HUB_COPIES = ("text_encoder*/diffusion_pytorch_model*.safetensors",)


@dataclass(frozen=True)
class Piece:
    """A tensor of a checkpoint: its name and the shape it must have."""

    name: str
    shape: tuple[int, ...]


# (module, name of a parameter, its values): changes the values in place.
Arrange: TypeAlias = Callable[[nn.Module, str, torch.Tensor], None]


class WeightChange(ABC):
    """Something that is added to a checkpoint's weights while they are read, such as a LoRA."""

    @abstractmethod
    def check(self, component: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Whether it fits the tensors of a component (`transformer`), by name. Raises ModelLoadError that names what
        does not."""

    @abstractmethod
    def changed(self, component: str) -> frozenset[str]:
        """The tensors of a component that it changes, by name."""

    @abstractmethod
    def delta(self, component: str, name: str, weight: torch.Tensor) -> torch.Tensor | None:
        """What is added to tensor `name` of a component, in float32; None where nothing changes. weight: the tensor
        without any change, in float32."""


class Checkpoint:
    """The tensors of a component's folder. Close it, or use it as a context manager.

    folder: holds `{stem}.safetensors`, `{stem}.safetensors.index.json` with its shards, or a variant of either such as
    `{stem}.fp16.safetensors`. shapes: of every tensor, by name. changes: made to the tensors as they are read: each
    adds to the tensor as it is in the file, and the sum is rounded once. kept: tensors as they are in the file, which
    is not read for them again; those that are read are added.

    Raises ModelLoadError for files that are missing, truncated, damaged, pickled, quantised, or Git-LFS pointers.
    """

    def __init__(
        self,
        folder: Path,
        stem: str = "diffusion_pytorch_model",
        *,
        changes: Sequence[WeightChange] = (),
        kept: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.folder = folder
        self._changes = changes
        self._changed = frozenset().union(*(change.changed(folder.name) for change in changes))
        self._kept = kept
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, tuple[Path, safe_open]] = {}
        self._stack = contextlib.ExitStack()
        try:
            for path in find_weight_files(folder, stem):
                self._open(path)
            for change in changes:
                change.check(folder.name, self.shapes)
        except BaseException:
            self.close()
            raise

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Write tensor `name` into `target`, of the same shape, converting its dtype and device.

        Raises ModelLoadError for numbers that nothing can be computed with (layers/weight_range.py).
        """
        source = self._source(name, target.dtype)
        component = self.folder.name
        if name not in self._changed:
            target.copy_(source)
            return
        base = source.float()
        total = base.clone()
        for change in self._changes:
            delta = change.delta(component, name, base)
            if delta is not None:
                total += delta
        wrong = unusable_numbers(total, target.dtype)
        if wrong is not None:
            raise ModelLoadError(
                f"{self.folder}: tensor {name} with its LoRA {wrong}: use a smaller scale, or dtype bfloat16 or float32"
            )
        target.copy_(total)

    def _source(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Tensor `name` as it is in its file."""
        if self._kept is not None and name in self._kept:
            return self._kept[name]
        path, file = self._file_of[name]
        source: torch.Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
        wrong = unusable_numbers(source, dtype)
        if wrong is not None:
            raise ModelLoadError(f"{path}: tensor {name} {wrong}. {DAMAGED}")
        if self._kept is not None:
            self._kept[name] = source
        return source

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        check_whole(path)
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            dtypes: dict[str, str] = {}
            for name in file.keys():  # noqa: SIM118 - it is not a mapping
                tensor = file.get_slice(name)
                self.shapes[name], dtypes[name] = tuple(tensor.get_shape()), tensor.get_dtype()
                self._file_of[name] = path, file
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{path} is damaged or not a whole safetensors file ({first_line(error)}); copy or download it again"
            ) from error
        refuse_quantised(path, dtypes)


def load_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    pieces: Mapping[str, tuple[Piece, ...]],
    device: torch.device,
    dtype: torch.dtype,
    stays_float32: Callable[[str], bool] = lambda _: False,
    ignored: Callable[[str], bool] = lambda _: False,
    arrange: Arrange | None = None,
) -> None:
    """Fill `module` in place, each parameter once, on its device and in its dtype, without gradients.

    pieces: at least every parameter and buffer of the state dict -> the checkpoint's tensors that fill it, in order.
    stays_float32: parameters that are not converted to `dtype`; integers never are. ignored: checkpoint tensors that
        nothing reads. arrange: puts the rows of a parameter in the order that our layers have.

    Raises ModelLoadError that lists what is missing, unexpected or of another shape.
    """
    parameters = module.state_dict()
    _check_names(checkpoint, [piece for name in parameters for piece in pieces[name]], ignored)
    state = {}
    for name, parameter in parameters.items():
        floating = torch.float32 if stays_float32(name) else dtype
        target = torch.empty(
            parameter.shape, dtype=floating if parameter.is_floating_point() else parameter.dtype, device=device
        )
        _fill(target, name, checkpoint, pieces[name])
        if arrange is not None:
            arrange(module, name, target)
        state[name] = target
    module.load_state_dict(state, assign=True)
    module.requires_grad_(False).eval()


@torch.no_grad()
def rewrite_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    pieces: Mapping[str, tuple[Piece, ...]],
    changed: Collection[str],
    arrange: Arrange | None = None,
) -> None:
    """Fill the parameters of a loaded module that hold any of the checkpoint's tensors `changed`, one after the other
    and in place, with what `load_weights` would put there."""
    for name, parameter in module.state_dict(keep_vars=True).items():
        if any(piece.name in changed for piece in pieces[name]):
            target = torch.empty_like(parameter)
            _fill(target, name, checkpoint, pieces[name])
            if arrange is not None:
                arrange(module, name, target)
            parameter.copy_(target)


def _fill(target: torch.Tensor, name: str, checkpoint: Checkpoint, pieces: Sequence[Piece]) -> None:
    flat, start = target.view(-1), 0
    for piece in pieces:
        stop = start + math.prod(piece.shape)
        checkpoint.copy_into(piece.name, flat[start:stop].view(piece.shape))
        start = stop
    assert start == target.numel(), f"{name}: its pieces hold {start} numbers, it has {target.numel()}"


def read_tensors(path: Path, key: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Every tensor of one safetensors file, on the CPU, and its metadata. key: what named it.

    Raises ConfigError for a path that is no file's, ModelLoadError for a file that is missing, damaged, or of another
    kind.
    """
    from safetensors import SafetensorError, safe_open

    check_file(path, key, missing=ModelLoadError)
    if path.suffix != ".safetensors":
        raise ModelLoadError(f"{path}: expected a .safetensors file; a pickle can run code when it is opened")
    check_whole(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
            return tensors, dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged or not a whole safetensors file ({first_line(error)})") from error


def own_pieces(module: nn.Module) -> dict[str, tuple[Piece, ...]]:
    """Pieces for a module whose names are the checkpoint's."""
    return {name: (Piece(name, tuple(tensor.shape)),) for name, tensor in module.state_dict().items()}


def _check_names(checkpoint: Checkpoint, expected: list[Piece], ignored: Callable[[str], bool]) -> None:
    shapes = checkpoint.shapes
    wanted = {piece.name for piece in expected}
    problems = []
    missing = [piece.name for piece in expected if piece.name not in shapes]
    if missing:
        problems.append(f"{len(missing)} of {len(expected)} tensors are missing: {listed(missing)}")
    unexpected = [name for name in shapes if name not in wanted and not ignored(name)]
    if unexpected:
        problems.append(f"{len(unexpected)} tensors are unexpected: {listed(unexpected)}")
    reshaped = [
        f"{piece.name} is {list(shapes[piece.name])}, expected {list(piece.shape)}"
        for piece in expected
        if piece.name in shapes and shapes[piece.name] != piece.shape
    ]
    if reshaped:
        problems.append(f"{len(reshaped)} tensors have another shape than config.json says: {listed(reshaped)}")
    if problems:
        raise ModelLoadError(
            f"{checkpoint.folder}: the weights do not fit config.json beside them. " + ". ".join(problems)
        )


def resolve_model_folder(model_path: str, *, weights: bool = True) -> Path:
    """The folder behind `shapes`, the path of a folder, the name of a published model such as `wan2.1-1.3b`, or a hub
    id such as `Wan-AI/Wan2.1-T2V-1.3B-Diffusers`.

    What is on the hub is downloaded into the hub's own cache, or taken from there: json, txt, model and safetensors
    files, never a pickle. weights: False leaves the safetensors files out, for whoever reads the json alone.

    Raises ModelLoadError that says what to type instead.
    """
    if model_path == EMBEDDED:
        if (EMBEDDED_FOLDER / INDEX_FILE).is_file():
            return EMBEDDED_FOLDER
        raise ModelLoadError(f"the embedded model is not in {EMBEDDED_FOLDER}; install diffusion-runtime again")
    path = check_path(expand_home(model_path), "model_path")
    if path.is_dir():
        if not (path / INDEX_FILE).exists():
            for file in sorted(path.iterdir()):
                refuse_single_file(file)
        check_model_files(path)
        return path
    if path.is_file():
        refuse_single_file(path)
        raise ModelLoadError(f"{model_path} is a file; give the folder that holds {INDEX_FILE}, such as {path.parent}")
    check_place(path, "model_path")
    named = model_of_name(model_path)
    if named is not None:
        return _download(named.model_path, weights)
    if not _HUB_ID.fullmatch(model_path):
        raise ModelLoadError(
            f"there is no model folder {model_path}.{_siblings(path)} Give `{EMBEDDED}` (the embedded model), a "
            "diffusers folder, a name that `diffusion-runtime models` lists, or a hub id such as "
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
        )
    return _download(model_path, weights)


def fetch_weights(model_path: str, folder: AnyFolder) -> None:
    """Download the safetensors of a model into `folder`, which resolve_model_folder found with weights=False; a local
    folder has them. Raises what resolve_model_folder raises."""
    is_local = model_path == EMBEDDED or check_path(expand_home(model_path), "model_path").is_dir()
    found = folder if is_local else resolve_model_folder(model_path)
    if str(found) != str(folder):
        raise ModelLoadError(f"{model_path} has changed on the hub since it was opened ({folder}, {found}): try again")


def _siblings(path: Path) -> str:
    """What is beside a missing path: the names most like it, else all of them."""
    parent = path.absolute().parent
    if not parent.is_dir():
        return f" Its parent {parent} does not exist either."
    names = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())
    close = nearest(path.name, names)
    return close if "Did you mean" in close else f" In {parent} there is: {listed(names) or 'no folder'}."


def _download(hub_id: str, weights: bool) -> Path:
    """The folder in the hub's cache that holds `hub_id`, brought up to date when there is a network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = [pattern for pattern in _HUB_FILES if weights or "safetensors" not in pattern]
    instead = f"or give the path of a copy, or {EMBEDDED!r} for the embedded model, which needs no network"
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=list(_HUB_COPIES)))
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{hub_id}: its terms must be accepted first, at https://huggingface.co/{hub_id}; then `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"there is no folder {hub_id} here and no such model on the hub, or it is private: check the spelling, or "
            f"`hf auth login`; {instead}.{_beside(hub_id)}"
        ) from error
    except LocalEntryNotFoundError as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        why = "HF_HUB_OFFLINE is set: unset it" if offline else "the hub cannot be reached: check the network"
        raise ModelLoadError(
            f"{hub_id} is neither a folder here nor whole in the hub's cache, and {why}; {instead}.{_beside(hub_id)}"
        ) from error
    except Exception as error:  # whatever the hub's transport raises: broken connections, a full disk, bad answers
        raise ModelLoadError(
            f"{hub_id} cannot be downloaded ({first_line(error)}); try again: it goes on where it stopped"
        ) from error
    check_model_files(folder)
    return folder


def _beside(hub_id: str) -> str:
    """What is in the local folder that a hub id would name, if there is one: it may have been meant."""
    path = Path(hub_id)
    return _siblings(path) if path.parent.is_dir() else ""
