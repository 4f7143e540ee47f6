"""Backends timed on one call: those that run and agree, in turns, each kernel once."""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from diffusion_runtime.attention.backends.calling import run_backend
from diffusion_runtime.attention.backends.interface import AttentionCall, Backend, NoOptions
from diffusion_runtime.attention.catalogue import raised_line
from diffusion_runtime.attention.timing import time_alternately

_NUM_ROUNDS = 7
# After this long no further round begins; first calls, which may compile, are not counted.
_SECONDS = 2.0
# Candidates must agree on this many queries to within this: far above rounding, far below a wrong kernel.
_NUM_COMPARED = 16
_DISAGREEMENT = 0.05

_logger = logging.getLogger("diffusion_runtime.attention")


@torch.no_grad()
def time_candidates(call: AttentionCall, backends: Sequence[Backend]) -> dict[str, float]:
    """Milliseconds of a call, by backend: of those that run and agree with the first that does.

    A kernel that several backends end in is timed under the first one's name. Those that are left out are said. The
    call's own tensors are used and none is kept.
    """
    functions: dict[str, Callable[[], object]] = {}
    implementations: set[str] = set()
    agreed: torch.Tensor | None = None
    for backend in backends:
        mine = with_own_options(backend, call)
        try:
            rows, implementation = _first_call(backend, mine)
        except Exception as error:  # whatever a kernel or its package raises, memory included
            _logger.warning("measured leaves %s out: %s", backend.name, raised_line(error))
            continue
        if agreed is None:
            agreed = rows
        else:
            difference = float((rows - agreed).norm() / agreed.norm().clamp(min=1e-30))
            if not difference <= _DISAGREEMENT:
                said = "measured leaves %s out: its result differs from that of %s by %.1e"
                _logger.warning(said, backend.name, next(iter(functions)), difference)
                continue
        # The same kernel under another name, such as torch's own choice of cuDNN, is timed once.
        if implementation not in implementations:
            implementations.add(implementation)
            functions[backend.name] = functools.partial(run_backend, backend, mine)
    deadline = time.monotonic() + _SECONDS
    samples = time_alternately(functions, call.q.device, num_rounds=_NUM_ROUNDS, deadline=deadline)
    return {name: statistics.median(times) for name, times in samples.items()}


def _first_call(backend: Backend, call: AttentionCall) -> tuple[torch.Tensor, str]:
    """Some rows of the result, in float32, and who computed it. Raises ValueError when they are not finite."""
    result = run_backend(backend, call)
    rows = result.out[:, :: max(1, result.out.shape[1] // _NUM_COMPARED)].float()
    if not bool(rows.isfinite().all()):
        raise ValueError("its result is not finite")
    return rows, result.implementation


def with_own_options(backend: Backend, call: AttentionCall) -> AttentionCall:
    """The call with the options of a backend, which are its defaults."""
    if backend.options_type is NoOptions:
        return call
    return call._replace(options=backend.options_type())
