"""Regional compilation (`--compile regional`) of diffusers' own models: of the blocks that a class repeats."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import nn

from diffusion_runtime.diffusers_bridge.compiled_blocks import CompiledBlocks
from diffusion_runtime.diffusers_bridge.denoisers import denoises, uncompiled
from diffusion_runtime.diffusers_bridge.interception import is_recordable
from diffusion_runtime.diffusers_bridge.modules import computer_of, find_attention_modules
from diffusion_runtime.errors import ConfigError


def check_compilable(models: Mapping[str, nn.Module]) -> None:
    """Check that a pipeline's models, by component, can be compiled; the meta device is enough. Raises ConfigError,
    with what to type, where the blocks of a denoising one are unknown or hold attention that no graph can."""
    for name, model in models.items():
        if denoises(name, type(uncompiled(model))):
            repeated_blocks(name, model)


def compile_denoisers(denoisers: Mapping[str, nn.Module], compiled: CompiledBlocks) -> None:
    """Have the repeated blocks of each model compiled at their first call. Raises as `check_compilable`."""
    for name, model in denoisers.items():
        compiled.compile_blocks(repeated_blocks(name, model))


def repeated_blocks(name: str, model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a component that its class names as repeated, else those of its lists that attend. Raises
    ConfigError."""
    attending = {found.module for found in find_attention_modules(model)}
    blocks = _named_blocks(model) or _listed_blocks(model, attending)
    where = f"compile: regional: {name} ({type(model).__name__})"
    if not blocks:
        raise ConfigError(f"{where}: it has no blocks with attention in a list; leave out --compile")
    inside = {part for block in blocks for part in block.modules()}
    breaking = sorted({computer_of(part).__name__ for part in attending & inside if not is_recordable(part)})
    if breaking:
        raise ConfigError(
            f"{where}: no graph can hold the attention of {', '.join(breaking)}, which calls neither diffusers' "
            "dispatcher nor torch's scaled_dot_product_attention itself; leave out --compile"
        )
    # A block inside another one is compiled with it.
    nested = {part for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if block not in nested]


def _named_blocks(model: nn.Module) -> list[nn.Module]:
    kinds = set(getattr(model, "_repeated_blocks", None) or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def _listed_blocks(model: nn.Module, attending: Set[nn.Module]) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [block for each in lists for block in each if attending & set(block.modules())]
