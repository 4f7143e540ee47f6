"""Transformers in 8-bit floats, as ComfyUI, ModelOpt and plain casts write them, and the numbers they stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

Tensors = dict[str, torch.Tensor]
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


@dataclass
class Fp8File:
    """stored, metadata: of the file; meant: the float32 numbers of every weight."""

    stored: Tensors = field(default_factory=dict)
    meant: Tensors = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


def is_block_weight(name: str) -> bool:
    return name.endswith(".weight") and "block" in name and "norm_" not in name


def plain_cast(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float8_e4m3fn) -> Fp8File:
    """Every tensor, biases and norms too."""
    file = Fp8File()
    for name, tensor in tensors.items():
        file.stored[name] = tensor.to(dtype)
        file.meant[name] = file.stored[name].float()
    return file


def scaled(
    tensors: Mapping[str, torch.Tensor],
    *,
    weight_scale: str,
    input_scale: str | None = None,
    by_row: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Fp8File:
    """The matrices of blocks with a scale each; the rest in bfloat16."""
    file = Fp8File()
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not is_block_weight(name):
            file.stored[name] = tensor.bfloat16()
            file.meant[name] = file.stored[name].float()
            continue
        largest = tensor.abs().amax(-1, keepdim=True) if by_row else tensor.abs().amax()
        scale = (largest / torch.finfo(dtype).max).float()
        file.stored[name] = (tensor / scale).to(dtype)
        file.meant[name] = file.stored[name].float() * scale
        layer = name.removesuffix(".weight")
        file.stored[f"{layer}.{weight_scale}"] = scale
        if input_scale is not None:
            file.stored[f"{layer}.{input_scale}"] = torch.tensor(0.01)
    return file


def comfy_scaled(tensors: Mapping[str, torch.Tensor]) -> Fp8File:
    """ComfyUI's older files."""
    file = scaled(tensors, weight_scale="scale_weight", input_scale="scale_input")
    file.stored["scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    return file


def comfy_mixed(tensors: Mapping[str, torch.Tensor]) -> Fp8File:
    """ComfyUI's newer files: each layer says how it is stored, here with a scale per row, and so does the header."""
    file = scaled(tensors, weight_scale="weight_scale", by_row=True)
    layers = [name.removesuffix(".weight_scale") for name in file.stored if name.endswith(".weight_scale")]
    mark = {"format": "float8_e4m3fn"}
    for index, layer in enumerate(layers):
        settings = {**mark, "full_precision_matrix_mult": True} if index == 0 else mark
        file.stored[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
    said = {"format_version": "1.0", "layers": dict.fromkeys(layers[1:], mark)}
    file.metadata["_quantization_metadata"] = json.dumps(said)
    return file


def modelopt(tensors: Mapping[str, torch.Tensor]) -> Fp8File:
    """With `quantization_config` MODELOPT in config.json."""
    return scaled(tensors, weight_scale="weight_scale", input_scale="input_scale")
