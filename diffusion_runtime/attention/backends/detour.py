"""Calls that a backend does not compute itself: they run elsewhere, said and counted.

A detour is declared, not a fallback: a package's own documentation sends a kind of call elsewhere (SageAttention 3 and
grouped queries), or its capability says which numbers of keys its kernels compute right.
"""

from __future__ import annotations

import functools
import itertools
import logging

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, Backend, KeyCounts
from diffusion_runtime.attention.backends.narrowing import capability_on
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.hardware import detect_hardware

# Where SageAttention's documentation sends what it has no kernel for; it computes every call on every device.
_ELSEWHERE = "torch_sdpa"

_logger = logging.getLogger("diffusion_runtime.attention")


def key_count_reason(backend: Backend, call: AttentionCall) -> str | None:
    """Why a call must run elsewhere: one of its numbers of keys is none of the capability's key_counts; None when not.

    The fields of a narrowed capability say the worst of it, so most calls are done with one comparison.
    """
    if backend.capability.key_counts.block == 1:
        return None
    counts = _key_counts(backend, call.q.device)
    fits_blocks = not call.causal or call.k.shape[1] % counts.causal_block == 0
    if fits_blocks and all(number in counts for number in numbers_of_keys(call)):
        return None
    return f"{backend.name} here takes {counts}"


def run_elsewhere(call: AttentionCall, reason: str) -> AttentionResult:
    """The call by another backend: said once a request, and counted under what ran."""
    other = find_backend(_ELSEWHERE)
    assert other is not None
    if call.state.is_first(reason):
        _logger.info("%s: these calls run on %s", reason, other.name)
    result = other.run(call._replace(options=other.options_type()))
    return AttentionResult(result.out, result.lse, f"{other.name} ({result.implementation}): {reason}")


def numbers_of_keys(call: AttentionCall) -> set[int]:
    """How many keys a kernel meets whose mask does not end with them: the lengths, where padding is cut off.

    A causal kernel hides from every query what comes after it, the rest of the last block with it; it is exempt unless
    there is padding, whose own queries see all keys before them and are computed without the causal mask.
    """
    layout = call.layout
    if layout is None or not layout.has_padding:
        return set() if call.causal else {call.k.shape[1]}
    numbers: set[int] = set()
    for sample in range(call.q.shape[0]):
        lengths = [stop - start for start, stop in layout.key_ranges(sample)]
        numbers.update(itertools.accumulate(lengths) if call.causal else [sum(lengths)])
    # A sample without keys meets no kernel.
    return numbers - {0}


@functools.lru_cache(maxsize=64)
def _key_counts(backend: Backend, device: torch.device) -> KeyCounts:
    return capability_on(backend, detect_hardware(str(device))).key_counts
