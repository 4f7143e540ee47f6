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


# The values of a call that has a context.
NO_VALUES = ("", (), torch.zeros((), dtype=torch.int64), False, False)


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


def test_a_context_has_a_handle_and_each_layout_its_own() -> None:
    number = len(CONTEXTS)
    context = AttentionContext()
    text = context.with_layout(TokenLayout.text(3))
    assert context.handle is not None
    assert text.handle is not None
    assert CONTEXTS.find(context.handle) is context
    assert CONTEXTS.find(text.handle) is text
    del context, text
    gc.collect()
    assert len(CONTEXTS) == number


def test_the_operator_is_what_its_fake_says() -> None:
    """opcheck: schema, shape, strides and dtype of the fake, and tracing with symbolic sizes."""
    torch.manual_seed(0)
    layer = LocalAttention(3, 16, layer=LayerInfo(1, 2, "self", "a.layer"))
    context, plain = AttentionContext(TokenLayout((1, 2, 3), 0, 2, (1, 2))), AttentionContext()
    # As in the models: heads beside each other in one product, and a batch whose padding is cut off.
    q, k, v = torch.randn(2, 8, 3, 3, 16).unbind(2)
    mask = torch.rand(2, 1, 8, 8) > 0.3
    for gate, hidden, of in ((None, None, context), (None, mask, plain), (torch.ones_like(q), None, context)):
        given = (q, k, v, gate, hidden, layer._handle, of.handle, *NO_VALUES)
        torch.library.opcheck(opaque.opaque_attention, given)
        found, lse = opaque.opaque_attention(*given)
        assert torch.equal(found, layer(q, k, v, AttentionContext(of.layout), mask=hidden))
        assert found.is_contiguous()
        assert lse.numel() == 0
    # Of queries whose heads come before their tokens, the result is contiguous all the same.
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.library.opcheck(opaque.opaque_attention, (*turned, None, None, layer._handle, context.handle, *NO_VALUES))
    half = (q.bfloat16(), k.bfloat16(), v.bfloat16())
    out, _ = opaque.opaque_attention(*half, None, None, layer._handle, context.handle, *NO_VALUES)
    assert out.dtype == torch.bfloat16


def test_a_backend_without_a_gated_branch_is_called_without_the_gate() -> None:
    layer, context = LocalAttention(2, 16), AttentionContext()
    q, k, v = torch.randn(3, 1, 4, 2, 16)
    assert not layer.takes_gate(q, context)
    gate = torch.full_like(q, 1e6)
    found, _ = opaque.opaque_attention(q, k, v, gate, None, layer._handle, context.handle, *NO_VALUES)
    assert torch.equal(found, layer(q, k, v))


def test_a_copied_layer_has_a_handle_of_its_own() -> None:
    layer = LocalAttention(2, 16)
    copied = copy.deepcopy(layer)
    assert opaque.ATTENTIONS.find(copied._handle) is copied
    assert opaque.ATTENTIONS.find(layer._handle) is layer
