"""Parts of a folder that diffusers' classes describe, such as the autoencoder in `vae`: computed by diffusers' class,
or by a module of ours with the same tensor names where that knows every setting."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from diffusion_runtime.core.empty_modules import empty_modules
from diffusion_runtime.core.model_folder import INDEX_FILE, AnyFolder, component_class, read_config
from diffusion_runtime.decoders.diffusers_import import check_diffusers_import
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.memory.waiting_weights import let_wait
from diffusion_runtime.weights.autoencoder_names import by_diffusers_names
from diffusion_runtime.weights.checkpoint import Checkpoint, WeightChange
from diffusion_runtime.weights.stored_tensors import Rows
from diffusion_runtime.weights.weight_loading import Arrange, check_names, load_weights, own_pieces

COMPONENT = "vae"
# What decoding does not need, unless a component specifies otherwise.
_ENCODER = ("encoder", "quant_conv")


@dataclass(frozen=True)
class ComponentTensor:
    """Shape and kind of one tensor of a component, without its weights."""

    name: str
    num_numbers: int
    dtype: torch.dtype

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that the tensor takes with its floating-point numbers in `dtype`."""
        return self.num_numbers * (dtype if self.dtype.is_floating_point else self.dtype).itemsize


# By a class of diffusers and settings: see DiffusersComponent.tensors.
_tensors: dict[tuple[Any, str], tuple[ComponentTensor, ...]] = {}


@dataclass(frozen=True)
class DiffusersComponent:
    """A component that a class of diffusers computes.

    name: of its folder. module, class_name: where the class is; other_classes: of the same module, which a folder may
    name instead. idle_settings: keys of published config.json files that nothing reads and that some versions of the
    class do not know -> why they change nothing. encoder_parts: names of its modules that are not read for decoding.
    decoding_half: settings -> a module of ours that holds the rest, without weights; None where that does not know all
    of them, which leaves them to diffusers' class. stays_float32: parameters and buffers that are computed with in
    float32 whatever the model's dtype. arrange: puts the rows of a parameter in the order of that module.
    original_rows: (module, tensors of a file) -> by diffusers' names those of its authors' file, where these differ by
    more than names. reads_quantized: whether its files may hold weights in 8 bits or fewer with scales, which are read
    as numbers of the model's dtype.
    """

    name: str
    module: str
    class_name: str
    idle_settings: Mapping[str, str] = field(default_factory=dict)
    encoder_parts: tuple[str, ...] = ()
    decoding_half: Callable[[Mapping[str, Any]], nn.Module | None] = lambda _: None
    other_classes: tuple[str, ...] = ()
    stays_float32: Callable[[str], bool] = lambda _: False
    arrange: Arrange | None = None
    original_rows: Callable[[nn.Module, Rows], Rows] = lambda _, rows: rows
    reads_quantized: bool = False

    def check(self, folder: AnyFolder) -> None:
        """Check that the folder's component is of that class and can be built. Reads json alone, and imports diffusers
        only where no module of ours replaces it.

        Raises ModelLoadError that names the file and the key.
        """
        _, found = component_class(folder, self.name)
        if found not in (known := (self.class_name, *self.other_classes)):
            raise ModelLoadError(
                f"{folder / INDEX_FILE}: key {self.name!r}: expected {' or '.join(known)}, got {found}; no native "
                "model "
                "has that; `--backend diffusers` runs it"
            )
        if self.build_decoding_half(folder) is None:
            self.tensors(folder)

    def class_in(self, folder: AnyFolder) -> str:
        """Return the name of the class that computes the folder's component."""
        if not self.other_classes:
            return self.class_name
        _, found = component_class(folder, self.name)
        return found if found in self.other_classes else self.class_name

    def decoding_library(self, folder: AnyFolder) -> str:
        """Return the library whose attention `load_decoder` loads: "torch" for a module of ours, else "diffusers"."""
        return "diffusers" if self.build_decoding_half(folder) is None else "torch"

    def build(self, folder: AnyFolder, *, left_out: tuple[str, ...] = ()) -> Any:
        """Build the component without weights, on the meta device, from its config.json. left_out: as in `load`.

        Raises ModelLoadError for settings that the installed class does not know or refuses, and InstallationError
        where diffusers cannot be imported.
        """
        made_by, settings = self._diffusers_class(folder), self._settings(folder)
        file, class_name = read_config(folder, self.name), self.class_in(folder)
        unknown = [key for key in settings if key not in inspect.signature(made_by).parameters]
        if unknown:
            import diffusers

            raise ModelLoadError(
                f"{file.path}: key {unknown[0]!r} is unknown to {class_name} of the installed diffusers "
                f"{diffusers.__version__}; if this model was written for a newer one: `pip install -U diffusers`"
            )
        try:
            with empty_modules():
                module: Any = made_by(**settings)
        except (ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as error:
            raise ModelLoadError(f"{file.path}: {class_name} refuses these settings: {error}") from error
        except RuntimeError as error:  # torch, of sizes that no tensor has
            raise ModelLoadError(f"{file.path}: {class_name} cannot be built of these sizes: {error}") from error
        for part in left_out:
            setattr(module, part, None)
        return module

    def tensors(self, folder: AnyFolder) -> tuple[ComponentTensor, ...]:
        """Return the tensors of `build`'s state dict. They are kept for the process, by the class and the settings: a
        memory plan asks for them at every size that it tries, and the vocoder of LTX-2 takes 0.8 s to build.

        Raises what `build` raises.
        """
        key = (self._diffusers_class(folder), json.dumps(self._settings(folder), sort_keys=True))
        if key not in _tensors:
            state = self.build(folder).state_dict()
            _tensors[key] = tuple(ComponentTensor(name, tensor.numel(), tensor.dtype) for name, tensor in state.items())
        return _tensors[key]

    def _diffusers_class(self, folder: AnyFolder) -> Any:
        check_diffusers_import()
        # Imported here: it takes a second or two, and more when it is the first part of diffusers.
        return getattr(importlib.import_module(self.module), self.class_in(folder))

    def load(
        self,
        folder: AnyFolder,
        device: torch.device,
        dtype: torch.dtype,
        *,
        left_out: tuple[str, ...] = (),
        stays_float32: Callable[[str], bool] = lambda _: False,
    ) -> Any:
        """Load the component with its weights, in eval mode and without gradients; on the meta device the weights wait
        (memory/waiting_weights.py).

        left_out: names of its modules that are neither built nor read, such as those of the encoder. stays_float32:
        parameters and buffers that are not converted to `dtype`.

        Raises what `build` raises, and ModelLoadError for weights that do not fit.
        """
        module = self.build(folder, left_out=left_out)
        self.fill(module, folder, device, dtype, left_out, stays_float32)
        return module

    def load_decoder(self, folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> Any:
        """Load the component without its encoder, as `load` does: a module of ours, or else of diffusers.

        Raises what `load` raises.
        """
        module = self.build_decoding_half(folder)
        if module is None:
            return self.load(folder, device, dtype, left_out=self.encoder_parts)
        self.fill(module, folder, device, dtype, self.encoder_parts)
        return module

    def check_weights(self, folder: AnyFolder) -> None:
        """Check from their headers that the folder's files hold the component. Raises ModelLoadError."""
        module, encoder = self.build_decoding_half(folder), self.encoder_parts or _ENCODER
        module = self.build(folder, left_out=encoder) if module is None else module
        with self.checkpoint(module, folder) as checkpoint:
            check_names(module, checkpoint, own_pieces(module), _starts_with(encoder))

    def checkpoint(self, module: nn.Module, folder: AnyFolder, changes: Sequence[WeightChange] = ()) -> Checkpoint:
        """Return the files that hold a module of `build`, with its names. changes: as of a Checkpoint."""
        expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        return Checkpoint(
            folder / self.name,
            changes=changes,
            reads_quantized=self.reads_quantized,
            renamed=lambda path, rows: by_diffusers_names(path, self.original_rows(module, rows), expected, self.name),
        )

    def build_decoding_half(self, folder: AnyFolder) -> nn.Module | None:
        """Build what `load_decoder` fills, on the meta device; None for diffusers' module. Imports nothing."""
        return self.decoding_half(self._settings(folder))

    def _settings(self, folder: AnyFolder) -> dict[str, Any]:
        """Return the settings that something reads. Raises ModelLoadError."""
        settings = read_config(folder, self.name).settings()
        return {key: value for key, value in settings.items() if key not in self.idle_settings}

    def fill(
        self,
        module: nn.Module,
        folder: AnyFolder,
        device: torch.device,
        dtype: torch.dtype,
        left_out: tuple[str, ...],
        stays_float32: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Fill a module of `build`, or one of ours with some of its tensors, as `load` does. Raises ModelLoadError for
        weights that do not fit."""
        if device.type == "meta":
            let_wait(module, dtype)
            return
        with self.checkpoint(module, folder) as checkpoint:
            load_weights(
                module,
                checkpoint,
                own_pieces(module),
                device,
                dtype,
                stays_float32=lambda name: stays_float32(name) or self.stays_float32(name),
                ignored=_starts_with(left_out),
                arrange=self.arrange,
            )


def _starts_with(parts: tuple[str, ...]) -> Callable[[str], bool]:
    prefixes = tuple(f"{part}." for part in parts)
    return lambda tensor: tensor.startswith(prefixes)
