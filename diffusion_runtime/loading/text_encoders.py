"""Loading of text encoders: on the device, in memory of the host, or read from their files while they encode."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from diffusion_runtime.errors import ModelLoadError, first_line
from diffusion_runtime.memory.offloaded_part import into_arena
from diffusion_runtime.memory.offloading import Offloading
from diffusion_runtime.memory.weight_unit import WeightHome, num_bytes_of
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.quantized_text_encoders import dequantized_text, read_text_here, text_read_here
from diffusion_runtime.models.text_encoder_files import CONNECTORS, TextChanges
from diffusion_runtime.parallel.world import World
from diffusion_runtime.text_encoders.ahead import EncodingAhead
from diffusion_runtime.text_encoders.attention_choice import EncoderAttention, use_attention
from diffusion_runtime.text_encoders.encoder_size import layers_of
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.offloaded import OffloadedTextEncoder, ReloadedTextEncoder, modules_of
from diffusion_runtime.text_encoders.shared import SharedTextEncoder
from diffusion_runtime.weights.checkpoint import WeightChange
from diffusion_runtime.weights.stored_weights import StoredWeights

_logger = logging.getLogger("diffusion_runtime")


@dataclass
class TextEncoderLoader:
    """Loads text encoders, and gives them other LoRA files later. attention: what was chosen for the text encoders,
    None for transformers' own choice. changes: made to their weights, such as a LoRA."""

    model: Model[Any, Any]
    device: torch.device
    dtype: torch.dtype
    attention: EncoderAttention | None
    changes: TextChanges
    _loaded: TextEncoder | None = field(default=None, init=False)
    _homes: Mapping[nn.Module, StoredWeights] | None = field(default=None, init=False)

    def load(self, world: World | None, offloading: Offloading | None) -> TextEncoder:
        """The encoder, which the first of several processes has for all."""
        if world is None:
            return self._of_this_process(offloading)
        return SharedTextEncoder(self._of_this_process(offloading) if world.is_first else None, world)

    def rewrite(self, encoder: TextEncoder, changes: Sequence[WeightChange]) -> None:
        """Give what `load` returned other changes. encoder: the same, or what encodes ahead with it.

        Raises what loading with them raises; it may leave some weights changed then.
        """
        if isinstance(encoder, EncodingAhead):
            encoder.forget()
        before, self.changes = self.changes.changes, self.model.text_changes(changes)
        if self._homes is not None:
            self.changes.waiting(self._homes)
        elif self._loaded is not None:
            self.changes.apply(self._loaded, before)

    def _of_this_process(self, offloading: Offloading | None) -> TextEncoder:
        if offloading is None:
            self._loaded = self.read(self.device)
            return self._loaded
        if offloading.plan.waits_in_files:
            return self._in_files(offloading)
        encoder = self._loaded = self.read(torch.device("cpu"))
        _add_to(offloading, {module: into_arena(module) for module in modules_of(encoder)})
        return OffloadedTextEncoder(encoder, offloading.use_text_encoders)

    def _in_files(self, offloading: Offloading) -> TextEncoder:
        """One whose weights are read from their files while it encodes: by blocks, or whole where it has none that are
        known and the plan has room for it."""
        plan = offloading.plan
        if not plan.whole_text:
            encoder = self.read(torch.device("meta"))
            try:
                homes = self.model.keep_text_in_files(encoder, self.device, self.dtype)
                _add_to(offloading, homes)
            except ModelLoadError as error:
                if plan.demand.text.name in plan.resident:
                    raise
                _logger.warning("the text encoder is read whole: %s", first_line(error))
            else:
                if self.changes.changes:
                    self.changes.waiting(homes)
                self._homes = homes
                return OffloadedTextEncoder(encoder, offloading.use_text_encoders)
        reloaded = ReloadedTextEncoder(functools.partial(self.read, self.device), offloading.use_text_encoders)
        offloading.add_reloaded_text_encoder(reloaded)
        return reloaded

    def read(self, device: torch.device) -> TextEncoder:
        """Return the encoder on a device; with the meta device its weights wait. Raises ModelLoadError."""
        read_here = text_read_here(self.model.folder)
        is_read = device.type != "meta"
        built_on = torch.device("meta") if read_here else device
        encoder = self.model.load_text_encoder(built_on, self.dtype)
        if self.attention is not None:
            encoder = use_attention(encoder, self.attention)
        modules: Mapping[str, Sequence[nn.Module]] = {}
        if read_here and is_read:
            others = self.model.family.files.components_called(CONNECTORS)
            modules = read_text_here(encoder, self.model.folder, others, device, self.dtype)
        for component, titles in read_here.items():
            if titles:
                note = dequantized_text(component, titles, modules.get(component, ()), waits=not is_read)
                _logger.info("%s", note)
                encoder.implementation = f"{encoder.implementation}, {note}"
        if is_read:
            self.changes.apply(encoder)
        return encoder


def _add_to(offloading: Offloading, homes: Mapping[nn.Module, WeightHome]) -> None:
    """homes: where the tensors of each module wait. The plan has the layers of the largest alone; others are small
    beside it."""
    layers = {module: layers_of(module) for module in homes}
    largest = max(homes, key=lambda module: sum(map(num_bytes_of, layers[module])), default=None)
    for module, home in homes.items():
        offloading.add_text_encoder(module, home, layers[module] if module is largest else ())
