"""Text encoders whose weights stay in their files, and are read when they are used: which tensor fills which parameter.

transformers renames tensors as it reads, so that each parameter is matched with the file's tensor of its shape whose
name ends most alike.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diffusion_runtime.core.model_folder import AnyFolder, read_index
from diffusion_runtime.decoders.autoencoder import DiffusersComponent
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.layers.waiting_weights import is_waiting
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.offloaded import modules_of
from diffusion_runtime.weights.checkpoint import Checkpoint, Piece, WeightChange
from diffusion_runtime.weights.stored_weights import Conversions, StoredWeights
from diffusion_runtime.weights.weight_files import listed
from diffusion_runtime.weights.weight_loading import own_pieces

# What transformers calls a file of weights.
STEM = "model"
# A component of diffusers' between an encoder and a transformer.
CONNECTORS = "connectors"
# The embeddings of tokens, which go by several names in one model.
_EMBEDDINGS = ("shared.weight", "embed_tokens.weight", "token_embedding.weight")

# Opens files whose tensors are changed as they are read.
_Open = Callable[[Sequence[WeightChange]], Checkpoint]


def text_components(folder: AnyFolder) -> list[str]:
    """Those of transformers that model_index.json has for the text."""
    return [
        name
        for name, entry in read_index(folder).items()
        if name.startswith("text_encoder") and isinstance(entry, list) and entry[:1] == ["transformers"]
    ]


def why_whole(dtype: torch.dtype) -> str:
    """Why the weights of text encoders cannot wait in their files in a dtype; empty where they can."""
    if dtype == torch.float16:
        return "in float16, transformers keeps parts of encoders in float32; with --dtype bfloat16 they are streamed"
    return ""


def keep_text_in_files(
    encoder: TextEncoder,
    folder: AnyFolder,
    others: Sequence[DiffusersComponent],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[nn.Module, StoredWeights]:
    """Where the weights of each module wait. encoder: built for the meta device, whose weights wait; others: components
    of diffusers' that may be among its modules.

    Raises ModelLoadError for a module whose parameters cannot be told from each other in the files, or are not there.
    """
    kept = {}
    for module in modules_of(encoder):
        assert is_waiting(module), f"{type(module).__name__} was read"
        opens, pieces = _source_of(module, folder, others)
        conversions = Conversions(opens, pieces, device, dtype, lambda _: False, None)
        kept[module] = StoredWeights(module, conversions, ())
    return kept


def _source_of(
    module: nn.Module, folder: AnyFolder, others: Sequence[DiffusersComponent]
) -> tuple[_Open, Mapping[str, tuple[Piece, ...]]]:
    for component in others:
        if component.class_name == type(module).__name__:
            return functools.partial(_open_component, component, module, folder), own_pieces(module)
    found: list[tuple[_Open, Mapping[str, tuple[Piece, ...]]]] = []
    unmatched: dict[str, list[str]] = {}
    for name in text_components(folder):
        opens = functools.partial(_open_text, folder / name)
        with opens(()) as checkpoint:
            tensors, missing = matched_tensors(module, checkpoint.shapes)
            pieces = {own: (Piece(tensor, checkpoint.shapes[tensor]),) for own, tensor in tensors.items()}
        unmatched[name] = missing
        if not missing:
            found.append((opens, pieces))
    if len(found) != 1:
        # Of the component that has the most of them.
        name, missing = min(unmatched.items(), key=lambda each: len(each[1]))
        what = f"nothing tells its tensors {listed(missing)}" if missing else "several components could be its own"
        raise ModelLoadError(
            f"{folder / name}: the weights of {type(module).__name__} cannot be read by blocks: {what}. Copy or "
            "download the folder again, or leave out --memory-limit"
        )
    return found[0]


def _open_text(folder: Path, changes: Sequence[WeightChange]) -> Checkpoint:
    return Checkpoint(folder, STEM, changes=changes, reads_fp8=True)


def _open_component(
    component: DiffusersComponent, module: nn.Module, folder: AnyFolder, changes: Sequence[WeightChange]
) -> Checkpoint:
    assert not changes, "nothing changes what stands between encoder and transformer"
    return component.checkpoint(module, folder)


def matched_tensors(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, str], list[str]]:
    """(the name of its tensor for what is in the state dict, the names of what has none or one of several). shapes: of
    every tensor of a component's files. What modules share is one tensor under any of its names."""
    by_end: defaultdict[str, list[str]] = defaultdict(list)
    for name in shapes:
        by_end[_end(name)].append(name)
    names: defaultdict[int, list[str]] = defaultdict(list)
    state: Mapping[str, Any] = module.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names[id(tensor)].append(name)
    found: dict[str, str] = {}
    missing = []
    for own in names.values():
        shape = tuple(state[own[0]].shape)
        candidates = [each for each in by_end[_end(own[0])] if shapes[each] == shape]
        most = max((_num_alike(each, own[0]) for each in candidates), default=0)
        best = [each for each in candidates if _num_alike(each, own[0]) == most]
        if len(best) == 1:
            found.update(dict.fromkeys(own, best[0]))
        else:
            missing.append(own[0])
    return found, missing


def _end(name: str) -> str:
    return "embeddings" if name.endswith(_EMBEDDINGS) else ".".join(name.split(".")[-2:])


def _num_alike(one: str, other: str) -> int:
    """How many parts of two dotted names agree, from the last one on; of embeddings at least one."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    number = 0
    for first, second in pairs:
        if first != second:
            break
        number += 1
    return max(number, 1)
