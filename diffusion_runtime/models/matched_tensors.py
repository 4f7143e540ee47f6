"""Tensors of a text encoder's file, matched with the parameters of its module.

transformers renames tensors as it reads, so that each parameter is matched with the file's tensor of its shape and its
layer whose name ends most alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from diffusion_runtime.errors import shown_name
from diffusion_runtime.weights.weight_files import listed

# The embeddings of tokens, which go by several names in one model.
_EMBEDDINGS = ("shared.weight", "embed_tokens.weight", "token_embedding.weight")
_EMBEDDED = "embeddings"


def matched_tensors(
    module: nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return (by name in the state dict, the name of its tensor; the names without one, with the tensors that may each
    be it). shapes: of every tensor of a component's files. Weights that modules share are one tensor under any of their
    names; a tensor that two parameters would take is that of the one whose name is more like it."""
    by_end: defaultdict[str, list[str]] = defaultdict(list)
    for name in shapes:
        by_end[_end(name)].append(name)
    names: defaultdict[int, list[str]] = defaultdict(list)
    state: Mapping[str, Any] = module.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names[id(tensor)].append(name)
    best: dict[str, list[str]] = {}
    likeness: dict[str, int] = {}
    # By tensor, of all parameters that it fits. One of embeddings may be that of several names.
    most: dict[str, int] = {}
    for own, *_ in names.values():
        shape = tuple(state[own].shape)
        candidates = [each for each in by_end[_end(own)] if shapes[each] == shape and _has_numbers(each, own)]
        likeness[own] = max((_num_alike(each, own) for each in candidates), default=0)
        best[own] = [each for each in candidates if _num_alike(each, own) == likeness[own]]
        for each in best[own] if _end(own) != _EMBEDDED else ():
            most[each] = max(most.get(each, 0), likeness[own])
    found: dict[str, str] = {}
    lacks: dict[str, list[str]] = {}
    for own, *others in names.values():
        # What is more like another parameter is that one's.
        left = [each for each in best[own] if most.get(each, 0) <= likeness[own]]
        if len(left) == len(best[own]) == 1:
            found.update(dict.fromkeys((own, *others), left[0]))
        else:
            lacks[own] = left
    return found, lacks


def _has_numbers(tensor: str, own: str) -> bool:
    """Return whether a tensor is of a parameter's layer: its name has the same numbers, behind those of a prefix."""
    numbers = [part for part in own.split(".") if part.isdigit()]
    return [part for part in tensor.split(".") if part.isdigit()][-len(numbers) :] == numbers if numbers else True


def _end(name: str) -> str:
    return _EMBEDDED if name.endswith(_EMBEDDINGS) else ".".join(name.split(".")[-2:])


def _num_alike(one: str, other: str) -> int:
    """Return how many parts of two dotted names agree, from the last one on; of embeddings at least one."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    number = 0
    for first, second in pairs:
        if first != second:
            break
        number += 1
    return max(number, 1)


def why_unmatched(module: nn.Module, lacks: Mapping[str, Sequence[str]]) -> str:
    """Return why parameters have no tensor. lacks: as of matched_tensors, empty where several components have all."""
    if not lacks:
        return "several components could be its own"
    for own, tensors in lacks.items():
        if tensors:
            return f"{listed(map(shown_name, tensors))} may each be its {own}, expected one tensor"
    shapes = {name: list(tensor.shape) for name, tensor in module.state_dict().items()}
    return f"{len(lacks)} tensors are missing or of another shape: {listed(f'{own} {shapes[own]}' for own in lacks)}"
