"""Backend calls: checks of shapes, aligned rows, the device guard, and the fallback for numbers of keys (detour).

Kernels differ in what they do with an empty tensor: they refuse it, return garbage, or end the process. And GPU kernels
load 16 bytes at once: with rows that begin in between, cuDNN's, which torch takes by itself, returned garbage without a
word on an H200 (relative error 1.3), and torch's flash kernel lost the device; the one for CPUs that returns the
log-sum-exp ignores the stride of the last dimension.

A detour is declared, not a silent fallback: a package's documentation sends a kind of call elsewhere (SageAttention 3
and grouped queries), or a capability declares which numbers of keys its kernels compute correctly. It is logged and
counted.
"""

from __future__ import annotations

import functools
import itertools
import logging

import torch

from diffusion_runtime.attention.backends.capability import KeyCounts
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, Backend, CallForm
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.core.device_guard import device_guard, guard_is_needed
from diffusion_runtime.core.hardware import detect_hardware
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.errors import ConfigError, shown


def run_backend(backend: Backend, call: AttentionCall) -> AttentionResult:
    """One call that selection has checked. out has q's dtype, whatever autocast would make of its products.

    A call without keys gives 0 and -inf, as every query does that sees no key, and one without queries empty tensors;
    `backend.run` sees neither. It sees heads whose numbers lie side by side, on a GPU from a multiple of 16 bytes on.
    A number of keys that is none of the capability's key_counts is computed elsewhere, which the result states. Raises
    ConfigError where inputs require gradients that the backend does not compute.
    """
    q = call.inputs.q
    if call.inputs.k.shape[1] == 0:
        return _empty_result(call, "no keys")
    if q.numel() == 0:
        return _empty_result(call, "no queries")
    call, device = _with_aligned_rows(call), q.device
    needs_gradients = torch.is_grad_enabled() and _requires_gradients(call)
    if needs_gradients:
        refusal = backend.gradient_refusal(call)
        if refusal is not None:
            raise _without_gradients(backend, refusal)
    if not guard_is_needed(device):
        result = _run(backend, call)
    else:
        with device_guard(device):
            result = _run(backend, call)
    if needs_gradients and not result.out.requires_grad:
        raise _without_gradients(backend, f"its kernel ({result.implementation}) has no backward pass")
    return result


def _requires_gradients(call: AttentionCall) -> bool:
    inputs = call.inputs
    return any(x is not None and x.requires_grad for x in (inputs.q, inputs.k, inputs.v, inputs.gate, inputs.mask))


def _without_gradients(backend: Backend, reason: str) -> ConfigError:
    return ConfigError(
        f"attention: {backend.name} computes no gradients here, and inputs require them: {reason}. Call it under "
        "torch.no_grad() or torch.inference_mode(), or train with a dense backend such as torch_sdpa"
    )


def expected_implementation(backend: Backend, form: CallForm) -> str | None:
    """Return the implementation that `run_backend` will report for such a call; None where it is found at the call."""
    if form.k_shape[1] == 0:
        return "no keys"
    return backend.expected_implementation(form)


def no_visible_keys(q: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp of queries that see nothing: -inf, float32 [batch, heads, seq_q]. q: [batch, seq_q, heads, _]."""
    return q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=torch.float32)


def aligned_tokens(x: torch.Tensor) -> torch.Tensor:
    """x [batch, seq, heads, head_dim] with the numbers of a head side by side, from a multiple of 16 bytes on: itself,
    or a copy. A head size that is no such multiple leaves nothing to align."""
    batch, token, head, last = x.stride()
    unit = 16 // x.element_size()
    is_aligned = not (x.storage_offset() % unit or batch % unit or token % unit or head % unit)
    if last == 1 and (is_aligned or x.shape[3] % unit):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    """x with the numbers of a head side by side: itself, or a copy."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _run(backend: Backend, call: AttentionCall) -> AttentionResult:
    reason = key_count_reason(backend, call)
    return backend.run(call) if reason is None else run_elsewhere(call, reason)


def _with_aligned_rows(call: AttentionCall) -> AttentionCall:
    given = call.inputs.q, call.inputs.k, call.inputs.v
    if given[0].is_cuda:
        q, k, v = map(aligned_tokens, given)
    elif given[0].stride(-1) == given[1].stride(-1) == given[2].stride(-1) == 1:
        return call
    else:
        q, k, v = map(_side_by_side, given)
    if q is given[0] and k is given[1] and v is given[2]:
        return call
    return call._replace(inputs=call.inputs._replace(q=q, k=k, v=v))


def _empty_result(call: AttentionCall, why: str) -> AttentionResult:
    return AttentionResult(torch.zeros_like(call.q), no_visible_keys(call.q) if call.return_lse else None, why)


# Where SageAttention's documentation sends what it has no kernel for; it computes every call on every device.
_ELSEWHERE = "torch_sdpa"

_logger = logging.getLogger("diffusion_runtime.attention")


def key_count_reason(backend: Backend, call: AttentionCall) -> str | None:
    """Return why a call must run elsewhere: one of its numbers of keys is none of the capability's key_counts; else
    None. The fields of a narrowed capability give its narrowest case, so one comparison settles most calls."""
    if backend.capability.key_counts.block == 1:
        return None
    counts = _key_counts(backend, call.q.device)
    fits_blocks = not call.causal or call.k.shape[1] % counts.causal_block == 0
    if fits_blocks and all(number in counts for number in numbers_of_keys(call)):
        return None
    return f"{backend.name} here takes {counts}"


def run_elsewhere(call: AttentionCall, reason: str) -> AttentionResult:
    """The call by another backend: logged once per request, and counted under what ran."""
    other = find_backend(_ELSEWHERE)
    assert other is not None
    if call.state.is_first(reason):
        _logger.info("%s: these calls run on %s", reason, other.name)
    result = other.run(call._replace(options=other.options_type()))
    return AttentionResult(result.out, result.lse, f"{other.name} ({result.implementation}): {reason}")


def numbers_of_keys(call: AttentionCall) -> set[int]:
    """Return the numbers of keys of a kernel that masks nothing behind them: the lengths, where padding is cut off.

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
    return backend.capability.on_hardware(detect_hardware(str(device))).key_counts


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TokenLayout | None, causal: bool) -> None:
    """Raises ConfigError unless q, k, v are [batch, seq, heads, head_dim] that fit each other and the layout."""
    # Read once: every access to a shape makes a new object, and this runs at every call.
    q_shape, k_shape = q.shape, k.shape
    fits = len(q_shape) == len(k_shape) == 4 and k_shape == v.shape
    if not fits or q_shape[0] != k_shape[0] or q_shape[3] != k_shape[3] or not _are_groups(q_shape[2], k_shape[2]):
        raise ConfigError(
            "attention: expected q [batch, seq_q, heads, head_dim] and k, v [batch, seq_k, kv_heads, head_dim] with "
            f"heads a multiple of kv_heads, got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(f"attention: q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ConfigError(f"attention: q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if causal and q_shape[1] != k_shape[1]:
        raise ConfigError(f"attention: causal needs as many queries as keys, got {q.shape[1]} and {k.shape[1]}")
    if layout is None:
        return
    if not isinstance(layout, TokenLayout):
        raise ConfigError(
            f"attention: layout: expected a TokenLayout, got {shown(layout)}; a grid of frames x height x width is "
            "TokenLayout((frames, height, width))"
        )
    if layout.num_tokens != k.shape[1]:
        raise ConfigError(f"attention: the layout describes {layout.num_tokens} tokens, k has {k.shape[1]}")
    if layout.valid_lengths is not None and len(layout.valid_lengths) != q.shape[0]:
        raise ConfigError(
            f"attention: valid_lengths holds {len(layout.valid_lengths)} samples, the batch has {q.shape[0]}"
        )


def _are_groups(num_heads: int, num_kv_heads: int) -> bool:
    """Return whether every key head serves equally many query heads; no heads on either side are allowed."""
    return num_heads == num_kv_heads or (num_kv_heads > 0 and num_heads % num_kv_heads == 0)


def check_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    layer: LayerInfo,
) -> None:
    """Raises ConfigError unless a layer is called with the heads and the head size that it was built for, which its
    backend was chosen by. q, k, v: before processes exchange heads, so with all of the layer's."""
    of_keys = (num_kv_heads, head_dim)
    if q.shape[2:] == (num_heads, head_dim) and k.shape[2:] == of_keys and v.shape[2:] == of_keys:
        return
    where = f"layer {layer.index}" + (f" ({layer.name})" if layer.name else "")
    raise ConfigError(
        f"attention of {where}, role {layer.role!r}: built for q [batch, seq_q, {num_heads}, {head_dim}] and k, v "
        f"[batch, seq_k, {num_kv_heads}, {head_dim}], called with q {tuple(q.shape)}, k {tuple(k.shape)}, "
        f"v {tuple(v.shape)}; build the layer with the num_heads, head_dim and num_kv_heads of its calls"
    )
