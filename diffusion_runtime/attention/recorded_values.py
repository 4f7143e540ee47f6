"""Values of an attention call as arguments of an operator, for torch.compile: a text, integers and times.

An operator takes tensors, numbers and texts. Numbers that differ between calls (a step's index, lengths of a prompt)
are symbols of a graph, so another step compiles nothing again; the value of a text is a constant of the graph.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from diffusion_runtime.attention.context import REQUEST_CACHES, RequestCache
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.core.token_layout import CachedLayout, TokenLayout

# For no number where one may be missing.
_NONE = -1


class OperatorValues(NamedTuple):
    """The values of one call as an operator takes them. times: float64 on the CPU, NaN for a time that is unknown."""

    text: str
    numbers: Sequence[int]
    times: torch.Tensor


class CallValues(NamedTuple):
    """The values of one call as Python has them. further: what `operator_values` was given."""

    layout: TokenLayout | None
    layer: LayerInfo
    step: StepInfo
    state: RequestCache
    further: tuple[Any, ...]


def operator_values(
    layout: TokenLayout | None, layer: LayerInfo, step: StepInfo, state: RequestCache | None, *further: Any
) -> OperatorValues:
    """Write the values of a call; torch.compile traces this. further: plain values (texts, numbers, lists, mappings)
    that are constants of the graph.

    A RequestCache made while torch.compile traces is unknown to the operator, which takes a new one.
    """
    texts = layer.role, layer.name, layer.phase, step.branch, step.phase, step.shares_keys, type(layout).__name__
    numbers = [0 if state is None else state.number, layer.index, layer.num_layers]
    numbers += [step.index, step.num_steps, step.expert, step.chunk]
    if layout is not None:
        numbers += [*layout.grid, layout.num_prefix_tokens, layout.num_suffix_tokens, *layout.tile]
        numbers.append(layout.num_given_tokens)
        lengths = layout.valid_lengths
        segments = layout.text_segments
        for several in (lengths, segments):
            numbers += [_NONE] if several is None else [len(several), *several]
        if isinstance(layout, CachedLayout):
            numbers += [layout.num_query_frames, *layout.key_frames]
    times = [step.timestep, step.sigma, step.next_timestep, *(step.frame_timesteps or ())]
    known = [math.nan if time is None else float(time) for time in times]
    return OperatorValues(literal((*texts, *further)), numbers, torch.tensor(known, dtype=torch.float64, device="cpu"))


def literal(value: Any) -> str:
    """A plain value as Python writes it. Anything else becomes the name of its type, which the code that checks the
    value refuses."""
    if isinstance(value, Mapping):
        return "{" + ", ".join([f"{literal(key)}: {literal(each)}" for key, each in value.items()]) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join([literal(each) for each in value]) + "]"
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return repr(f"<{type(value).__name__}>")


def call_values(text: str, numbers: Sequence[int], times: torch.Tensor) -> CallValues:
    """Read what `operator_values` wrote."""
    role, name, layer_phase, branch, phase, shares_keys, kind, *further = _parsed(text)
    state, index, num_layers, step_index, num_steps, expert, chunk, *of_layout = (int(number) for number in numbers)
    timestep, sigma, next_timestep, *of_frames = (None if math.isnan(time) else time for time in times.tolist())
    step = StepInfo(
        index=step_index,
        num_steps=num_steps,
        timestep=timestep,
        sigma=sigma,
        branch=branch,
        expert=expert,
        next_timestep=next_timestep,
        chunk=chunk,
        phase=phase,
        frame_timesteps=cast(tuple[float, ...], tuple(of_frames)) or None,
        shares_keys=shares_keys,
    )
    return CallValues(
        _layout(kind, of_layout),
        LayerInfo(index, num_layers, role, name, layer_phase),
        step,
        REQUEST_CACHES.find_number(state) if state else RequestCache(),
        tuple(further),
    )


def _layout(kind: str, numbers: Sequence[int]) -> TokenLayout | None:
    if not numbers:
        return None
    frames, height, width, prefix, suffix, tile_frames, tile_height, tile_width, num_given, num_lengths, *rest = numbers
    lengths = None if num_lengths == _NONE else tuple(rest[:num_lengths])
    num_segments, *rest = rest[max(0, num_lengths) :]
    segments = None if num_segments == _NONE else tuple(rest[:num_segments])
    placed = (
        (frames, height, width),
        prefix,
        suffix,
        lengths,
        (tile_frames, tile_height, tile_width),
        segments,
        num_given,
    )
    if kind != CachedLayout.__name__:
        return TokenLayout(*placed)
    num_query_frames, *key_frames = rest[max(0, num_segments) :]
    return CachedLayout(*placed, num_query_frames=num_query_frames, key_frames=tuple(key_frames))


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> list[Any]:
    parsed: list[Any] = ast.literal_eval(text)
    return parsed
