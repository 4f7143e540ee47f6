"""diffusers' own transformers with random weights, equal to ours of the same shapes; their torch.compile."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from diffusion_runtime.diffusers_bridge.stored_components import keeps_float32
from diffusion_runtime.models.random_weights import draw_weight

# Keys of configs that give the number of layers of a kind.
LAYER_COUNTS = ("num_layers", "num_single_layers", "num_refiner_layers", "n_layers", "n_refiner_layers")


# Classes whose forward is not a step of a whole clip, and why.
_IN_PARTS = {
    "AnyFlowFARTransformer3DModel": "generates chunk by chunk over a cache of its own",
    "CosmosTransformer3DModel": "takes the text that Anima's text conditioner, another model, has made",
}


def class_in_diffusers(transformer_class: str, config: Mapping[str, Any]) -> str:
    """Return diffusers' name for a class, where it has it. config: of its config.json."""
    if transformer_class != "FAR_Wan_Transformer3DModel":
        return transformer_class
    # AnyFlow's authors have one class for both kinds of checkpoints.
    return "AnyFlowFARTransformer3DModel" if config.get("init_far_model") else "AnyFlowTransformer3DModel"


def why_no_twin(transformer_class: str) -> str:
    """Return why diffusers has no forward of a whole clip to compare with; empty where it has one."""
    import diffusers

    if not hasattr(diffusers, transformer_class):
        return f"diffusers {diffusers.__version__} has no {transformer_class}"
    in_parts = _IN_PARTS.get(transformer_class)
    return "" if in_parts is None else f"diffusers' {transformer_class} {in_parts}"


def random_transformer(
    transformer_class: str, config: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """Build a model as `from_pretrained` would load it: in eval mode, without gradients. config: of its config.json."""
    import diffusers

    model_class = getattr(diffusers, transformer_class)
    # Published files have keys that no version reads, of which `from_config` warns.
    known = inspect.signature(model_class.__init__).parameters
    config = {key: value for key, value in config.items() if key in known}
    with torch.device("meta"):
        model: nn.Module = model_class(**config)
    for name, parameter in model.named_parameters():
        converts = parameter.is_floating_point() and not keeps_float32(model, name)
        parameter.data = parameter.data.to(dtype if converts else torch.float32)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        draw_weight(name, parameter)
    _refill_tables(model, model_class(**{**config, **_one_layer_of_each(config)}), device)
    return model


def compile_blocks(model: nn.Module) -> None:
    """Have diffusers compile each kind of repeated block at the first call, as its documentation advises."""
    compile_repeated_blocks: Any = model.compile_repeated_blocks
    compile_repeated_blocks(fullgraph=True)


def _one_layer_of_each(config: Mapping[str, Any]) -> dict[str, Any]:
    single: dict[str, Any] = {key: 1 for key in LAYER_COUNTS if isinstance(config.get(key), int)}
    if config.get("vace_layers"):
        # The blocks of Wan VACE that read the control video, by their numbers.
        single["vace_layers"] = [0]
    return single


def _refill_tables(model: nn.Module, small: nn.Module, device: torch.device) -> None:
    """Fill the tables that a constructor computes, which are empty on the meta device, from a model of one layer."""
    modules = dict(model.named_modules())
    for name, module in small.named_modules():
        if name not in modules:
            continue
        for key, table in module._buffers.items():
            if table is not None:
                modules[name]._buffers[key] = table.to(device)
        # Some keep tables as plain attributes, or a list of them.
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                setattr(modules[name], key, value.to(device))
            elif isinstance(value, list) and value and all(isinstance(each, torch.Tensor) for each in value):
                setattr(modules[name], key, [each.to(device) for each in value])
