"""Autotune: backends timed on one call, and the shape class of calls that are expected to rank them alike.

Timed are those that run and agree, in turns, each kernel once.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from diffusion_runtime.attention.backends.calling import run_backend
from diffusion_runtime.attention.backends.interface import AttentionCall, Backend, NoOptions
from diffusion_runtime.attention.backends.requirements import call_features
from diffusion_runtime.attention.roles import role_category
from diffusion_runtime.startup.importing import raised_line

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

    A kernel that several backends end in is timed under the first one's name. Those that are left out are logged. The
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
                message = "measured leaves %s out: its result differs from that of %s by %.1e"
                _logger.warning(message, backend.name, next(iter(functions)), difference)
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


# A sample lasts at least this long, which hides the gaps between launches and the grain of the clock.
_SAMPLE_MILLISECONDS = 5.0
_MOST_CALLS = 100


def milliseconds(function: Callable[[], object], num_calls: int, device: torch.device) -> float:
    """The time of one call, of `num_calls` in a row: the device's own clock on CUDA and ROCm, the host's elsewhere."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(num_calls):
                function()
            stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop)) / num_calls
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(num_calls):
        function()
    _synchronize(device)
    return 1e3 * (time.perf_counter() - started) / num_calls


def time_alternately(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    num_rounds: int,
    deadline: float = math.inf,
) -> dict[str, list[float]]:
    """Samples in milliseconds per call, one per function and round, every round in another order.

    The functions must have run before: what they compile or allocate at first is not to be timed. deadline: of
    time.monotonic(); past it no round begins, but there is always one sample of each.
    """
    samples: dict[str, list[float]] = {}
    num_calls: dict[str, int] = {}
    for name, function in functions.items():
        first = milliseconds(function, 1, device)
        num_calls[name] = min(_MOST_CALLS, math.ceil(_SAMPLE_MILLISECONDS / max(first, 1e-6)))
        # A call that is a sample by itself need not be made again.
        samples[name] = [first] if num_calls[name] == 1 else [milliseconds(function, num_calls[name], device)]
    names = list(functions)
    for turn in range(1, num_rounds):
        if time.monotonic() >= deadline:
            break
        shift = turn % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            samples[name].append(milliseconds(functions[name], num_calls[name], device))
    return samples


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def shape_class(call: AttentionCall) -> str:
    """A name for all calls that are expected to rank backends alike: `self-b1-q32768-k32768-h12-kv12-d128-bfloat16`.

    Lengths and batch are rounded up to the next power of two or one and a half times one; heads, head size, dtype and
    features are exact. Padding counts by what it asks of a kernel.
    """
    batch, seq_q, num_heads, head_dim = call.q.shape
    parts = [
        role_category(call.layer.role),
        f"b{_bucket(batch)}",
        f"q{_bucket(seq_q)}",
        f"k{_bucket(call.k.shape[1])}",
        f"h{num_heads}",
        f"kv{call.k.shape[2]}",
        f"d{head_dim}",
        str(call.q.dtype).removeprefix("torch."),
    ]
    parts += sorted(call_features(call) - {"key_padding", "scale"})
    if padding := padding_class(call):
        parts.append(padding)
    if call.mask is not None:
        # Which dimensions a mask spans decides what a kernel reads of it.
        parts.append("mask" + "".join("x" if size > 1 else "1" for size in call.mask.shape))
    return "-".join(parts)


def padding_class(call: AttentionCall) -> str:
    """`cut` where one slice of the keys serves all samples, `gathered` where a copy does, else `unequal`; empty
    without padding."""
    layout = call.layout
    if layout is None or not layout.has_padding:
        return ""
    ranges = {layout.key_ranges(sample) for sample in range(call.q.shape[0])}
    if len(ranges) > 1:
        return "unequal"
    return "gathered" if len(next(iter(ranges))) > 1 else "cut"


def _bucket(length: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, ... that is not below `length`."""
    power = 1
    while power < length:
        power *= 2
    return power // 4 * 3 if power >= 4 and power // 4 * 3 >= length else power
