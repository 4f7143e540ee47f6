"""Scales of text encoders in 8-bit floats (ComfyUI's fp8_scaled files), multiplied into weights that transformers read.

transformers reads the 8-bit numbers as they are, which every dtype of a model holds exactly; here each weight is
multiplied by its scale in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from torch import nn

from diffusion_runtime.core.model_folder import AnyFolder, part_prefix
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.layers.waiting_weights import is_waiting
from diffusion_runtime.models.text_encoder_files import STEM, matched_tensors, text_components
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.offloaded import modules_of
from diffusion_runtime.weights.fp8_scales import find_scales
from diffusion_runtime.weights.stored_tensors import StoredRows, stored_rows
from diffusion_runtime.weights.tensor_files import SafetensorsFile
from diffusion_runtime.weights.weight_files import find_weight_files, refuse_other_than_fp8

NOTE = "8-bit weights dequantised by their scales"


def check_text_encoder_file(path: Path, prefix: str = "") -> None:
    """Check that a text encoder's file is not quantised otherwise than in 8-bit floats with supported scales. Reads its
    head, and marks next to weights. prefix: of its part of the file. Raises ModelLoadError."""
    with closing(SafetensorsFile(path, prefix)) as file:
        refuse_other_than_fp8(path, {name: head.kind for name, head in file.heads.items()})
        find_scales([file])


def apply_scales(encoder: TextEncoder, folder: AnyFolder) -> None:
    """Give the weights of a loaded text encoder the scales of their files, where these have any, and note it in its
    `implementation`. Modules of ours were read with theirs, and weights that wait in their files will be.

    Raises ModelLoadError for files whose tensors cannot be matched to the module.
    """
    for component in text_components(folder):
        with ExitStack() as stack:
            paths = find_weight_files(folder / component, STEM)
            prefix = part_prefix(folder / component)
            rows = stored_rows([stack.enter_context(closing(SafetensorsFile(path, prefix))) for path in paths])
            if not any(row.scale is not None for several in rows.values() for row in several):
                continue
            of_transformers = [
                module for module in modules_of(encoder) if _is_of_transformers(module) and not is_waiting(module)
            ]
            if of_transformers:
                _multiply(of_transformers, rows, paths[0])
            encoder.implementation = f"{encoder.implementation}, {component}: {NOTE}"


def _is_of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "transformers"


def _multiply(modules: Sequence[nn.Module], rows: Mapping[str, tuple[StoredRows, ...]], path: Path) -> None:
    """Multiply the scales of one component's tensors into the one of these modules that they are for."""
    shapes = {name: several[0].shape for name, several in rows.items()}
    found = []
    for module in modules:
        tensors, missing = matched_tensors(module, shapes)
        parameters = dict(module.named_parameters())
        if parameters.keys().isdisjoint(missing):
            found.append([(parameter, tensors[name]) for name, parameter in parameters.items()])
    if len(found) != 1:
        raise ModelLoadError(
            f"{path}: the tensors of this file, which has scales of 8-bit weights, cannot be told to be those of the "
            "text encoder; use a file in bfloat16 or float16, or a plain cast"
        )
    with torch.no_grad():
        for parameter, name in found[0]:
            (row,) = rows[name]
            if row.scale is not None:
                scales = row.scales(len(parameter)).to(parameter.device)
                matrix = parameter.view(len(parameter), -1)
                matrix.copy_(matrix.float().mul_(scales))
