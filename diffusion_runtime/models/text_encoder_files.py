"""Text encoders whose weights stay in their files, and are read when they are used (matched_tensors.py says which
tensor fills which parameter)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from diffusion_runtime.core.model_folder import LINKS, AnyFolder, part_prefix, read_index, read_json
from diffusion_runtime.decoders.autoencoder import DiffusersComponent
from diffusion_runtime.errors import ModelLoadError, shown_name
from diffusion_runtime.memory.waiting_weights import is_waiting
from diffusion_runtime.models.encoder_file import num_embeddings_of, open_encoder_file
from diffusion_runtime.models.matched_tensors import matched_tensors, why_unmatched
from diffusion_runtime.text_encoders.encoder_size import shapes_by_config
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.offloaded import modules_of
from diffusion_runtime.weights.checkpoint import Checkpoint, Piece, WeightChange
from diffusion_runtime.weights.lora.text_encoder_names import is_text_encoder, text_module
from diffusion_runtime.weights.stored_tensors import stored_rows
from diffusion_runtime.weights.stored_weights import Conversions, StoredWeights
from diffusion_runtime.weights.tensor_files import TensorFile
from diffusion_runtime.weights.weight_files import GGUF, GGUF_LINK, find_weight_files, listed
from diffusion_runtime.weights.weight_loading import own_pieces

_logger = logging.getLogger("diffusion_runtime")

# transformers' name for a file of weights.
STEM = "model"
# A component of diffusers' between an encoder and a transformer.
CONNECTORS = "connectors"
# Opens files whose tensors are changed as they are read.
_Open = Callable[[Sequence[WeightChange]], Checkpoint]


def text_components(folder: AnyFolder) -> list[str]:
    """Return the text components of transformers in model_index.json."""
    return [
        name
        for name, entry in read_index(folder).items()
        if name.startswith("text_encoder") and isinstance(entry, list) and entry[:1] == ["transformers"]
    ]


def is_elsewhere(folder: Path) -> bool:
    """Return whether a component's folder is one of links to files that a flag names."""
    return folder.parent.name.endswith(LINKS)


def open_encoder(folder: Path, stack: ExitStack) -> list[TensorFile]:
    """Open the files of weights in a text encoder's folder, closed with the stack. Raises ModelLoadError for files that
    are missing, damaged, or stored in a way that is not read."""
    paths = find_weight_files(folder, STEM)
    number = num_embeddings_of(read_json(folder / "config.json")) if paths[0].suffix == GGUF else None
    files = []
    for path in paths:
        files.append(open_encoder_file(path, part_prefix(folder), number))
        stack.callback(files[-1].close)
    return files


def encoder_shapes(folder: Path, class_name: str) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each tensor of a transformers encoder, by name: of the weight files where they are here, of
    the config where not. class_name: as in model_index.json. Raises ModelLoadError."""
    if not is_elsewhere(folder):
        try:
            find_weight_files(folder, STEM)
        except ModelLoadError:
            return shapes_by_config(folder, class_name)
    with ExitStack() as stack:
        return {name: rows[0].shape for name, rows in stored_rows(open_encoder(folder, stack)).items()}


def why_whole(dtype: torch.dtype) -> str:
    """Return why the weights of text encoders cannot wait in their files in a dtype; empty where they can."""
    if dtype == torch.float16:
        return "in float16, transformers keeps parts of encoders in float32; with --dtype bfloat16 they are streamed"
    return ""


def keep_text_in_files(
    encoder: TextEncoder,
    folder: AnyFolder,
    others: Sequence[DiffusersComponent],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[nn.Module, StoredWeights]:
    """Return where the weights of each module wait. encoder: built for the meta device, whose weights wait; others:
    components of diffusers' that may be among its modules.

    Raises ModelLoadError for a module whose parameters cannot be told from each other in the files, or are not there.
    """
    kept = {}
    for module in modules_of(encoder):
        assert is_waiting(module), f"{type(module).__name__} was read"
        _, opens, pieces = source_of(module, folder, others)
        conversions = Conversions(opens, pieces, device, dtype, lambda _: False, None)
        kept[module] = StoredWeights(module, conversions, ())
    return kept


class TextChanges:
    """Changes of text encoders, such as a LoRA, and where the weights that they change are.

    folder: of the model; others: components of diffusers' that take part in its text. changes: those that are made, by
    modules' names without the levels that loaders put around them (lora/text_encoder_names.py).
    """

    def __init__(
        self, folder: AnyFolder, others: Sequence[DiffusersComponent], changes: Sequence[WeightChange] = ()
    ) -> None:
        self.changes = tuple(changes)
        self._folder = folder
        self._others = others
        self._components = [*text_components(folder), *(component.name for component in others)]

    def shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return by component the shapes of the tensors that may be changed. Raises ModelLoadError."""
        index = read_index(self._folder)
        found: dict[str, dict[str, tuple[int, ...]]] = {
            name: {
                text_module(tensor): shape
                for tensor, shape in encoder_shapes(self._folder / name, str(index[name][1])).items()
            }
            for name in text_components(self._folder)
        }
        for component in self._others:
            module = component.build(self._folder)
            found[component.name] = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        return found

    def apply(self, encoder: TextEncoder, before: Sequence[WeightChange] = ()) -> None:
        """Give a loaded encoder these changes of the weights in its files. before: changes that it has, of which those
        that are not made again are taken back.

        Raises ModelLoadError for files that do not hold its weights, and for changes that do not fit them.
        """
        if not any(self._changed(component, before) for component in self._components):
            return
        for module in modules_of(encoder):
            component, opens, pieces = source_of(module, self._folder, self._others, "changed", "--lora")
            if not (changed := self._changed(component, before)):
                continue
            renamed = self._renamed(component, pieces)
            own = {piece.name: name for name, (piece,) in pieces.items()}
            state = module.state_dict(keep_vars=True)
            with opens(renamed) as checkpoint, torch.no_grad():
                for tensor in own:
                    if _name_in(component, tensor) in changed:
                        checkpoint.copy_into(tensor, state[own[tensor]].data)

    def waiting(self, homes: Mapping[nn.Module, StoredWeights]) -> None:
        """Change weights that wait in their files, when they are read; otherwise like `apply`."""
        for module, home in homes.items():
            component, _, pieces = source_of(module, self._folder, self._others, "changed", "--lora")
            home.change(self._renamed(component, pieces))

    def _changed(self, component: str, before: Sequence[WeightChange]) -> frozenset[str]:
        return frozenset().union(*(change.changed(component) for change in (*self.changes, *before)))

    def _renamed(self, component: str, pieces: Mapping[str, tuple[Piece, ...]]) -> list[WeightChange]:
        names = {piece.name: _name_in(component, piece.name) for several in pieces.values() for piece in several}
        for change in self.changes:
            unread = sorted(change.changed(component) - set(names.values()))
            if unread:
                _logger.warning(
                    "%s: %d weights that a LoRA changes are not used by this model, and stay out: %s",
                    component,
                    len(unread),
                    listed(unread),
                )
        return [_Renamed(change, names) for change in self.changes if change.changed(component)]


def _name_in(component: str, tensor: str) -> str:
    return text_module(tensor) if is_text_encoder(component) else tensor


class _Renamed(WeightChange):
    """A change of tensors that files have by other names. names: the change's, by the files'."""

    def __init__(self, change: WeightChange, names: Mapping[str, str]) -> None:
        self._change = change
        self._names = names

    def check(self, component: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check the change by the names of its own."""
        # By the names that all of a file's tensors have there, those that this module does not read among them.
        self._change.check(component, {_name_in(component, name): shape for name, shape in shapes.items()})

    def changed(self, component: str) -> frozenset[str]:
        """Return the files' names of what the change concerns."""
        changed = self._change.changed(component)
        return frozenset(name for name, own in self._names.items() if own in changed)

    def delta(self, component: str, name: str, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the change of a tensor by the file's name of it."""
        return self._change.delta(component, self._names[name], weight)


def source_of(
    module: nn.Module,
    folder: AnyFolder,
    others: Sequence[DiffusersComponent],
    done: str = "read by blocks",
    flag: str = "--memory-limit",
) -> tuple[str, _Open, Mapping[str, tuple[Piece, ...]]]:
    """Return the component of a module, what opens its files, and what of them fills each parameter. done: what is done
    to its weights; flag: what asks for it. Raises ModelLoadError where names do not tell."""
    for component in others:
        if component.class_name == type(module).__name__:
            return component.name, functools.partial(_open_component, component, module, folder), own_pieces(module)
    found: list[tuple[str, _Open, Mapping[str, tuple[Piece, ...]]]] = []
    # By where the weights are.
    unmatched: dict[str, Mapping[str, Sequence[str]]] = {}
    for name in text_components(folder):
        opens = functools.partial(open_text, folder / name)
        with opens(()) as checkpoint:
            place = str(checkpoint.elsewhere or checkpoint.folder)
            tensors, unmatched[place] = matched_tensors(module, checkpoint.shapes)
            pieces = {own: (Piece(tensor, checkpoint.shapes[tensor]),) for own, tensor in tensors.items()}
            if not unmatched[place]:
                _refuse_unread(place, checkpoint.shapes, pieces)
                found.append((name, opens, pieces))
    if len(found) != 1:
        # From the component that has the most of them.
        place, lacks = min(unmatched.items(), key=lambda each: len(each[1]))
        raise ModelLoadError(
            f"{place}: the weights of {type(module).__name__} cannot be {done}: {why_unmatched(module, lacks)}. Copy "
            f"or download it again, or leave out {flag}"
        )
    return found[0]


# Positions 0, 1, 2, ... of older files of CLIP.
_COUNTERS = ("position_ids",)


def _refuse_unread(where: str, shapes: Mapping[str, object], pieces: Mapping[str, tuple[Piece, ...]]) -> None:
    """Raises ModelLoadError for tensors in a layer whose weight is read that the model has no place for, such as a bias
    or a scale: they would change the result. Those of other layers, such as a decoder's, are not used."""
    read = {piece.name for several in pieces.values() for piece in several}
    layers = {name.rpartition(".")[0] for name in read if "." in name}
    unread = [
        name
        for name in shapes
        if name not in read and name.rpartition(".")[0] in layers and not name.endswith(_COUNTERS)
    ]
    if unread:
        raise ModelLoadError(
            f"{where}: {len(unread)} tensors beside weights that are read have no place in the model, and would "
            f"change its result: {listed([shown_name(name) for name in unread])}. The file is of another model, or in "
            "a format that is not read"
        )


def open_text(folder: Path, changes: Sequence[WeightChange] = ()) -> Checkpoint:
    """Open the weights of a text encoder's folder. Raises what open_encoder raises."""
    link = folder / GGUF_LINK
    if not link.is_symlink():
        return Checkpoint(folder, STEM, changes=changes, reads_quantized=True)
    return Checkpoint(
        folder, changes=changes, source=lambda stack: stored_rows(open_encoder(folder, stack)), place=link.readlink()
    )


def _open_component(
    component: DiffusersComponent, module: nn.Module, folder: AnyFolder, changes: Sequence[WeightChange]
) -> Checkpoint:
    return component.checkpoint(module, folder, changes)
