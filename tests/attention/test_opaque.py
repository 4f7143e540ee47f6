"""Opaque attention: the operators that stand for attention in compiled blocks, and the handles that reach them."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch

from diffusion_runtime.attention import AttentionContext, LocalAttention, opaque
from diffusion_runtime.attention.context import CONTEXTS
from diffusion_runtime.attention.handles import HandleTable
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout


class Thing:
    """An object without anything."""


def made_opaque(layer: LocalAttention) -> torch.Tensor:
    layer.make_opaque()
    assert layer._handle is not None
    return layer._handle


def test_a_table_keeps_nothing_alive() -> None:
    table: HandleTable[Thing] = HandleTable()
    things = [Thing() for _ in range(3)]
    handles = [table.handle_of(thing) for thing in things]
    assert [table.find(handle) for handle in handles] == things
    assert len(table) == 3
    del things
    gc.collect()
    assert len(table) == 0
    with pytest.raises(RuntimeError, match="no longer exists"):
        table.find(handles[0])


def test_threads_get_handles_of_their_own() -> None:
    table: HandleTable[Thing] = HandleTable()
    found: list[tuple[Thing, torch.Tensor]] = []

    def work() -> None:
        for _ in range(200):
            thing = Thing()
            found.append((thing, table.handle_of(thing)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({int(handle) for _, handle in found}) == 800
    assert all(table.find(handle) is thing for thing, handle in found)


def test_a_context_has_a_handle_where_blocks_are_compiled_and_each_layout_its_own() -> None:
    assert AttentionContext().handle is None
    number = len(CONTEXTS)
    context = AttentionContext(is_compiled=True)
    text = context.with_layout(TokenLayout.text(3))
    assert context.handle is not None
    assert text.handle is not None
    assert CONTEXTS.find(context.handle) is context
    assert CONTEXTS.find(text.handle) is text
    del context, text
    gc.collect()
    assert len(CONTEXTS) == number


def test_operators_are_what_their_fakes_say() -> None:
    """opcheck: schema, shape, strides and dtype of the fake, and tracing with symbolic sizes."""
    torch.manual_seed(0)
    layer = LocalAttention(3, 16, layer=LayerInfo(1, 2, "self", "a.layer"))
    handle, context = made_opaque(layer), AttentionContext(TokenLayout((1, 2, 3), 0, 2, (1, 2)), is_compiled=True)
    assert context.handle is not None
    # As in the models: heads beside each other in one product, and a batch whose padding is cut off.
    q, k, v = torch.randn(2, 8, 3, 3, 16).unbind(2)
    expected = layer(q, k, v, AttentionContext(context.layout))
    found = opaque.opaque_attention(q, k, v, handle, context.handle)
    assert torch.equal(found, expected)
    assert found.is_contiguous()
    mask = torch.rand(2, 1, 8, 8) > 0.3
    plain = AttentionContext(is_compiled=True)
    assert plain.handle is not None
    for operator, further, of in (
        (opaque.opaque_attention, (), context),
        (opaque.opaque_masked_attention, (mask,), plain),
        (opaque.opaque_gated_attention, (torch.ones_like(q),), context),
    ):
        torch.library.opcheck(operator, (q, k, v, *further, handle, of.handle))
    # Of queries whose heads come before their tokens, the result is contiguous all the same.
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.library.opcheck(opaque.opaque_attention, (*turned, handle, context.handle))
    half = (q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert opaque.opaque_attention(*half, handle, context.handle).dtype == torch.bfloat16
    assert torch.equal(
        opaque.opaque_masked_attention(q, k, v, mask, handle, plain.handle),
        layer(q, k, v, AttentionContext(), mask=mask),
    )


def test_a_backend_without_a_gated_branch_is_called_without_the_gate() -> None:
    layer = LocalAttention(2, 16)
    handle, context = made_opaque(layer), AttentionContext(is_compiled=True)
    assert context.handle is not None
    q, k, v = torch.randn(3, 1, 4, 2, 16)
    assert not layer.takes_gate(q, context)
    found = opaque.opaque_gated_attention(q, k, v, torch.full_like(q, 1e6), handle, context.handle)
    assert torch.equal(found, layer(q, k, v))


def test_a_copied_layer_has_no_handle_of_the_first() -> None:
    layer = LocalAttention(2, 16)
    made_opaque(layer)
    assert copy.deepcopy(layer)._handle is None
