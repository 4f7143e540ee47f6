"""Tokens in the order of the sparse layers' tiles, from before the first block to after the last: what a transformer
computes is what it computes in raster order, and no layer packs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from denoiser_inputs import text_inputs
from tiny_families import WRITERS, given_to, makes_videos
from triton_interpreter import interpret, needs_triton

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.attention import AttentionConfig, AttentionContext, AttentionPolicy
from diffusion_runtime.attention import token_order as token_order_module
from diffusion_runtime.attention.force import force_attention_backend
from diffusion_runtime.attention.layers import LocalAttention
from diffusion_runtime.attention.sparse.tiles import tile_order
from diffusion_runtime.attention.token_order import shared_tile
from diffusion_runtime.core.latent_geometry import ClipSize, LatentGeometry
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.core.token_layout import RASTER, TokenLayout
from diffusion_runtime.models.interface import ImageCondition
from diffusion_runtime.models.wan.config import WanTransformerConfig
from diffusion_runtime.models.wan.transformer import WanTransformer
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.parallel.sharding import GridOrder, SequenceSharding

VSA = {"backend": "video_sparse_attn", "extra": {"sparsity": 0.6}}
STA = {"backend": "sliding_tile_attn", "extra": {"window": [1, 3, 3], "tile_size": [2, 2, 3]}}
VMOBA = {"backend": "vmoba_attn", "extra": {"st_chunk_size": [2, 3, 4], "spatial_chunk_size": [2, 3]}}
TILES = {"video_sparse_attn": "4 x 4 x 4", "sliding_tile_attn": "2 x 2 x 3"}
CONFIG = WanTransformerConfig(
    num_layers=2,
    num_heads=2,
    head_dim=16,
    ffn_dim=32,
    num_channels=4,
    text_dim=8,
    num_waves=16,
    patch=(1, 2, 2),
    norm_cross=True,
    eps=1e-6,
)


@contextmanager
def in_raster_order() -> Iterator[None]:
    """Transformers keep their tokens as they come, and layers pack."""
    with mock.patch.object(token_order_module, "shared_tile", return_value=RASTER):
        yield


def wan(attention: Any, config: WanTransformerConfig = CONFIG) -> WanTransformer:
    torch.manual_seed(0)
    policy = AttentionPolicy(config=AttentionConfig.parse(attention), environment=None)
    model = WanTransformer(config, LatentGeometry(4, 8, 4, config.patch), policy).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def wan_forward(
    model: WanTransformer, context: AttentionContext, image: bool = False, grid: tuple[int, int, int] = (3, 5, 6)
) -> torch.Tensor:
    """Of two samples at unequal timesteps."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 4, grid[0], 2 * grid[1], 2 * grid[2], generator=generator)
    inputs = text_inputs(torch.randn(2, 5, 8, generator=generator))
    if image:
        inputs = dataclasses.replace(inputs, image=ImageCondition(torch.randn(latents[:, :, :1].shape)))
    out: torch.Tensor = model(latents, torch.tensor([900.0, 40.0]), inputs, context)
    return out


def notes_of(context: AttentionContext) -> tuple[str, ...]:
    return tuple(note for note in context.recorder.report().notes if "tiles" in note)


def family_forward(pipeline: Pipeline) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Of two samples over 5 x 8 x 6 tokens, or 1 x 8 x 6 of a picture, and what the report says of tiles."""
    geometry = pipeline.rules.sampling.geometry
    height, width = (n * geometry.spatial_factor * geometry.patch[1] for n in (8, 6))
    step, remainder = geometry.frame_rule
    size = ClipSize(height, width, 4 * step + remainder if makes_videos(pipeline) else 1, 24)
    latents, timestep, inputs = given_to(pipeline, size)
    context = AttentionContext(step=StepInfo(1, 3))
    with torch.inference_mode():
        out = pipeline.transformer(latents, timestep, inputs, context)
    return out, notes_of(context)


# Sparse methods serve no layers that attend to a prefix cache, and no windows.
@pytest.mark.parametrize("family", [each for each in WRITERS if each not in ("qwen_image_21", "seedvr2")])
def test_a_forward_pass_is_that_of_raster_order(tiny_folder_of: Callable[[str], Path], family: str) -> None:
    """Every family, over a ragged grid, with padded text beside it where attention is joint."""
    for choice in (VSA, STA) if family in ("wan", "hunyuan_video") else (VSA,):
        pipeline = load_pipeline(str(tiny_folder_of(family)), device="cpu", attention={"per_role": {"self": choice}})
        assert isinstance(pipeline, Pipeline)
        out, notes = family_forward(pipeline)
        tiles = f"the grid's tokens are in tiles of {TILES[choice['backend']]} from block to block"
        # Frames of a driving video are found in raster order.
        assert notes == (() if family == "wan_animate_2" else (tiles,))
        with in_raster_order():
            expected, notes = family_forward(pipeline)
        assert notes == ()
        if family == "ltx2":
            # The sound attends to all of the video, whose keys are summed in another order.
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        else:
            assert torch.equal(out, expected), (family, choice)


def test_dense_steps_and_step_caches_keep_the_order_of_the_request(tiny_folder_of: Callable[[str], Path]) -> None:
    """Residuals of one step are added at another, dense by the method's options or by a schedule's rule."""
    extra = {"sparsity": 0.6, "dense_first_steps": 1, "dense_layers": "0"}
    rules = [{"steps": "3", "role": "self", "backend": "torch_sdpa"}]
    choice = {"per_role": {"self": {"backend": "vsa", "extra": extra}}, "schedule": rules}
    pipeline = load_pipeline(str(tiny_folder_of("wan")), device="cpu", attention=choice)
    assert isinstance(pipeline, Pipeline)
    geometry = pipeline.rules.sampling.geometry
    request = GenerationRequest(
        prompt="a red circle",
        height=6 * geometry.spatial_factor * geometry.patch[1],
        width=6 * geometry.spatial_factor * geometry.patch[2],
        num_frames=1 + 4 * geometry.temporal_factor,
        num_inference_steps=6,
        seed=3,
    )
    for cache, computed in ((None, None), ("dbcache:F=1,R=10,W=2,MC=1,force=true", "0-1,3,5")):
        wanted = dataclasses.replace(request, step_cache=cache)
        media = pipeline(wanted)
        with in_raster_order():
            expected = pipeline(wanted)
        assert any("tiles of 4 x 4 x 4" in note for note in media.attention_report.notes)
        assert not any("tiles of" in note for note in expected.attention_report.notes)
        assert [(row.backend, row.count) for row in media.attention_report.rows] == [
            (row.backend, row.count) for row in expected.attention_report.rows
        ]
        if computed is not None:
            assert {row.computed for row in media.attention_report.steps} == {computed}
        # Dense calls sum the same keys in another order.
        assert abs(media.frames.astype(int) - expected.frames).max() <= 1


def test_the_order_of_a_request_stays_when_a_choice_changes() -> None:
    """A step for which another method is forced computes in the order of the steps before, and the same."""
    model, context = wan({"per_role": {"self": STA}}), AttentionContext(step=StepInfo(0, 2))
    wan_forward(model, context)
    assert len(notes_of(context)) == 1
    vsa, vmoba = ({"backend": each["backend"], "options": each["extra"]} for each in (VSA, VMOBA))
    for forced in (vsa, vmoba, "torch_sdpa"):
        with force_attention_backend(forced, role="self"):
            found = wan_forward(model, dataclasses.replace(context, step=StepInfo(1, 2)))
            with in_raster_order():
                expected = wan_forward(model, AttentionContext(step=StepInfo(1, 2)))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_layers_that_prefer_different_orders_get_raster_order() -> None:
    grid = (5, 6, 7)

    def tile_of(*choices: Any, causal: bool = False, grid: tuple[int, int, int] = grid) -> tuple[int, int, int]:
        layers = [
            LocalAttention(
                2,
                16,
                layer=LayerInfo(index, len(choices), "self"),
                policy=AttentionPolicy(config=AttentionConfig.parse(choice), environment=None),
                causal=causal,
            )
            for index, choice in enumerate(choices)
        ]
        return shared_tile(layers, grid, num_steps=4)

    def vsa(**options: Any) -> Any:
        return {"per_role": {"self": {"backend": "vsa", "extra": {"sparsity": 0.6, **options}}}}

    later = {"schedule": [{"steps": "2-3", "role": "self", "backend": "vsa", "extra": {"sparsity": 0.5}}]}
    both = {"schedule": [*later["schedule"], {"steps": "0-1", "role": "self", **STA}]}
    assert tile_of(vsa(), vsa(sparsity=0.8)) == (4, 4, 4)
    assert tile_of(vsa(tile_size=[4, 4, 8]), "torch_sdpa") == (4, 4, 8), "dense layers take any"
    assert tile_of(later) == (4, 4, 4), "dense steps take any"
    assert tile_of("torch_sdpa", None) == RASTER
    assert tile_of(vsa(), vsa(tile_size=[4, 4, 8])) == RASTER
    assert tile_of(both) == RASTER, "two steps prefer two orders"
    assert tile_of(vsa(), {"per_role": {"self": VMOBA}}) == RASTER, "consecutive tokens"
    assert tile_of(vsa(), "sparse_video_gen_2_attn") == RASTER, "clusters"
    assert tile_of(vsa(), vsa(sparsity=0.0)) == (4, 4, 4)
    assert tile_of(vsa(sparsity=0.0)) == tile_of(vsa(min_tokens=1000)) == RASTER, "nothing is sparse"
    assert tile_of(vsa(), grid=(3, 4, 4)) == RASTER, "one tile is in raster order"
    assert tile_of({"per_role": {"self": STA}}) == (2, 2, 3)
    whole = {"backend": "sta", "extra": {"window": [5, 9, 9], "tile_size": [2, 2, 3]}}
    assert tile_of({"per_role": {"self": whole}}) == RASTER, "the window holds the whole grid"
    assert tile_of("torch_sdpa", causal=True) == RASTER


def test_an_image_s_tokens_stay_a_range() -> None:
    """At a timestep of their own, they are the first ones in raster order."""
    model, context = wan({"per_role": {"self": VSA}}), AttentionContext()
    found = wan_forward(model, context, image=True)
    assert notes_of(context) == ()
    assert not torch.equal(found, wan_forward(model, AttentionContext()))


def test_tokens_are_ordered_before_they_are_cut_and_back_after_they_are_gathered() -> None:
    grid, tile = (3, 4, 5), (2, 2, 2)
    tokens, _ = tile_order(grid, tile)
    order = GridOrder(tile, tokens, tokens.argsort())
    x = torch.randn(2, 60, 3)
    slices = []
    for index in range(7):
        sharding = SequenceSharding(mock.Mock(spec=RankGroup, size=7, index=index), order)
        assert sharding.tile == tile
        slices.append(sharding.shard(x))
    assert torch.equal(torch.cat(slices, dim=1)[:, :60], x[:, tokens])
    alone = SequenceSharding(order=order)
    assert torch.equal(alone.gather(alone.shard(x), 60), x)
    assert torch.equal(alone.gather_in_order(alone.shard(x), 60), x[:, tokens])
    assert SequenceSharding().tile == RASTER == TokenLayout(grid).tile


# --- the kernel, interpreted on a CPU, in a process of its own --------------------------------------------------------


def run_cases() -> None:
    """One layer of VSA, which packs and averages in one pass where it packs."""
    from diffusion_runtime.attention.sparse import tile_means
    from diffusion_runtime.kernels.block_sparse import triton

    raster, tile = TokenLayout((2, 3, 5), num_suffix_tokens=3), (4, 4, 4)
    product = torch.randn(1, raster.num_tokens, 3, 1, 16, generator=torch.Generator().manual_seed(1))
    policy = AttentionPolicy(config=AttentionConfig.parse({"per_role": {"self": VSA}}), environment=None)
    layer = LocalAttention(1, 16, layer=LayerInfo(0, 1, "self"), policy=policy)
    text = torch.arange(raster.num_grid_tokens, raster.num_tokens)
    order = torch.cat([tile_order(raster.grid, tile)[0], text])
    outs, counts = [], []
    for tokens, layout in ((product, raster), (product[:, order], dataclasses.replace(raster, tile=tile))):
        context = AttentionContext(layout)
        with (
            mock.patch.object(triton, "pack_tokens", side_effect=triton.pack_tokens) as packed,
            mock.patch.object(tile_means, "pack_tokens", side_effect=tile_means.pack_tokens) as also_averaged,
        ):
            outs.append(layer(*tokens.unbind(2), context))
        counts.append(packed.call_count + also_averaged.call_count)
        (row,) = context.recorder.report().rows
        assert row.implementation == "block-sparse triton"
    assert counts == [1, 0], counts
    assert torch.equal(outs[1], outs[0][:, order])
    interpret_rows_of_blocks()
    print("ok")


def interpret_rows_of_blocks() -> None:
    """q, k and v of one product, normalised and rotated into the rows that the kernel reads, with the means of tiles:
    beside the same in the product's place. A dense call, and tokens in raster order, are left in place."""
    from diffusion_runtime.attention.sparse import tile_means, video_sparse
    from diffusion_runtime.kernels.block_sparse import triton
    from diffusion_runtime.layers import rotated_attention as module
    from diffusion_runtime.layers.norm import RMSNorm
    from diffusion_runtime.layers.rope import norm_and_rotate

    heads, generator = 2, torch.Generator().manual_seed(2)
    layout = TokenLayout((2, 3, 5), num_suffix_tokens=3, valid_lengths=(1, 3), tile=(4, 4, 4))
    product = torch.randn(2, layout.num_tokens, 3, heads, 16, generator=generator)
    gate = torch.randn(2, layout.num_tokens, heads, 16, generator=generator)
    rotations = torch.polar(torch.ones(layout.num_tokens, 8), torch.randn(layout.num_tokens, 8, generator=generator))
    norms = [RMSNorm(16 * heads, 1e-6).requires_grad_(False) for _ in range(2)]
    for norm in norms:
        norm.weight.add_(0.2 * torch.randn(norm.weight.shape, generator=generator))

    def layer(**extra: Any) -> LocalAttention:
        choice = {"per_role": {"self": {"backend": "vsa", "extra": {"sparsity": 0.6, **extra}}}}
        policy = AttentionPolicy(config=AttentionConfig.parse(choice), environment=None)
        return LocalAttention(heads, 16, layer=LayerInfo(0, 1, "self"), policy=policy)

    raster = dataclasses.replace(layout, tile=RASTER)
    rows_in_place = norm_and_rotate(product.clone(), norms, rotations)
    for gated, extra, given, expected in (
        (False, {}, layout, 1),
        (True, {}, layout, 1),
        (False, {"min_tokens": 1000}, layout, 0),
        (True, {}, raster, 0),
    ):
        attention, context = layer(**extra), AttentionContext(given)
        weighed = gate if gated else None
        with (
            mock.patch.object(module, "norm_rope_into_blocks", side_effect=module.norm_rope_into_blocks) as written,
            mock.patch.object(triton, "pack_tokens", side_effect=triton.pack_tokens) as packed,
            mock.patch.object(tile_means, "pack_tokens", side_effect=tile_means.pack_tokens) as averaged,
            mock.patch.object(video_sparse, "tile_means", side_effect=video_sparse.tile_means) as means,
        ):
            found = module.rotated_attention(attention, product.clone(), norms, rotations, context, gate=weighed)
            assert written.call_count == expected, (gated, extra, given.tile)
            if expected:
                assert packed.call_count + averaged.call_count + means.call_count == 0, (gated, extra)
        in_place = layer(**extra)(*rows_in_place, context, gate=weighed)
        torch.testing.assert_close(found, in_place, atol=1e-5, rtol=1e-5)


@needs_triton
@pytest.mark.slow
def test_no_layer_packs() -> None:
    assert interpret(Path(__file__)).endswith("ok\n")


if __name__ == "__main__":
    run_cases()
