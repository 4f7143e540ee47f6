"""The size of a text encoder in memory, known without reading its weights: from tensors' shapes, or from its config."""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diffusion_runtime.core.empty_modules import empty_modules
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.text_encoders import umt5_model
from diffusion_runtime.text_encoders.loading import quiet_transformers
from diffusion_runtime.untrusted.component_sizes import check_sizes
from diffusion_runtime.untrusted.json_text import read_json_file

# Output layers, which loaders drop, and halves of multimodal models that read no text, which most of them drop.
_UNREAD = re.compile(r"(^|\.)(lm_head|decoder\.block)\.")
_VISION = re.compile(r"(^|\.)(visual|vision_tower|vision_model|embed_vision|embed_audio|multi_modal_projector)\.")
# The layers of an encoder, by their names in every model of transformers that is read here.
_LAYER = re.compile(r"(?:^|\.)(?:layers|block)\.(\d+)\.")
_ONE_LAYER = re.compile(r"(?:^|\.)(?:layers|block)\.\d+$")

# By class and config.json: see shapes_by_config.
_found: dict[tuple[str, str], Mapping[str, tuple[int, ...]]] = {}


def tensor_sizes_of(
    shapes: Mapping[str, int], num_layers: int | None = None, *, sees: bool = False
) -> tuple[int, tuple[int, ...]]:
    """Return (numbers of all tensors that are loaded, numbers of each layer).

    shapes: numbers of each tensor, by name. num_layers: how many of the first layers are loaded, None for all. sees:
    whether the half that reads pictures is loaded, of which no layer counts as one.
    """
    total, layers = 0, defaultdict[int, int](int)
    for name, numbers in shapes.items():
        is_vision = _VISION.search(name) is not None
        layer = None if is_vision else _LAYER.search(name)
        left_out = layer is not None and num_layers is not None and int(layer[1]) >= num_layers
        if _UNREAD.search(name) or left_out or (is_vision and not sees):
            continue
        total += numbers
        if layer:
            layers[int(layer[1])] += numbers
    return total, tuple(layers[index] for index in sorted(layers))


def layers_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the layers of an encoder that is loaded, as tensor_sizes_of counts them, in their order."""
    return tuple(
        layer
        for name, layer in module.named_modules()
        if _ONE_LAYER.search(name) and not _VISION.search(f"{name}.") and any(True for _ in layer.parameters())
    )


def shapes_by_config(folder: Path, class_name: str) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each tensor, by name, of an encoder whose weights are not here, from config.json. class_name:
    of transformers, as in model_index.json. Imports transformers, which takes seconds, except for a UMT5 with known
    settings.

    The result is kept for the process: a memory plan asks at every size that it tries.

    Raises ModelLoadError for a class or settings that transformers does not know.
    """
    config_file = folder / "config.json"
    values = read_json_file(config_file, error=ModelLoadError, allow_constants=True)
    check_sizes(values, config_file)
    key = (class_name, json.dumps(values))
    if key not in _found:
        _found[key] = _shapes_of(values, class_name, config_file)
    return _found[key]


def _shapes_of(values: dict[str, Any], class_name: str, config_file: Path) -> dict[str, tuple[int, ...]]:
    known = umt5_model.sizes_of(values) if class_name == "UMT5EncoderModel" else None
    if known is not None:
        with empty_modules():
            return _shapes(umt5_model.UMT5Encoder(known).named_parameters())
    import transformers

    model_class: Any = getattr(transformers, class_name, None)
    if not inspect.isclass(model_class) or not issubclass(model_class, transformers.PreTrainedModel):
        raise ModelLoadError(f"{config_file}: {class_name} is no model of the installed transformers")
    try:
        with quiet_transformers(), empty_modules():
            config_class: Any = model_class.config_class
            return _shapes(model_class(config_class.from_dict(values)).named_parameters())
    except Exception as error:  # any exception: settings of another version make it raise several kinds
        raise ModelLoadError(f"{config_file}: {class_name} cannot be built of it: {error}") from error


def _shapes(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors}
