"""Measured error: rounded attention on a model's own q, k and v, compared with exact attention before it is relied on.

A backend that gives up precision declares its error on normally distributed inputs (`Backend.error_bound`). A model's
may have outliers, or queries of which few keys count, so of each layer's first call in a request, by each choice
and in each phase, a few rows are computed again in float32. Beyond the bound the generation ends there; the report has
the largest error of each role.

Computed are 64 queries of 4 pairs of a sample and a head, with all of their keys. For 75,600 keys of head size 128 and
24 heads that is 10e9 operations, where the call has 70e12, in 0.2 GB, where the call had 0.9 of codes, which it has
given back by then. Then the host waits once for the device. Exact and sparse choices are not measured, and wait for
nothing.

The first call is an eager one: a CUDA graph finds in the request's state that the layer was measured, so a request
whose state has no such mark runs its first pass without it (attention/fixed_state.py).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall, Backend
from diffusion_runtime.attention.backends.key_ranges import Ranges, keep_ranges
from diffusion_runtime.attention.backends.reference import reference_attention
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.core.device_guard import device_guard, must_not_wait
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.errors import BackendInaccurateError
from diffusion_runtime.parallel.collectives import RankGroup, all_gather

if TYPE_CHECKING:
    from diffusion_runtime.attention.select import Resolved

# What a kernel may lose that rounds weights and result to the inputs' dtype and sums in float32: four times or more
# what good kernels lose. A factor of 1.1 on the scale is an error of 0.1.
ROUNDING_BOUNDS = {"float64": 1e-12, "float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}

_NUM_PAIRS, _NUM_ROWS = 4, 64


class Rounding(NamedTuple):
    """The error that a decision allows. backend: who declares it; bound: what is allowed; of_dense_calls: whether it
    computes those calls of a sparse method alone that keep every key; options: of the backend, as text."""

    backend: str
    bound: float
    of_dense_calls: bool
    options: str


def allowed_error(backend: Backend, dtype: str, hardware: Hardware) -> float:
    """Return the relative error that a backend may have in a dtype: its rounding, or what is given up by design."""
    return max(ROUNDING_BOUNDS[dtype], backend.error_bound_on(hardware) or 0.0)


def rounding_of(resolved: Resolved, dtype: str, hardware: Hardware) -> Rounding | None:
    """Return the error that a decision's calls may have by design; None for exact ones, and sparse ones with exact
    dense calls."""
    chosen: list[tuple[Backend, Any, bool]] = [(resolved.backend, resolved.options, False)]
    if resolved.dense is not None:
        chosen.append((resolved.dense.backend, resolved.dense.options, True))
    for backend, options, of_dense_calls in chosen:
        if backend.error_bound_on(hardware) is not None:
            # Of a third party's backend, the options may be of any class.
            accepted: float | None = getattr(options, "max_error", None)
            bound = allowed_error(backend, dtype, hardware) if accepted is None else accepted
            return Rounding(backend.name, bound, of_dense_calls, repr(options))
    return None


class ErrorSample:
    """Rows of one call of a layer, in the parts in which it is computed.

    due: the call of a layer that has yet to be measured in its request. The processes of a forward pass make one each
    for the same calls.
    """

    def __init__(self, rounding: Rounding, layer: LayerInfo, context: AttentionContext) -> None:
        self._rounding = rounding
        self._layer = layer
        self._context = context
        self._squares: torch.Tensor | None = None
        self._implementation = ""

    @classmethod
    def due(
        cls, rounding: Rounding | None, layer: LayerInfo, context: AttentionContext, q: torch.Tensor
    ) -> ErrorSample | None:
        """Return the sample of a call whose queries are like q; None where it is exact by design, where its layer was
        measured, and within a capture."""
        if rounding is None:
            return None
        mark = _mark(rounding, layer, context.step)
        if context.state.of_layer(layer, context.step).find(mark) or must_not_wait(q):
            return None
        return cls(rounding, layer, context)

    def add(self, call: AttentionCall, out: torch.Tensor, implementation: str, *, is_sparse: bool) -> None:
        """Take in a part of the call. out: as `call.q`; is_sparse: whether keys were left out."""
        if call.block_mask is not None or (is_sparse and self._rounding.of_dense_calls):
            return
        squares = sampled_squares(call, out)
        self._squares = squares if self._squares is None else self._squares + squares
        self._implementation = implementation

    def check(self, group: RankGroup, device: torch.device) -> None:
        """Record the error and compare it with the bound, alike on all processes of a forward pass, which all call it.
        Waits for the device.

        Raises BackendInaccurateError beyond the bound.
        """
        error, rounding, context = self._error(group, device), self._rounding, self._context
        if error is not None and not error <= rounding.bound:
            raise BackendInaccurateError(self._message(error), [(rounding.backend, f"its error is {error:.2g}")])
        # Also where nothing was measured: a sparse call that is asked again would wait for the device at every step.
        mark = _mark(rounding, self._layer, context.step)
        context.state.of_layer(self._layer, context.step).put(mark, True)
        if error is not None:
            context.recorder.record_error(
                self._layer, context.step, backend=rounding.backend, error=error, bound=rounding.bound
            )

    def _error(self, group: RankGroup, device: torch.device) -> float | None:
        """Return the largest relative error of all processes; None for a sparse call, one without tokens, and inputs
        that are not finite, which the backend is not to blame for. An error that is not a number is infinite."""
        # float32: not every device has float64.
        own = torch.zeros(2, device=device) if self._squares is None else self._squares
        squares = [each.tolist() for each in all_gather(group, own)]
        known = [each for each in squares if each[1] > 0 and math.isfinite(each[1])]
        errors = [math.sqrt(each[0] / each[1]) if math.isfinite(each[0]) else math.inf for each in known]
        return max(errors, default=None)

    def _message(self, error: float) -> str:
        layer, (name, bound, *_) = self._layer, self._rounding
        where = f"layer {layer.index}" + (f" ({layer.name})" if layer.name else "")
        found = f"its relative error is {error:.2g} on this model's q, k and v, {bound:g} allowed"
        flags = f"--attention-config.per_role.{layer.role}"
        accepted = f", or accept it: {flags}.extra.max_error {math.ceil(error * 12) / 10:g}" if error < 1 else ""
        return (
            f"attention of {where}, role {layer.role!r}, step {self._context.step.index}: {name} "
            f"({self._implementation}) is not accurate here: {found}. Choose another backend for the role: "
            f"{flags}.backend torch_sdpa{accepted}"
        )


def _mark(rounding: Rounding, layer: LayerInfo, step: StepInfo) -> Hashable:
    # Layers of one index and role share a scope, and a prefix is computed before the first step, by some of them.
    return "measured error", *rounding, layer.name, step.phase


@torch.no_grad()
def sampled_squares(call: AttentionCall, out: torch.Tensor) -> torch.Tensor:
    """Return the sums of squares of out - exact and of exact, float32 [2], over 64 queries of 4 pairs of a sample and a
    head, all spread evenly. out: of the call, as its q; padded queries have no part in it."""
    q, k, v, layout, _, mask, *_ = call.inputs
    squares = torch.zeros(2, device=q.device)
    with device_guard(q.device):
        for sample, head in _pairs(q.shape[0], q.shape[2]):
            kv_head = head * k.shape[2] // q.shape[2]
            ranges = ((0, k.shape[1]),) if layout is None else layout.key_ranges(sample)
            if not ranges or not q.shape[1]:
                continue
            keys = _positions(ranges, q.device)
            rows = keys if q.shape[1] == k.shape[1] else torch.arange(q.shape[1], device=q.device)
            rows = rows[:: -(-rows.shape[0] // _NUM_ROWS)]
            seen = _seen(mask, call.causal, sample, head, rows, keys)
            exact, _ = reference_attention(
                q[sample, rows, head].float()[None, :, None],
                *(keep_ranges(x[sample, None, :, kv_head, None], ranges) for x in (k, v)),
                scale=call.scale,
                mask=seen,
            )
            difference = out[sample, rows, head].float() - exact[0, :, 0]
            squares += torch.stack([difference.square().sum(), exact.square().sum()])
    return squares


def _pairs(batch: int, num_heads: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of a sample and a head, spread over both."""
    yield from dict.fromkeys((at * batch // _NUM_PAIRS, at * num_heads // _NUM_PAIRS) for at in range(_NUM_PAIRS))


def _positions(ranges: Ranges, device: torch.device) -> torch.Tensor:
    # Made on the device: a copy from the host would wait for it.
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])


def _seen(
    mask: torch.Tensor | None, causal: bool, sample: int, head: int, rows: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor | None:
    """Return the call's mask and causality for these queries and keys, [1, 1, rows or 1, keys]; None for none."""
    seen = None
    if mask is not None:
        cut = mask[sample if mask.shape[0] > 1 else 0, head if mask.shape[1] > 1 else 0]
        seen = (cut if cut.shape[0] == 1 else cut[rows])[:, keys][None, None]
    if not causal:
        return seen
    before = (keys <= rows[:, None])[None, None]
    if seen is None:
        return before
    return seen & before if seen.dtype == torch.bool else seen.masked_fill(~before, float("-inf"))
