"""Opaque attention: one operator that torch.compile records and does not trace (torch.library.custom_op).

Selection, planning, exchanges between processes and the count of a call are Python, and depend on step and request: a
traced call would be compiled again with each of them. Layer and context reach the operator as handles; a context that
is made within a graph, and the values of `attention`, as arguments (recorded_values.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from diffusion_runtime.attention.context import CONTEXTS, AttentionContext
from diffusion_runtime.attention.handles import HandleTable
from diffusion_runtime.attention.recorded_values import CallValues, OperatorValues, call_values
from diffusion_runtime.report.attention_report import AttentionRecorder


class RecordedAttention(Protocol):
    """The callee of the operator: an attention layer, or the function `attention`."""

    def run_recorded(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gate: torch.Tensor | None,
        mask: torch.Tensor | None,
        context: AttentionContext,
        values: CallValues | None,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The result of one call and its log-sum-exp, None where return_lse is False. values: of a call that was
        recorded by its values; context has their layout, step and state."""


# What the operators of compiled graphs call.
ATTENTIONS: HandleTable[RecordedAttention] = HandleTable()
# The handle of no context: the values hold everything.
_NO_HANDLE = torch.tensor(0, dtype=torch.int64, device="cpu")


def record_attention(
    attention: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    mask: torch.Tensor | None,
    at: torch.Tensor | OperatorValues,
    *,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """While torch.compile traces: the operator for one call. attention: a handle; at: the handle of a context, or the
    call's values. Where there is no log-sum-exp to return, an empty tensor replaces it."""
    tensors = [each for each in (q, k, v, gate, mask) if each is not None]
    differentiable = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    context, values = (_NO_HANDLE, at) if isinstance(at, OperatorValues) else (at, OperatorValues("", (), _NO_HANDLE))
    recorded: tuple[torch.Tensor, torch.Tensor] = opaque_attention(
        q, k, v, gate, mask, attention, context, *values, return_lse, differentiable
    )
    return recorded


@torch.library.custom_op("diffusion_runtime::attention", mutates_args=())
def opaque_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    mask: torch.Tensor | None,
    attention: torch.Tensor,
    context: torch.Tensor,
    text: str,
    numbers: Sequence[int],
    times: torch.Tensor,
    return_lse: bool,
    differentiable: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One call, contiguous. attention, context: handles; text, numbers, times: OperatorValues, an empty text for none.

    differentiable: whether gradients of the result will be asked for. The call raises what an uncompiled one raises, a
    ConfigError among that for a kernel that computes none; the backward pass computes the call again."""
    call = attention, context, text, numbers, times, return_lse
    if not differentiable:
        return _contiguous(*_run((q, k, v, gate, mask), *call))
    with _gradients_recorded():
        out, lse = _run([_leaf(each) for each in (q, k, v, gate, mask)], *call)
    return _contiguous(out.detach(), None if lse is None else lse.detach())


@torch.library.custom_op("diffusion_runtime::attention_backward", mutates_args=())
def opaque_attention_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    mask: torch.Tensor | None,
    attention: torch.Tensor,
    context: torch.Tensor,
    text: str,
    numbers: Sequence[int],
    times: torch.Tensor,
    return_lse: bool,
) -> list[torch.Tensor]:
    """The gradients of q, k, v, gate and mask, empty tensors for those that have none. The call is computed again,
    uncounted."""
    with _gradients_recorded():
        given = [_leaf(each) for each in (q, k, v, gate, mask)]
        out, lse = _run(given, attention, context, text, numbers, times, return_lse, is_counted=False)
        results = [(out, grad_out)]
        if lse is not None and grad_lse is not None and lse.requires_grad:
            results.append((lse, grad_lse))
        leaves = [leaf for leaf in given if leaf is not None and leaf.requires_grad]
        found = torch.autograd.grad(
            [result for result, _ in results], leaves, [grad for _, grad in results], allow_unused=True
        )
    grads = dict(zip(map(id, leaves), found, strict=True))
    return [
        q.new_empty(0) if leaf is None or not leaf.requires_grad else _or_zeros(grads[id(leaf)], leaf) for leaf in given
    ]


def _run(
    given: Sequence[Any],
    attention: torch.Tensor,
    context: torch.Tensor,
    text: str,
    numbers: Sequence[int],
    times: torch.Tensor,
    return_lse: bool,
    *,
    is_counted: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The call of an operator. given: q, k, v, gate and mask."""
    values = call_values(text, numbers, times) if text else None
    now = CONTEXTS.find(context) if values is None else AttentionContext(values.layout, values.step, values.state)
    if not is_counted:
        now = dataclasses.replace(now, recorder=AttentionRecorder())
    q, k, v, gate, mask = given
    return ATTENTIONS.find(attention).run_recorded(q, k, v, gate, mask, now, values, return_lse)


def _contiguous(out: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return out.contiguous(), out.new_empty(0, dtype=torch.float32) if lse is None else lse.contiguous()


def _leaf(tensor: Any) -> Any:
    """A tensor whose gradient is recorded, where its numbers can have one; None for None."""
    if tensor is None:
        return None
    leaf = tensor.detach()
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def _or_zeros(grad: torch.Tensor | None, leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf, memory_format=torch.contiguous_format) if grad is None else grad.contiguous()


@contextlib.contextmanager
def _gradients_recorded() -> Iterator[None]:
    """Record gradients within an operator, which torch runs below autograd."""
    with torch._C._PreserveDispatchKeyGuard(), torch.enable_grad():
        keys = torch._C.DispatchKey
        # Of views too: results that are written into parts of a tensor are otherwise lost to it.
        for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.ADInplaceOrView):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


@opaque_attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,  # noqa: ARG001
    v: torch.Tensor,  # noqa: ARG001
    gate: torch.Tensor | None,  # noqa: ARG001
    mask: torch.Tensor | None,  # noqa: ARG001
    attention: torch.Tensor,  # noqa: ARG001
    context: torch.Tensor,  # noqa: ARG001
    text: str,  # noqa: ARG001
    numbers: Sequence[int],  # noqa: ARG001
    times: torch.Tensor,  # noqa: ARG001
    return_lse: bool,
    differentiable: bool,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, num_queries, num_heads = q.shape[:3]
    shape = (batch, num_heads, num_queries) if return_lse else (0,)
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)


@opaque_attention_backward.register_fake
def _(
    grad_out: torch.Tensor,  # noqa: ARG001
    grad_lse: torch.Tensor | None,  # noqa: ARG001
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    mask: torch.Tensor | None,
    attention: torch.Tensor,  # noqa: ARG001
    context: torch.Tensor,  # noqa: ARG001
    text: str,  # noqa: ARG001
    numbers: Sequence[int],  # noqa: ARG001
    times: torch.Tensor,  # noqa: ARG001
    return_lse: bool,  # noqa: ARG001
) -> list[torch.Tensor]:
    given = (q, k, v, gate, mask)
    return [q.new_empty(0) if x is None or not x.is_floating_point() else x.new_empty(x.shape) for x in given]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    q, k, v, gate, mask, attention, context, text, numbers, times, return_lse, _ = inputs
    ctx.save_for_backward(q, k, v, gate, mask, attention, context, times)
    ctx.values = text, numbers, return_lse


def _backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> tuple[Any, ...]:
    q, k, v, gate, mask, attention, context, times = ctx.saved_tensors
    text, numbers, return_lse = ctx.values
    grads = opaque_attention_backward(
        grad_out,
        grad_lse if return_lse else None,
        *(q, k, v, gate, mask, attention, context),
        *(text, numbers, times, return_lse),
    )
    wanted = ctx.needs_input_grad[:5]
    return *(grad if needed else None for grad, needed in zip(grads, wanted, strict=True)), *(None,) * 7


opaque_attention.register_autograd(_backward, setup_context=_keep_for_backward)


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


def refusal_of_recording(context: AttentionContext | None, block_mask: object = None) -> str:
    """Return why the operator cannot replace a call in a graph, and what to do; empty where it can. context: one that
    was made while torch.compile traces, None for no context."""
    if block_mask is not None:
        return "attention in a graph of torch.compile: no operator takes a block mask; give its pairs as mask="
    if context is None or context.handle is not None:
        return ""
    if context.cache is not None or context.prefix is not None or context.sharding.group.size > 1:
        reason = "a cache, a prefix or a sharding"
    elif context.guidance is not None:
        reason = "normalized attention guidance"
    elif not context.counts_nothing:
        reason = "a recorder"
    else:
        return ""
    return (
        f"attention in a graph of torch.compile: an AttentionContext with {reason} is made within the compiled "
        "function; make it outside and pass it in"
    )
