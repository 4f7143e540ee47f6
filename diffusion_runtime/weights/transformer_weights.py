"""TransformerWeights: the files of a transformer's weights, and how they fill a module without weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.errors import ConfigError, ModelLoadError
from diffusion_runtime.layers.eight_bit_linear import quantized_weights
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.weights.checkpoint import Checkpoint, Piece, Source, TensorSource, WeightChange
from diffusion_runtime.weights.lora.names import LoraNames
from diffusion_runtime.weights.quantization import Quantization
from diffusion_runtime.weights.stored_tensors import Rows, stored_rows
from diffusion_runtime.weights.stored_weights import Conversions, StoredWeights
from diffusion_runtime.weights.tensor_names import Expected
from diffusion_runtime.weights.tensor_parallel import TensorParallel, shared_pieces
from diffusion_runtime.weights.transformer_files import TransformerFile, open_tensor_file
from diffusion_runtime.weights.weight_files import COMPONENT_STEM, GGUF, find_weight_files, is_dequantized
from diffusion_runtime.weights.weight_loading import (
    Arrange,
    MakeEmpty,
    check_names,
    check_parts,
    expect_stored,
    load_weights,
    rewrite_weights,
    stored_weight,
)

# By component, the module that its tensors fill.
Modules: TypeAlias = Mapping[str, nn.Module]
# (component, its module): allocates the tensors for its weights; None for the model's device.
RoomFor: TypeAlias = Callable[[str, nn.Module], MakeEmpty | None]


def no_room(_: str, __: nn.Module) -> None:
    """Return None: the weights lie on the model's device."""


@dataclass(frozen=True, kw_only=True)
class TransformerWeights:
    """The weights of a model's transformers, in files.

    family: in tensor_parallel.yaml. pieces: by component, our parameter name -> the checkpoint tensors that fill it.
    lora_names: names of the modules in LoRA files. stays_float32: parameters that are not converted to the model's
    dtype. components: folders of the weights; joined_components: those read with them, under their name and a dot, from
    their folders where no file of `files` holds them. shares_joined: whether tensor_parallel.yaml has their layers.
    prepare: adds the parts to a component's module that only the names of its checkpoint's tensors show; is_ignored:
    tensors of a checkpoint that nothing reads; arrange: see load_weights. files: weights that are read from elsewhere
    than the folder; known_names: the modules of all families. tensor: the processes that share the weights, None for
    one alone.

    The methods take modules without weights by component, and raise ModelLoadError for files that are missing, damaged
    or not this model's.
    """

    folder: AnyFolder
    family: str
    pieces: Callable[[str], Mapping[str, tuple[Piece, ...]]]
    lora_names: LoraNames
    stays_float32: Callable[[str], bool]
    components: tuple[str, ...] = ("transformer",)
    joined_components: tuple[str, ...] = ()
    shares_joined: bool = False
    prepare: Callable[[nn.Module, Collection[str]], object] | None = None
    is_ignored: Callable[[str], bool] = lambda _: False
    arrange: Arrange | None = None
    files: tuple[TransformerFile, ...] = ()
    known_names: Callable[[], Sequence[LoraNames]] = lambda: ()
    tensor: TensorParallel | None = None

    def shared_by(self, group: RankGroup) -> TransformerWeights:
        """Return the weights shared by processes. Raises ConfigError for weights that they cannot share."""
        if group.size == 1:
            return self
        blocks = [file.path for file in self.files if file.place.suffix.lower() == GGUF]
        if blocks:
            raise ConfigError(
                f"parallel.tensor_parallel_size: {blocks[0]}: the blocks of a GGUF file are not shared by processes in "
                "this version; leave out --tensor-parallel-size, or use a safetensors file"
            )
        if self.joined_components and not self.shares_joined:
            raise ConfigError(
                f"parallel.tensor_parallel_size: the weights of a {self.joined_components[0]} are not shared by "
                "processes in this version; leave out --tensor-parallel-size; --ulysses-degree works"
            )
        return dataclasses.replace(self, tensor=TensorParallel.of(self.family, group))

    def with_files(
        self, files: Sequence[TransformerFile], known: Callable[[], Sequence[LoraNames]]
    ) -> TransformerWeights:
        """Return the weights with files from elsewhere. known: the names of all families.

        Raises ConfigError for a component that the model does not have, and what opening the files raises.
        """
        for file in files:
            if file.component not in self.components:
                raise ConfigError(
                    f"{file.key}: the model has one transformer, and no {file.component}; leave out "
                    f"--{file.key.replace('_', '-')}"
                )
        weights = dataclasses.replace(self, files=tuple(files), known_names=known)
        for file in files:
            file.check_settings(self.folder)
            weights._checkpoint(file.component).close()
        return weights

    def share_layers(self, module: nn.Module) -> None:
        """Replace the layers whose weights several processes share by this process's part of them."""
        if self.tensor is not None:
            self.tensor.apply(module)

    def make_room(self, modules: Modules, changes: Sequence[WeightChange] = ()) -> bool:
        """Give empty modules the parts that only the names of the files' tensors show, such as gates, and those that
        `changes` give; these alone where there are no files yet, or none that can be read. Returns whether all files
        could be read."""
        reads_files = True
        for component, module in modules.items():
            try:
                with self._checkpoint(component, changes) as checkpoint:
                    self._make_room(module, checkpoint.shapes)
            except ModelLoadError:
                reads_files = False
                self._make_room_for(component, module, changes)
        return reads_files

    def expect_stored(
        self,
        modules: Modules,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
        quantization: Quantization | None = None,
    ) -> None:
        """Make empty modules what loading makes of them, except for the numbers, so that their bytes count: with the
        parts, the quantised layers and the dtypes in the heads of their files; by the config alone where there are no
        files yet, or none that can be read. The arguments are those of `load`."""
        for component, module in modules.items():
            try:
                with self._checkpoint(component, changes) as checkpoint:
                    self._ready(component, module, checkpoint, dtype, quantization)
            except ModelLoadError:
                self._make_room_for(component, module, changes)
                self.set_loaded_dtypes(module, dtype)

    def check(
        self, modules: Modules, components: Collection[str] | None = None, changes: Sequence[WeightChange] = ()
    ) -> None:
        """Read the heads of the files, and raise ModelLoadError for those that cannot be read or do not fit.
        components: those to check, None for all. changes: such as LoRA files."""
        for component, module in modules.items():
            if components is not None and component not in components:
                continue
            with self._checkpoint(component, changes) as checkpoint:
                self._make_room(module, checkpoint.shapes)
                check_names(module, checkpoint, self.pieces(component), self.is_ignored)

    @property
    def in_files(self) -> tuple[str, ...]:
        """The components, joined ones included, whose weights are in `files`. Raises ModelLoadError for files that
        cannot be read."""
        joined = [name for file in self.files for name in self.joined_in(file)]
        return (*(file.component for file in self.files), *dict.fromkeys(joined))

    def joined_in(self, file: TransformerFile) -> tuple[str, ...]:
        """Return the joined components that have tensors in a transformer's file, as ComfyUI's files do. Raises
        ModelLoadError for a file that cannot be read."""
        if not self.joined_components:
            return ()
        names = [name.rpartition(".")[0] for name in file.shapes()]
        modules = {rows.module for name in names for rows in self.lora_names.find(name, flattened=False)}
        known = tuple(modules) + tuple(names)
        return tuple(each for each in self.joined_components if any(name.startswith(f"{each}.") for name in known))

    def expected(self, component: str, beside: Sequence[str] = ()) -> Expected:
        """Return the tensors that a file of a transformer must have. beside: joined components that it lacks."""
        beside = tuple(f"{name}." for name in beside)
        shapes = {name: shape for name, shape in self.shapes(component).items() if not name.startswith(beside)}
        return Expected(shapes, self.lora_names, self.known_names, self.is_ignored)

    def shapes(self, component: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a component's tensors, by their names in a checkpoint."""
        return {piece.name: piece.shape for several in self.pieces(component).values() for piece in several}

    def dequantizes(self, component: str) -> bool:
        """Return whether weights that the folder has in 8 bits are dequantised at load; those of `files` stay as they
        are stored."""
        return all(file.component != component for file in self.files) and is_dequantized(self.folder, component)

    def load(
        self,
        modules: Modules,
        device: torch.device,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
        quantization: Quantization | None = None,
        room_for: RoomFor = no_room,
    ) -> None:
        """Read the weights into empty modules: in eval mode, without gradients.

        changes: made to the checkpoint's tensors as they are read, such as a LoRA. quantization: keeps the layers that
        are quantised in the files as they are; None dequantises them. room_for: allocates the weights of a component's
        module, whose parameters then have the dtypes of loaded ones; None for `device`.

        Raises ModelLoadError also for changes made for another model.
        """
        for component, module in modules.items():
            with self._checkpoint(component, changes) as checkpoint:
                self.fill(component, module, checkpoint, device, dtype, quantization, room_for)

    def fill(
        self,
        component: str,
        module: nn.Module,
        source: TensorSource,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None = None,
        room_for: RoomFor = no_room,
    ) -> None:
        """Fill the module of one component with the tensors of `source`. Raises as `load`."""
        pieces = self._ready(component, module, source, dtype, quantization)
        load_weights(
            module,
            source,
            pieces,
            device,
            dtype,
            self.stays_float32,
            self.is_ignored,
            self.arrange,
            room_for(component, module),
        )

    def keep_in_files(
        self,
        modules: Modules,
        device: torch.device,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
        quantization: Quantization | None = None,
    ) -> dict[str, StoredWeights]:
        """Leave the weights in their files, otherwise like `load`; return them by component."""
        kept = {}
        for component, module in modules.items():
            with self._checkpoint(component, changes) as checkpoint:
                pieces = self._ready(component, module, checkpoint, dtype, quantization)
                check_names(module, checkpoint, self.pieces(component), self.is_ignored)
            opened = functools.partial(self._checkpoint, component)
            conversions = Conversions(opened, pieces, device, dtype, self.stays_float32, self.arrange)
            kept[component] = StoredWeights(module, conversions, changes)
        return kept

    def rewrite(
        self,
        modules: Modules,
        changed: Mapping[str, Collection[str]],
        changes: Sequence[WeightChange],
        kept: Mapping[str, dict[str, torch.Tensor]],
        dtype: torch.dtype,
    ) -> None:
        """Give loaded modules other changes: the result equals what `load` makes of them.

        changed: by component, the checkpoint's tensors that earlier changes or these concern; all others stay. kept: by
        component, the checkpoint's tensors that need not be read again; those that are read are added. dtype: of the
        model.
        """
        for component, module in modules.items():
            if not changed[component]:
                continue
            with self._checkpoint(component, changes, kept[component]) as checkpoint:
                pieces = shared_pieces(module, self.pieces(component))
                check_parts(module, checkpoint, pieces)
                rewrite_weights(module, checkpoint, pieces, changed[component], dtype, self.arrange)

    def set_loaded_dtypes(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Give the parameters of an empty transformer the dtypes that loading gives them, so that their bytes count."""
        quantized = quantized_weights(module)
        scales = set(quantized.values())
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point() and name not in quantized and name not in scales:
                parameter.data = parameter.data.to(torch.float32 if self.stays_float32(name) else dtype)

    def _checkpoint(
        self,
        component: str,
        changes: Sequence[WeightChange] = (),
        kept: dict[str, torch.Tensor] | None = None,
    ) -> Checkpoint:
        file = next((file for file in self.files if file.component == component), None)
        within = () if file is None else self.joined_in(file)
        beside = tuple(name for name in self.joined_components if name not in within)
        source = None if file is None else file.source(self.expected(component, beside))
        if beside:
            source = _joined(self.folder, component, beside, source)
        return Checkpoint(
            self.folder / component,
            changes=changes,
            kept=kept,
            reads_quantized=True,
            source=source,
            place=None if file is None else file.place,
        )

    def _make_room(self, module: nn.Module, names: Collection[str]) -> None:
        """Call `prepare`, and share what it adds like the rest."""
        if self.prepare is not None:
            self.prepare(module, names)
        self.share_layers(module)

    def _make_room_for(self, component: str, module: nn.Module, changes: Sequence[WeightChange]) -> None:
        """Call `prepare` with the names of what `changes` give whole."""
        self._make_room(module, [name for change in changes for name in change.replaced(component)])

    def _ready(
        self,
        component: str,
        module: nn.Module,
        source: TensorSource,
        dtype: torch.dtype,
        quantization: Quantization | None,
    ) -> Mapping[str, tuple[Piece, ...]]:
        """Make an empty module what a component's files and quantisation define; return the pieces that fill its
        parameters here."""
        self._make_room(module, source.shapes)
        pieces = shared_pieces(module, self.pieces(component))
        if quantization is not None and not self.dequantizes(component):
            quantization.keep_stored(module, functools.partial(stored_weight, source, pieces))
            expect_stored(module, source, pieces, dtype)
        self.set_loaded_dtypes(module, dtype)
        return pieces


def _joined(folder: AnyFolder, component: str, further: Sequence[str], own: Source | None = None) -> Source:
    """Return the tensors of a component, and those of further ones under the component's name and a dot:
    `controlnet.img_in`, of a ControlNet.

    own: opens the first component's, None where they are in the folder. The result raises ModelLoadError for files that
    are missing, damaged or quantised in a way that is not read.
    """

    def of_folder(name: str, stack: contextlib.ExitStack) -> Rows:
        paths = find_weight_files(folder / name, COMPONENT_STEM)
        return stored_rows([open_tensor_file(path, name, stack) for path in paths])

    def open_files(stack: contextlib.ExitStack) -> Rows:
        rows = dict(of_folder(component, stack) if own is None else own(stack))
        for name in further:
            if any(tensor.startswith(f"{name}.") for tensor in rows):
                # The transformer's own files have them.
                continue
            rows.update({f"{name}.{tensor}": stored for tensor, stored in of_folder(name, stack).items()})
        return rows

    return open_files
