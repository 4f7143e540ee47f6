"""Requirements of an attention call: the FEATURES it uses, and the AttentionRequirements that a backend must meet.

The one place where features are read off a call: selection, the layers' decision keys, autotuning and the dense calls
of sparse backends all ask here, so that no copy of the list misses one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

from diffusion_runtime.attention.backends.capability import AttentionRequirements
from diffusion_runtime.attention.backends.interface import AttentionCall
from diffusion_runtime.attention.backends.masks import mask_feature
from diffusion_runtime.attention.roles import role_category
from diffusion_runtime.core.hardware import detect_hardware
from diffusion_runtime.core.token_layout import CachedLayout, TokenLayout


def features_used(
    *,
    layout: TokenLayout | None = None,
    gate: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
    cached_keys: bool = False,
) -> frozenset[str]:
    """The FEATURES that a call with these arguments uses; grouped queries follow from its head counts. cached_keys:
    whether there will be more keys than the layout has, out of a cache."""
    used = []
    if cached_keys or isinstance(layout, CachedLayout):
        used.append("cached_keys")
    if layout is not None and layout.has_padding:
        used.append("key_padding")
    if gate is not None:
        used.append("gate")
    if mask is not None:
        used.append(mask_feature(mask))
    if block_mask is not None:
        used.append("block_mask")
    if scale is not None:
        used.append("scale")
    if causal:
        used.append("causal")
    if return_lse:
        used.append("lse")
    return frozenset(used)


def call_features(call: AttentionCall) -> frozenset[str]:
    """The FEATURES that a call uses."""
    return features_used(
        layout=call.layout,
        gate=call.gate,
        mask=call.mask,
        block_mask=call.block_mask,
        scale=call.scale,
        causal=call.causal,
        return_lse=call.return_lse,
    )


class CallKind(NamedTuple):
    """All that a choice can depend on at a call, quick to hash: calls of one kind have the same requirements."""

    role: str
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    num_heads: int
    num_kv_heads: int
    needs: frozenset[str]

    @classmethod
    def of(cls, call: AttentionCall) -> CallKind:
        q = call.q
        num_heads, head_dim = q.shape[2:]
        return cls(call.layer.role, head_dim, q.dtype, q.device, num_heads, call.num_kv_heads, call_features(call))

    def requirements(self) -> AttentionRequirements:
        return AttentionRequirements(
            role=self.role,
            category=role_category(self.role),
            head_dim=self.head_dim,
            dtype=dtype_name(self.dtype),
            hardware=detect_hardware(str(self.device)),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            needs=self.needs,
        )


def requirements_of(call: AttentionCall) -> AttentionRequirements:
    """Return what a backend must be able to do to compute `call`, on the device of its tensors."""
    return CallKind.of(call).requirements()


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
