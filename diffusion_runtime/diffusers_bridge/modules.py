"""Finds the attention modules of a diffusers model: path, role, heads, and whether their calls can be intercepted.

A module is reached when it ends in torch's scaled_dot_product_attention, by itself or through diffusers' dispatcher.
Others compute attention by hand, such as linear attention, and have no call to intercept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from diffusion_runtime.attention.roles import register_role
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.diffusers_bridge.denoisers import is_compiled_wrapper

# Roles of attention among text alone, before it meets the picture, and among sound alone. There is no grid, so they are
# of category cross: a choice made for grids does not apply to them.
TEXT_ROLE = "diffusers.text"
_AUDIO_ROLE = "diffusers.audio"
_TEXT_PLACES = ("context_embedder", "token_refiner", "context_refiner", "text_embedder", "caption", "time_embed")

# Names of attention modules in models with a second stream, and the roles they have.
_ROLES_OF_NAMES = {
    "audio_attn1": _AUDIO_ROLE,
    "audio_attn2": "cross",
    "audio_to_video_attn": "ltx2.audio_to_video",
    "video_to_audio_attn": "ltx2.video_to_audio",
}

_ATTENTION_CALLS = frozenset({"dispatch_attention_fn", "scaled_dot_product_attention"})
# Attribute names for the number of heads, and for the size of one head or of all together.
_HEADS = ("heads", "num_heads", "num_attention_heads")
_KV_HEADS = ("kv_heads", "num_kv_heads", "num_key_value_heads")
_INNER_SIZES = ("inner_dim",)
_HEAD_SIZES = ("head_dim", "dim_heads")
_QUERY_PROJECTIONS = ("to_q", "to_query", "q_proj")
# How many function calls deep a processor may hide its call.
_MAX_CALL_DEPTH = 3


def register_declared_roles() -> None:
    """Register the roles that modules of diffusers may have, whether or not a model is loaded."""
    for name in (TEXT_ROLE, *_ROLES_OF_NAMES.values()):
        register_role(name, "cross")


register_declared_roles()


@dataclass(frozen=True)
class FoundModule:
    """One attention module of a model.

    path: in the model. layer: its role, and its number among those of that role. processor: the class that computes it,
    the module's own for one without a processor. unreached: why its calls cannot be intercepted; empty when they can.
    kind: `linear` for attention without a softmax, whose state does not grow with the keys, else `softmax`.
    """

    path: str
    module: nn.Module
    layer: LayerInfo
    processor: str
    unreached: str
    kind: str = "softmax"


def find_attention_modules(model: nn.Module) -> list[FoundModule]:
    """Return every attention module of a model, in the order in which the model holds them."""
    named = [(path.replace("_orig_mod.", ""), module) for path, module in model.named_modules()]
    found = [(path, module, _role(path, module)) for path, module in named if _is_attention(module)]
    counts: dict[str, int] = {}
    for _, _, role in found:
        counts[role] = counts.get(role, 0) + 1
    seen: dict[str, int] = {}
    listed = []
    for path, module, role in found:
        index = seen[role] = seen.get(role, -1) + 1
        layer = LayerInfo(index, counts[role], role, path)
        listed.append(
            FoundModule(path, module, layer, computer_of(module).__name__, unreached_reason(module), kind_of(module))
        )
    return listed


def find_in_models(models: Mapping[str, nn.Module]) -> dict[str, list[FoundModule]]:
    """Return the attention modules of several models, by the models' names. A module that two of them hold, such as the
    refiners that a ControlNet of Z-Image shares with the transformer, is the first one's."""
    found: dict[str, list[FoundModule]] = {}
    seen: set[nn.Module] = set()
    for name, model in models.items():
        found[name] = [each for each in find_attention_modules(model) if each.module not in seen]
        seen.update(each.module for each in found[name])
    return found


def processor_of(module: nn.Module) -> Any:
    """Return the processor of a module; None when its own forward computes attention."""
    return getattr(module, "processor", None)


def head_shape(module: nn.Module) -> tuple[int, int, int] | None:
    """Read (heads, head_dim, kv_heads) from a module's attributes; None without them."""
    heads = _number(module, _HEADS)
    if heads is None:
        return None
    inner = _number(module, _INNER_SIZES)
    head_dim = inner // heads if inner is not None else _number(module, _HEAD_SIZES)
    if head_dim is None:
        projected = next(
            (each for name in _QUERY_PROJECTIONS if (each := getattr(module, name, None)) is not None), None
        )
        inner = projected.out_features if isinstance(projected, nn.Linear) else None
        head_dim = None if inner is None else inner // heads
    if not head_dim or (inner is not None and inner % heads):
        return None
    inner_kv = getattr(module, "inner_kv_dim", None)
    kv_heads = inner_kv // head_dim if isinstance(inner_kv, int) else _number(module, _KV_HEADS) or heads
    return heads, head_dim, kv_heads if kv_heads and heads % kv_heads == 0 else heads


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if type(value) is int and value >= 1), None)


def _is_attention(module: nn.Module) -> bool:
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention, MochiAttention

    if is_compiled_wrapper(module):
        return False
    if isinstance(module, Attention | MochiAttention | AttentionModuleMixin):
        return True
    # Modules of other packages, and those of diffusers that attend in their own forward.
    return callable(processor_of(module)) or _calls_attention(type(module).forward)


def _role(path: str, module: nn.Module) -> str:
    *places, name = path.split(".")
    if name in _ROLES_OF_NAMES:
        return _ROLES_OF_NAMES[name]
    if any(part.startswith(_TEXT_PLACES) for part in places):
        return TEXT_ROLE
    is_cross = getattr(module, "is_cross_attention", None)
    if is_cross is None:
        is_cross = name == "attn2" or "cross" in name
    return "cross" if is_cross else "self"


def is_shared_by_diffusers(module: nn.Module) -> bool:
    """Return whether diffusers' own context parallelism cuts the sequence of a module."""
    return getattr(processor_of(module), "_parallel_config", None) is not None


def computer_of(module: nn.Module) -> type:
    """Return the class that computes the attention of a module."""
    processor = processor_of(module)
    return type(module) if processor is None else type(processor)


def kind_of(module: nn.Module) -> str:
    """Return `linear` or `softmax`. Linear attention is a property of the architecture; diffusers has it in the names
    of the classes that compute it."""
    name = computer_of(module).__name__
    return "linear" if "LinearAtt" in name else "softmax"


def unreached_reason(module: nn.Module) -> str:
    """Return why the calls of a module cannot be intercepted; empty when they can."""
    processor = processor_of(module)
    if processor is None:
        function = type(module).forward
        return "" if _calls_attention(function) else "it computes attention by hand"
    if is_shared_by_diffusers(module):
        return "diffusers shares its sequence between processes"
    if any(_calls_attention(kind.__dict__.get("__call__")) for kind in type(processor).__mro__):
        return ""
    return f"{type(processor).__name__} computes attention by hand"


def _calls_attention(function: object, depth: int = 1) -> bool:
    """Return whether a Python function names one of the attention calls, itself or in functions of its own library."""
    plain = inspect.unwrap(function) if callable(function) else None
    if not isinstance(plain, FunctionType):
        return False
    names = set(_names(plain.__code__))
    if names & _ATTENTION_CALLS:
        return True
    library = plain.__module__.partition(".")[0]
    inner = (plain.__globals__.get(name) for name in names)
    return depth < _MAX_CALL_DEPTH and any(
        _calls_attention(value, depth + 1)
        for value in inner
        if isinstance(value, FunctionType) and value.__module__.partition(".")[0] == library
    )


def _names(code: CodeType) -> Iterator[str]:
    """Yield every global and attribute that a function's code names, inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def mask_arguments(function: Callable[..., Any]) -> tuple[tuple[int, str], ...]:
    """Return (position, name) of the parameters that carry masks, `self` not counted."""
    names = list(inspect.signature(function).parameters)[1:]
    return tuple((position, name) for position, name in enumerate(names) if "mask" in name)
