"""Sharing a sequence, without processes: heads, slices, merging, formulas, and what is refused at load time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attention_calls import attention_call, with_fields
from parallel.exchange_cases import write_strategy
from tables import table

from benchmarks.communication_volume import ForwardShape, communication_volume
from diffusion_runtime.attention import (
    AttentionCall,
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    AttentionResult,
    Availability,
    Backend,
    Capability,
    LayerInfo,
    LocalAttention,
    TokenLayout,
    UlyssesAttention,
    USPAttention,
    attention,
    force_attention_backend,
    register_backend,
    unregister_backend,
)
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.attention.sparse.interface import SparseBackend
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.core.options import build_options
from diffusion_runtime.errors import BackendUnavailableError, ConfigError
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.parallel.merging import PartialAttention
from diffusion_runtime.parallel.sharding import SequenceSharding
from diffusion_runtime.parallel.ulysses import share_heads


def group(size: int, index: int = 0) -> RankGroup:
    """Processes that are not there: enough to build layers, not to run them."""
    return RankGroup(tuple(range(size)), index, None, tuple(range(size)))


def mesh(ulysses: int = 1, ring: int = 1) -> ProcessMesh:
    return ProcessMesh(group(ulysses), group(ring), group(ulysses * ring))


def policy(backend: str | dict[str, object] | None = None, ulysses: int = 1, ring: int = 1) -> AttentionPolicy:
    config = AttentionConfig.parse({"default": backend} if isinstance(backend, dict) else backend)
    return AttentionPolicy(config=config, environment=None, mesh=mesh(ulysses, ring))


# --- heads ------------------------------------------------------------------------------------------------------------


@table("num_groups", [1, 2, 5])
@table("num_members", [1, 2, 3, 4, 6])
@table(("num_heads", "num_kv_heads"), [(12, 12), (12, 4), (12, 1), (6, 3), (7, 7), (6, 2), (8, 4)])
def test_every_head_is_computed_once_with_its_own_keys(
    num_heads: int, num_kv_heads: int, num_members: int, num_groups: int
) -> None:
    groups = share_heads(num_heads, num_kv_heads, num_members, num_groups)
    shares = [share for of_group in groups for share in of_group]
    assert sorted(head for share in shares for head in range(share.start, share.stop)) == list(range(num_heads))
    repeats = num_heads // num_kv_heads
    for share in shares:
        assert share.num_heads > 0
        each = share.num_heads // share.num_kv_heads
        assert each * share.num_kv_heads == share.num_heads
        for place, head in enumerate(range(share.start, share.stop)):
            assert share.kv_heads[place // each] == head // repeats
    counts = [sum(of_group[member].num_heads for of_group in groups) for member in range(num_members)]
    unit = repeats if num_kv_heads >= num_members else 1
    assert max(counts) - min(counts) <= unit


def test_more_processes_than_heads_are_refused_with_the_degrees_that_are_valid() -> None:
    for made in (UlyssesAttention, USPAttention):
        with pytest.raises(
            ConfigError, match=r"ulysses_degree 8 is more than the 6 .* 1, 2, 3, 4, 5, 6 .*evenly: 1, 2, 3, 6"
        ):
            made(6, 16, policy=policy(ulysses=8))
        made(6, 16, policy=policy(ulysses=5))
    LocalAttention(6, 16, policy=policy(ulysses=8))


# --- slices -----------------------------------------------------------------------------------------------------------


@table("num_tokens", [1, 4, 9, 12, 13])
@table("size", [1, 2, 3, 4])
def test_slices_hold_every_token_once_and_ranges_stay_where_they_are(num_tokens: int, size: int) -> None:
    x = torch.arange(1, num_tokens + 1).view(1, -1, 1).repeat(2, 1, 3)
    shardings = [SequenceSharding(group(size, index)) for index in range(size)]
    slices = [sharding.shard(x) for sharding in shardings]
    assert {part.shape for part in slices} == {(2, -(-num_tokens // size), 3)}
    whole = torch.cat(slices, dim=1)
    assert torch.equal(whole[:, :num_tokens], x)
    assert not whole[:, num_tokens:].any()
    assert torch.equal(torch.cat([s.shard(x[0], dim=0) for s in shardings]), whole[0])
    assert torch.equal(torch.cat([s.shard(x, dim=-2) for s in shardings], dim=1), whole)
    for cut in range(num_tokens + 1):
        for sharding, part in zip(shardings, slices, strict=True):
            first = sharding.local(slice(0, cut), num_tokens)
            rest = sharding.local(slice(cut, None), num_tokens)
            covered = [*range(*first.indices(99)), *range(*rest.indices(99))]
            assert covered == list(range(part.shape[1]))
            found = part[0, first, 0]
            assert torch.equal(found[found > 0], x[0, :cut, 0][torch.isin(x[0, :cut, 0], part[0, :, 0])])


def test_rows_that_are_no_slice_are_refused() -> None:
    layer = USPAttention(4, 16, policy=policy(ulysses=2))
    q = torch.randn(1, 11, 4, 16)
    with pytest.raises(ConfigError, match=r"expected q to hold 4 of 8 grid tokens and 3 text tokens, got 11 rows"):
        layer(q, q, q, AttentionContext(layout=TokenLayout((2, 2, 2), num_prefix_tokens=3)))


# --- merging ----------------------------------------------------------------------------------------------------------


def test_parts_merge_to_the_whole_with_rows_that_see_nothing() -> None:
    """Part 1 is empty for sample 0, part 2 for sample 1, and all of them for sample 2."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 3, 6, 2, 16, generator=generator)
    lengths = [(2, 0, 2), (2, 2, 0), (0, 0, 0)]
    merged = PartialAttention()
    for part in range(3):
        layout = TokenLayout.text(2, tuple(lengths[sample][part] for sample in range(3)))
        keys = slice(2 * part, 2 * part + 2)
        merged.add(*attention(q, k[:, keys], v[:, keys], layout=layout, return_lse=True))
    visible = torch.zeros(3, 1, 1, 6, dtype=torch.bool)
    for sample, counts in enumerate(lengths):
        for part, count in enumerate(counts):
            visible[sample, ..., 2 * part : 2 * part + count] = True
    expected = attention(q, k, v, mask=visible)
    torch.testing.assert_close(merged.result(q), expected, rtol=1e-6, atol=1e-6)
    assert not merged.result(q)[2].any()


def test_merging_leaves_what_it_was_given_alone() -> None:
    out, lse = torch.ones(1, 2, 1, 4), torch.zeros(1, 1, 2)
    merged = PartialAttention()
    merged.add(out, lse)
    merged.add(3 * out, lse)
    assert torch.equal(merged.result(out), 2 * out)
    assert torch.equal(out, torch.ones(1, 2, 1, 4))


# --- selection --------------------------------------------------------------------------------------------------------


class WithoutLse(Backend):
    """Cannot merge."""

    name = "without_lse"
    summary = "a backend of the tests"
    capability = Capability()

    def probe(self, hardware: Hardware) -> Availability:
        return Availability("1.0")

    def run(self, call: AttentionCall) -> AttentionResult:
        raise AssertionError("a backend that was refused ran")


def test_a_ring_refuses_backends_without_a_log_sum_exp() -> None:
    register_backend(WithoutLse)
    try:
        USPAttention(4, 16, policy=policy("without_lse", ulysses=2))
        with pytest.raises(BackendUnavailableError, match="no log-sum-exp, which ring attention merges"):
            USPAttention(4, 16, policy=policy("without_lse", ring=2))
        with pytest.raises(BackendUnavailableError, match="no log-sum-exp"):
            USPAttention(4, 16, policy=policy("without_lse", ulysses=2, ring=2))
        UlyssesAttention(4, 16, policy=policy("without_lse", ulysses=2, ring=2))
        layer = USPAttention(4, 16, policy=policy(ring=2))
        with force_attention_backend("without_lse"), pytest.raises(BackendUnavailableError, match="no log-sum-exp"):
            layer.decisions.check_request(4)
    finally:
        unregister_backend("without_lse")


@table("backend", ["sliding_tile_attn", "video_sparse_attn", "vmoba_attn", "sparse_video_gen_2_attn"])
def test_a_ring_refuses_plans_that_need_every_key(backend: str) -> None:
    chosen = {"backend": backend, "extra": {"window": [1, 1, 1]} if backend == "sliding_tile_attn" else {}}
    with pytest.raises(BackendUnavailableError, match=r"part of the keys, and it chooses among all.*ulysses_degree"):
        USPAttention(4, 16, policy=policy(chosen, ring=2))
    # Four heads for four processes: heads alone can be shared. Three cannot.
    USPAttention(4, 16, policy=policy(chosen, ulysses=2, ring=2))
    with pytest.raises(BackendUnavailableError, match="part of the keys"):
        USPAttention(3, 16, policy=policy(chosen, ulysses=2, ring=2))


def test_a_ring_refuses_causal_attention() -> None:
    with pytest.raises(ConfigError, match=r"causal.*ulysses_degree"):
        USPAttention(4, 16, policy=policy(ring=2), causal=True)
    USPAttention(4, 16, policy=policy(ulysses=2), causal=True)


@table(
    ("backend", "options", "message"),
    [
        ("vmoba_attn", {"moba_threshold_type": "overall"}, "compares all heads"),
        ("vmoba_attn", {"moba_threshold_type": "block"}, "compares all heads"),
    ],
)
def test_what_compares_heads_is_refused_where_processes_share_them(
    backend: str, options: dict[str, object], message: str
) -> None:
    chosen = {"backend": backend, "extra": options}
    USPAttention(4, 16, policy=policy(chosen))
    for made in (USPAttention, UlyssesAttention):
        with pytest.raises(ConfigError, match=message):
            made(4, 16, policy=policy(chosen, ulysses=2))


# --- plans of some heads ----------------------------------------------------------------------------------------------


def test_windows_by_head_are_those_of_the_layers_own_heads(tmp_path: Path) -> None:
    """A process with heads 1 and 2 of 4 plans what one with all four plans for these."""
    path = write_strategy(tmp_path)
    backend = find_backend("sliding_tile_attn")
    assert isinstance(backend, SparseBackend)
    options = {"tile_size": (2, 2, 2), "skip_time_steps": 0, "mask_strategy_file_path": str(path)}
    layout = TokenLayout((5, 6, 7))
    q = torch.randn(1, 210, 4, 8, generator=torch.Generator().manual_seed(0))
    checked = build_options(backend.options_type, options, "options")
    call = attention_call(q, q, q, checked, layout=layout, layer=LayerInfo(1, 8))
    part = with_fields(call, q=q[:, :, 1:3], k=q[:, :, 1:3], first_head=1, num_heads_total=4)
    whole, local = (backend.plan(item).to_dense_mask() for item in (call, part))
    assert torch.equal(local, whole[:, 1:3])
    assert not torch.equal(local, whole[:, 0:2])


# --- formulas ---------------------------------------------------------------------------------------------------------


def test_volumes_of_a_known_shape() -> None:
    """Wan 1.3B at 480p: 32760 tokens, 12 heads of 128, 30 layers, bfloat16; by hand."""
    shape = ForwardShape(num_grid_tokens=32760, num_layers=30, num_heads=12, head_dim=128)
    row = 12 * 128 * 2
    assert communication_volume(shape).total == 0
    two = communication_volume(shape, ulysses=2)
    assert two.all_to_all == 30 * 16380 * 2 * row
    four = communication_volume(shape, ulysses=4)
    assert four.all_to_all == 30 * 8190 * 3 * row
    ring = communication_volume(shape, ring=4)
    assert ring.ring == 30 * 3 * 8190 * 2 * row
    both = communication_volume(shape, ulysses=2, ring=2)
    assert (both.all_to_all, both.ring) == (30 * 8190 * 2 * row, 30 * 16380 * row)
    assert communication_volume(shape, ulysses=2, branches=2).branches == 32760 * 64 * 4
    with pytest.raises(ConfigError, match="valid degrees"):
        communication_volume(shape, ulysses=16)
