"""Loading of text encoders: on the device, in memory of the host, or read from their files while they encode."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diffusion_runtime.errors import ModelLoadError, first_line
from diffusion_runtime.memory.blocks import num_bytes_of
from diffusion_runtime.memory.offloaded_part import into_arena
from diffusion_runtime.memory.offloading import Offloading
from diffusion_runtime.memory.weight_unit import WeightHome
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.text_encoder_scales import apply_scales
from diffusion_runtime.parallel.world import World
from diffusion_runtime.text_encoders.attention_choice import EncoderAttention, use_attention
from diffusion_runtime.text_encoders.encoder_size import layers_of
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.offloaded import OffloadedTextEncoder, ReloadedTextEncoder, modules_of
from diffusion_runtime.text_encoders.shared import SharedTextEncoder

_logger = logging.getLogger("diffusion_runtime")


@dataclass(frozen=True)
class TextEncoderLoader:
    """attention: what was chosen for the text encoders, None for transformers' own choice."""

    model: Model[Any, Any]
    device: torch.device
    dtype: torch.dtype
    attention: EncoderAttention | None

    def load(self, world: World | None, offloading: Offloading | None) -> TextEncoder:
        """The encoder, which the first of several processes has for all."""
        if world is None:
            return self._of_this_process(offloading)
        return SharedTextEncoder(self._of_this_process(offloading) if world.is_first else None, world)

    def _of_this_process(self, offloading: Offloading | None) -> TextEncoder:
        if offloading is None:
            return self._read(self.device)
        if offloading.plan.waits_in_files:
            return self._in_files(offloading)
        encoder = self._read(torch.device("cpu"))
        _add_to(offloading, {module: into_arena(module) for module in modules_of(encoder)})
        return OffloadedTextEncoder(encoder, offloading.use_text_encoders)

    def _in_files(self, offloading: Offloading) -> TextEncoder:
        """One whose weights are read from their files while it encodes: by blocks, or whole where it has none that are
        known and the plan has room for it."""
        plan = offloading.plan
        if not plan.whole_text:
            encoder = self._read(torch.device("meta"))
            try:
                _add_to(offloading, self.model.keep_text_in_files(encoder, self.device, self.dtype))
            except ModelLoadError as error:
                if plan.demand.text.name in plan.resident:
                    raise
                _logger.warning("the text encoder is read whole: %s", first_line(error))
            else:
                return OffloadedTextEncoder(encoder, offloading.use_text_encoders)
        reloaded = ReloadedTextEncoder(functools.partial(self._read, self.device), offloading.use_text_encoders)
        offloading.add_reloaded_text_encoder(reloaded)
        return reloaded

    def _read(self, device: torch.device) -> TextEncoder:
        encoder = self.model.load_text_encoder(device, self.dtype)
        if self.attention is not None:
            encoder = use_attention(encoder, self.attention)
        apply_scales(encoder, self.model.folder)
        return encoder


def _add_to(offloading: Offloading, homes: Mapping[nn.Module, WeightHome]) -> None:
    """homes: where the tensors of each module wait. The plan has the layers of the largest alone; others are small
    beside it."""
    layers = {module: layers_of(module) for module in homes}
    largest = max(homes, key=lambda module: sum(map(num_bytes_of, layers[module])), default=None)
    for module, home in homes.items():
        offloading.add_text_encoder(module, home, layers[module] if module is largest else ())
