"""Opaque attention: operators that torch.compile records without tracing what they do (torch.library.custom_op).

Selection, planning, exchanges between processes and the count of a call are Python, and depend on step and request: a
traced block would be compiled anew with each of them. Layer and context reach an operator as handles.
"""

from __future__ import annotations

from typing import Any

import torch

from diffusion_runtime.attention.context import CONTEXTS, AttentionContext
from diffusion_runtime.attention.handles import HandleTable

# The attention layers of compiled blocks, which the operators call.
LAYERS: HandleTable[Any] = HandleTable()


# Of the three kinds of calls: with nothing but tokens and a layout (self-attention, joint attention with text behind
# the grid, cross-attention), with a gate, and with a mask.
@torch.library.custom_op("diffusion_runtime::attention", mutates_args=())
def opaque_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: torch.Tensor, context: torch.Tensor
) -> torch.Tensor:
    """AttentionLayer.forward, contiguous. layer, context: handles of both."""
    out: torch.Tensor = LAYERS.find(layer)(q, k, v, CONTEXTS.find(context))
    return out.contiguous()


@torch.library.custom_op("diffusion_runtime::gated_attention", mutates_args=())
def opaque_gated_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    layer: torch.Tensor,
    context: torch.Tensor,
) -> torch.Tensor:
    """As `opaque_attention`, of a layer with a gate. A graph is the same at every step, so it always makes the gate; a
    backend without a gated branch, such as that of dense first steps, is called without."""
    found, now = LAYERS.find(layer), CONTEXTS.find(context)
    out: torch.Tensor = found(q, k, v, now, gate=gate if found.takes_gate(q, now) else None)
    return out.contiguous()


@torch.library.custom_op("diffusion_runtime::masked_attention", mutates_args=())
def opaque_masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    layer: torch.Tensor,
    context: torch.Tensor,
) -> torch.Tensor:
    """As `opaque_attention`, with a mask."""
    out: torch.Tensor = LAYERS.find(layer)(q, k, v, CONTEXTS.find(context), mask=mask)
    return out.contiguous()


@torch.library.custom_op("diffusion_runtime::gathered_tokens", mutates_args=())
def opaque_gathered_tokens(x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """All grid tokens [batch, seq, ...] of a layout without text, in any order, from this process's slice x."""
    found = CONTEXTS.find(context)
    assert found.layout is not None
    return found.sharding.gather_in_order(x, found.layout.num_tokens).contiguous()


def gathered_tokens(x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
    """Within a block: all grid tokens of the context's layout, which has no text, from this process's slice x [batch,
    seq, ...]; in any order, for those who take them as keys."""
    assert context.layout is not None
    if context.sharding.group.size == 1:
        return x
    if torch.compiler.is_dynamo_compiling() and context.handle is not None:
        out: torch.Tensor = opaque_gathered_tokens(x, context.handle)
        return out
    return context.sharding.gather_in_order(x, context.layout.num_tokens)


@opaque_gathered_tokens.register_fake
def _(x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    # Slices are padded, and the number of all tokens is the context's: a size of no other tensor.
    return x.new_empty(x.shape[0], torch.library.get_ctx().new_dynamic_size(), *x.shape[2:])


@opaque_attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,  # noqa: ARG001
    v: torch.Tensor,  # noqa: ARG001
    layer: torch.Tensor,  # noqa: ARG001
    context: torch.Tensor,  # noqa: ARG001
) -> torch.Tensor:
    return _like_queries(q)


@opaque_gated_attention.register_fake
@opaque_masked_attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,  # noqa: ARG001
    v: torch.Tensor,  # noqa: ARG001
    further: torch.Tensor,  # noqa: ARG001
    layer: torch.Tensor,  # noqa: ARG001
    context: torch.Tensor,  # noqa: ARG001
) -> torch.Tensor:
    return _like_queries(q)


def _like_queries(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape)
