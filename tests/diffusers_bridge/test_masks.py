"""What masks hide, read from every shape they come in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tables import table
from tiny_denoisers import forward, video_cross
from torch import nn

from diffusion_runtime.attention import (
    AttentionCall,
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    AttentionResult,
    Availability,
    Backend,
    Capability,
    LocalAttention,
    TokenLayout,
    register_backend,
)
from diffusion_runtime.attention.backends.registry import unregister_backend
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.diffusers_bridge.attach import attach
from diffusion_runtime.diffusers_bridge.masks import (
    KeyPadding,
    MaskReader,
    OtherMask,
    QueryGroups,
    attend_padded,
    read_mask,
)
from diffusion_runtime.errors import BackendUnavailableError, ConfigError

INFINITY = float("inf")
BATCH, HEADS, SEQ = 2, 3, 6
SHAPE = (BATCH, SEQ, SEQ)
RIGHT = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]]).bool()
MIDDLE = torch.tensor([[1, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 1]]).bool()
NONE_LEFT = torch.tensor([[1, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()


class Attends(nn.Module):
    """One attention of q, k and v that are as wide as its input, with whatever mask it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.config: dict[str, Any] = {}
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, qkv: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = qkv.unbind(0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)


def four_dimensional(keys: torch.Tensor) -> torch.Tensor:
    return keys[:, None, None, :]


def outer(keys: torch.Tensor) -> torch.Tensor:
    return keys[:, None, None, :] & keys[:, None, :, None]


def with_first_key(keys: torch.Tensor) -> torch.Tensor:
    mask = outer(keys).clone()
    mask[..., 0] = True
    return mask


def additive(mask: torch.Tensor, hidden: float = -10000.0) -> torch.Tensor:
    return (~mask).float() * hidden


CASES = {
    "right": (four_dimensional(RIGHT), KeyPadding),
    "middle": (four_dimensional(MIDDLE), KeyPadding),
    "left": (four_dimensional(RIGHT.flip(1)), KeyPadding),
    "a sample without keys": (four_dimensional(NONE_LEFT), KeyPadding),
    "one row for all samples": (MIDDLE[:1, None, None], KeyPadding),
    "repeated over queries": (four_dimensional(RIGHT).repeat(1, 1, SEQ, 1), KeyPadding),
    "repeated over heads": (four_dimensional(MIDDLE).repeat(1, HEADS, SEQ, 1), KeyPadding),
    "queries and keys alike": (outer(MIDDLE), KeyPadding),
    "queries that see one key": (with_first_key(RIGHT), QueryGroups),
    "two documents in a row": (torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool(), QueryGroups),
    "additive": (additive(four_dimensional(MIDDLE)), KeyPadding),
    "additive, infinite": (
        additive(four_dimensional(RIGHT)).masked_fill(~RIGHT[:, None, None], -float("inf")),
        KeyPadding,
    ),
    "additive, repeated": (additive(four_dimensional(RIGHT)).repeat(1, HEADS, 1, 1), KeyPadding),
    "causal": (torch.ones(SEQ, SEQ).tril().bool(), OtherMask),
    "another one a head": (torch.stack([RIGHT, MIDDLE, RIGHT], 1)[:, :, None], OtherMask),
    "a bias": (torch.linspace(-1, 1, SEQ * SEQ).reshape(1, 1, SEQ, SEQ), OtherMask),
    "additive that hides all": (additive(four_dimensional(NONE_LEFT)), OtherMask),
}


@table("case", CASES)
def test_every_kind_of_mask_gives_what_torch_gives(case: str) -> None:
    mask, kind = CASES[case]
    assert type(read_mask(mask, SHAPE)) is kind
    torch.manual_seed(0)
    qkv, model = torch.randn(3, BATCH, HEADS, SEQ, 8), Attends()
    expected = model(qkv, mask)
    for backend in ("torch_sdpa", "reference"):
        with attach(model, backend) as handle:
            # Scores below -10000 have a thousandth left in float32.
            tolerance = 2e-3 if case == "additive that hides all" else 1e-6
            torch.testing.assert_close(model(qkv, mask), expected, rtol=1e-5, atol=tolerance)
            assert {row.backend for row in handle.report().rows} == {backend}
    assert "forward" not in model.__dict__


def test_no_mask_and_a_mask_that_hides_nothing_are_the_same() -> None:
    assert read_mask(torch.ones(BATCH, 1, 1, SEQ).bool(), SHAPE) is None
    assert read_mask(torch.zeros(1, 1, SEQ, SEQ), SHAPE) is None
    assert MaskReader().read(None, SHAPE, [], None) is None


@pytest.fixture
def dense_only() -> Iterator[None]:
    """A backend that takes neither masks nor lengths."""

    @register_backend
    class DenseOnly(Backend):
        name = "dense_only"
        summary = "softmax of everything"
        capability = Capability()

        def probe(self, hardware: Hardware) -> Availability:
            return Availability("1")

        def run(self, call: AttentionCall) -> AttentionResult:
            assert call.mask is None
            assert call.layout is None
            q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
            return AttentionResult(F.scaled_dot_product_attention(q, k, v).transpose(1, 2), None, "plain")

    yield
    unregister_backend("dense_only")


def test_a_backend_that_takes_no_masks_refuses_those_that_are_not_padding(dense_only: None) -> None:
    """With padding of equal lengths, and with few kinds of queries, it runs: no mask and no length reaches it."""
    qkv, model = torch.randn(3, BATCH, HEADS, SEQ, 8), Attends()
    with attach(model, "dense_only"):
        padded = model(qkv, CASES["queries that see one key"][0])
        with pytest.raises(BackendUnavailableError, match="cannot do boolean_mask"):
            model(qkv, CASES["causal"][0])
        with pytest.raises(BackendUnavailableError, match="cannot do additive_mask"):
            model(qkv, CASES["a bias"][0])
    torch.testing.assert_close(padded, model(qkv, CASES["queries that see one key"][0]))


def test_a_mask_that_is_written_to_is_read_again() -> None:
    reader, mask = MaskReader(), torch.ones(BATCH, 1, 1, SEQ).bool()
    assert reader.read(mask, SHAPE, [], None) is None
    mask[:, :, :, 0] = False
    assert isinstance(reader.read(mask, SHAPE, [], None), KeyPadding)
    with torch.inference_mode():
        mask = torch.ones(BATCH, 1, 1, SEQ).bool()
        assert reader.read(mask, SHAPE, [], None) is None
        mask[:, :, :, 0] = False
        assert isinstance(reader.read(mask, SHAPE, [], None), KeyPadding)


def test_masks_made_anew_are_read_once_when_their_sources_are_the_same() -> None:
    reader, given = MaskReader(), RIGHT.clone()
    first = reader.read(four_dimensional(given).clone(), SHAPE, [given], "a processor")
    assert reader.read(four_dimensional(given).clone(), SHAPE, [given], "a processor") is first
    assert reader.read(four_dimensional(given).clone(), SHAPE, [given], "another") is not first
    given[0, 3] = False
    changed = reader.read(four_dimensional(given).clone(), SHAPE, [given], "a processor")
    assert isinstance(changed, KeyPadding)
    assert changed.lengths == (3, 3)


@table("side", ["before", "after"])
def test_sparse_attention_with_text_that_is_padded_in_the_middle(side: str) -> None:
    """It equals the same tokens in an order where the padding is on the right."""
    torch.manual_seed(0)
    num_text, grid = 6, (2, 4, 4)
    sparse = {"backend": "sliding_tile_attn", "extra": {"tile_size": [1, 2, 2], "window": [1, 1, 1]}}
    layer = LocalAttention(2, 8, policy=AttentionPolicy(config=AttentionConfig.parse({"default": sparse})))
    before = num_text if side == "before" else 0
    layout = TokenLayout(grid, num_prefix_tokens=before, num_suffix_tokens=num_text - before)
    start = 0 if side == "before" else layout.num_grid_tokens
    keys = torch.ones(2, layout.num_tokens).bool()
    keys[:, start : start + num_text] = MIDDLE
    q, k, v = (torch.randn(2, layout.num_tokens, 2, 8) for _ in range(3))
    order = torch.arange(layout.num_tokens).repeat(2, 1)
    order[:, start : start + num_text] = start + torch.argsort((~MIDDLE).int(), dim=1, stable=True)
    lengths = tuple(MIDDLE.sum(1).tolist())
    moved = [torch.stack([x[sample, order[sample]] for sample in range(2)]) for x in (q, k, v)]
    right = layer(*moved, AttentionContext(dataclasses.replace(layout, valid_lengths=lengths)))
    expected = torch.empty_like(right)
    for sample in range(2):
        expected[sample, order[sample]] = right[sample]
    context = AttentionContext(layout)
    out = attend_padded(layer, q, k, v, KeyPadding(keys.numpy(), None, q.device), context)
    torch.testing.assert_close(out, expected)
    [row] = context.recorder.report().rows
    assert row.implementation.startswith("block-sparse")
    # A grid with holes is not one that a sparse backend knows.
    keys[0, -1 - start] = False
    with pytest.raises(ConfigError, match="needs to know where tokens sit"):
        attend_padded(layer, q, k, v, KeyPadding(keys.numpy(), None, q.device), context)


def test_an_image_model_of_one_attention_still_runs_under_inference_mode() -> None:
    model, arguments = video_cross()
    before = forward(model, arguments)
    with attach(model, "torch_sdpa"), torch.inference_mode():
        assert torch.equal(model(**arguments, return_dict=False)[0].flatten(), before)
