"""cuDNN's attention, as torch ships it.

Its operator is called by itself: `sdpa_kernel`, which pins it behind the public function, switches kernels on and off
for every thread of the process.
"""

from __future__ import annotations

import torch

from diffusion_runtime.attention.backends.capability import Capability, HeadSizes, NarrowedCapability
from diffusion_runtime.attention.backends.interface import (
    AttentionCall,
    AttentionResult,
    Availability,
    Backend,
    CallForm,
)
from diffusion_runtime.attention.backends.key_ranges import attend_by_ranges
from diffusion_runtime.attention.backends.masks import aligned_rows, as_additive, blank_hidden_rows, hide_later_keys
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.core.hardware import Hardware

_BLACKWELL = (10, 0)


def _capability(maximum_head_size: int) -> Capability:
    return Capability(
        platforms=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        head_sizes=HeadSizes(minimum=8, maximum=maximum_head_size, multiple=8),
        features=frozenset(
            {"key_padding", "gqa", "causal", "scale", "lse", "boolean_mask", "additive_mask", "cached_keys"}
        ),
        minimum_capability=(8, 0),
        maximum_capability=(12, 1),
    )


_UP_TO_128, _UP_TO_256 = _capability(128), _capability(256)


def _on(hardware: Hardware) -> Capability:
    large = hardware.capability == (9, 0) and hardware.cudnn is not None and hardware.cudnn >= (9, 10)
    return _UP_TO_256 if large else _UP_TO_128


@register_backend
class CudnnBackend(Backend):
    """torch's cuDNN operator: it runs or raises, it never takes another kernel."""

    name = "cudnn_attn"
    summary = "cuDNN's attention through torch"
    self_check_platforms = frozenset()
    not_replayed = None
    capability = NarrowedCapability(
        platforms=_UP_TO_256.platforms,
        dtypes=_UP_TO_256.dtypes,
        head_sizes=_UP_TO_256.head_sizes,
        features=_UP_TO_256.features,
        minimum_capability=_UP_TO_256.minimum_capability,
        maximum_capability=_UP_TO_256.maximum_capability,
        narrow=_on,
    )

    def probe(self, hardware: Hardware) -> Availability:
        needed = (9, 5) if hardware.capability is not None and hardware.capability >= _BLACKWELL else (9, 0)
        fix = "pip install -U torch, with the CUDA build that matches the driver"
        if hardware.cudnn is None:
            return Availability(None, "torch has no cuDNN here", fix)
        version = f"{hardware.cudnn[0]}.{hardware.cudnn[1]}"
        if hardware.cudnn < needed:
            return Availability(None, f"needs cuDNN {needed[0]}.{needed[1]} on this chip, torch has {version}", fix)
        return Availability(version)

    def versions(self, hardware: Hardware) -> str:
        return f"cuDNN {self.probe(hardware).version}"

    def expected_implementation(self, form: CallForm) -> str | None:
        return "one key" if form.k_shape[1] == 1 else "cudnn"

    def run(self, call: AttentionCall) -> AttentionResult:
        return attend_by_ranges(call, _attend)


def _attend(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> AttentionResult:
    mask = call.mask
    if k.shape[1] == 1:
        return blank_hidden_rows(_attend_to_one_key(call, q, k, v), mask)
    if mask is not None and causal:
        mask, causal = hide_later_keys(mask, q.shape[1]), False
    bias = None if mask is None else aligned_rows(as_additive(mask, q.dtype))
    repeats = q.shape[2] // k.shape[2]
    # Without a log-sum-exp the operator's backward returns wrong gradients (seen on an H200).
    needs_lse = call.return_lse or (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
    if needs_lse and repeats > 1:
        # With one it takes equal head counts.
        k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    q_bhsd, k_bhsd, v_bhsd = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_bhsd, k_bhsd, v_bhsd, bias, needs_lse, 0.0, causal, scale=call.scale
    )[:2]
    result_lse = lse.reshape(q_bhsd.shape[:3]).float() if call.return_lse else None
    return blank_hidden_rows(AttentionResult(out.transpose(1, 2), result_lse, "cudnn"), mask)


def _attend_to_one_key(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionResult:
    """cuDNN refuses a single key, such as an empty prompt's; its weight is 1 whatever the scores are."""
    repeats = q.shape[2] // k.shape[2]
    out = v.repeat_interleave(repeats, 2).expand_as(q).contiguous()
    if not call.return_lse:
        return AttentionResult(out, None, "one key")
    scale = q.shape[3] ** -0.5 if call.scale is None else call.scale
    scores = scale * (q.float() * k.float().repeat_interleave(repeats, 2)).sum(-1).transpose(1, 2)
    if call.mask is not None and call.mask.dtype != torch.bool:
        scores = scores + call.mask[..., 0]
    return AttentionResult(out, scores.contiguous(), "one key")
