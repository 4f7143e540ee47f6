"""The Wan transformer (arXiv:2503.20314) on our attention layers, for inference.

    latents -> patches -> num_layers x block -> modulated norm -> projection -> velocity

A block is self-attention over the frames x height x width grid, cross-attention to the text, and a feed-forward
network; the timestep shifts, scales and gates the first and the last. A video that starts from an image has that image
as its first latent frame, whose tokens are at timestep 0 all along (Wan 2.2 TI2V); or the encoded clip of the known
frames, and a mask of them, next to its latents (I2V, FLF2V), and in Wan 2.1 an image encoder's tokens in a
cross-attention of their own. A causal checkpoint has the same weights and makes a video chunk by chunk: its tokens
attend to those of earlier frames in a key-value cache (context.cache). Shapes in this file: B batch, S grid tokens, L
text tokens, I image tokens, D width (num_heads * head_dim).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer, USPAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import ModulatedInput, RunBlock, Streams, overwriting
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.errors import RequestError
from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm
from diffusion_runtime.layers.embeddings import PatchEmbedding, TextEmbedding, TimestepEmbedding, unpatchify
from diffusion_runtime.layers.linear import FeedForward, Linear, LinearInput
from diffusion_runtime.layers.modulation import add_gated_, modulated_layer_norm, norm_for
from diffusion_runtime.layers.norm import LayerNorm, RMSNorm
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.riflex import lowered_index
from diffusion_runtime.layers.rope import grid_rotations, norm_and_rotate, with_positions
from diffusion_runtime.layers.rotated_attention import rotated_attention
from diffusion_runtime.layers.token_runs import frame_runs
from diffusion_runtime.memory.waiting_weights import held_weights
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer, ImageCondition
from diffusion_runtime.models.wan.config import WanTransformerConfig
from diffusion_runtime.models.wan.cross_attention import (
    BlockPlace,
    CrossKeys,
    KeysAndValues,
    WanCrossAttention,
    WanImageEmbedding,
)
from diffusion_runtime.models.wan.flow_map import FlowMapEmbedding
from diffusion_runtime.parallel.sharding import SequenceSharding


class WanSelfAttention(nn.Module):
    """Attention among the grid's tokens, with rotary positions.

    gate: weighs the coarse branch of Video Sparse Attention, in checkpoints that were trained with it.
    """

    def __init__(self, config: WanTransformerConfig, place: BlockPlace, policy: AttentionPolicy) -> None:
        super().__init__()
        self.qkv = Linear(config.dim, 3 * config.dim)
        self.norm_q = RMSNorm(config.dim, config.eps)
        self.norm_k = RMSNorm(config.dim, config.eps)
        self.out = Linear(config.dim, config.dim)
        self.gate: Linear | None = None
        self.attention = self.make_attention(config, place.layer(place.self_role, "self_attention"), policy)
        if config.has_gate:
            self.add_gate()

    def make_attention(self, config: WanTransformerConfig, layer: LayerInfo, policy: AttentionPolicy) -> AttentionLayer:
        return USPAttention(config.num_heads, config.head_dim, layer=layer, policy=policy, cached_keys=config.is_causal)

    def add_gate(self) -> None:
        """Add the gate, without values."""
        dim = self.out.weight.shape[0]
        self.gate, self.attention.has_gate = Linear(dim, dim), True

    @property
    def input_layers(self) -> tuple[Linear, ...]:
        """Linear layers that read x."""
        return (self.qkv,) if self.gate is None else (self.qkv, self.gate)

    def forward(self, x: LinearInput, rotations: torch.Tensor | None, context: AttentionContext) -> torch.Tensor:
        """Attend. x: [B, S, D], which may be quantised where input_layers take that; rotations: [S, head_dim / 2],
        complex, or None where context.cache has them; context.layout: the grid."""
        product = self.qkv(x).unflatten(-1, (3, self.attention.num_heads, -1))
        gate = None
        if self.gate is not None and self.attention.takes_gate(product, context):
            # From the same input as q, k and v, without norm, rotation or activation.
            gate = self.gate(x).unflatten(-1, (self.attention.num_heads, -1))
        norms = self.norm_q, self.norm_k
        attended = rotated_attention(self.attention, product, norms, rotations, context, gate=gate)
        out: torch.Tensor = self.out(attended.flatten(2))
        return out

    def write_keys(self, x: LinearInput, rotations: torch.Tensor | None, context: AttentionContext) -> None:
        """Leave the keys and values of x in context.cache, as a call does. The arguments are those of a call."""
        # With q, whose part of the product another kernel might round otherwise.
        product = self.qkv(x).unflatten(-1, (3, self.attention.num_heads, -1))
        q, k, v = norm_and_rotate(product, (self.norm_q, self.norm_k), rotations)
        self.attention.write_keys(q, k, v, context)


class WanBlock(nn.Module):
    """Block. modulation: six rows of D, the layer's own part of (shift, scale, gate) for attention and feed-forward."""

    self_attention_type: ClassVar[type[WanSelfAttention]] = WanSelfAttention

    def __init__(self, config: WanTransformerConfig, place: BlockPlace, policy: AttentionPolicy) -> None:
        super().__init__()
        self.eps = config.eps
        self.modulation = nn.Parameter(torch.zeros(6, config.dim))
        self.self_attention = self.self_attention_type(config, place, policy)
        self.cross_norm = LayerNorm(config.dim, config.eps) if config.norm_cross else None
        self.cross_attention = WanCrossAttention(config, place, policy)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim)

    def forward(self, x: torch.Tensor, inputs: BlockInputs, keys: CrossKeys) -> torch.Tensor:
        """Run the block and return x [B, S, D], which is overwritten. keys: of text and image, for this block. With
        inputs.keys_only x is unchanged."""
        runs = [(run.tokens, (self.modulation + run.time).unbind(1)) for run in inputs.runs]
        shifts = [(tokens, rows[0], rows[1]) for tokens, rows in runs]
        modulated = _modulated(self.self_attention.input_layers, x, shifts, self.eps)
        if inputs.keys_only:
            self.self_attention.write_keys(modulated, inputs.rotations, inputs.grid_context)
            return x
        branch = self.self_attention(modulated, inputs.rotations, inputs.grid_context)
        normalized = self._cross_normed(x, branch, [(tokens, rows[2]) for tokens, rows in runs])
        branch = self.cross_attention(normalized, keys, inputs.text_context, inputs.image_context)
        shifts = [(tokens, rows[3], rows[4]) for tokens, rows in runs]
        modulated = _modulated((self.feed_forward.up,), x, shifts, self.eps, branch)
        branch = self.feed_forward(modulated)
        for tokens, rows in runs:
            add_gated_(x[:, tokens], branch[:, tokens], rows[5])
        return x

    def _cross_normed(
        self, x: torch.Tensor, branch: torch.Tensor, gates: Sequence[tuple[slice, torch.Tensor]]
    ) -> LinearInput:
        """Add branch * gate to x; return the cross-attention's norm of it, if any. gates: with their tokens."""
        norm, layers = self.cross_norm, (self.cross_attention.q,)
        if norm is not None and len(gates) == 1:
            return norm_for(layers, x, norm.as_norm, branch=Branch(branch, gates[0][1]))
        for tokens, gate in gates:
            add_gated_(x[:, tokens], branch[:, tokens], gate)
        return x if norm is None else norm_for(layers, x, norm.as_norm)


def _modulated(
    layers: Sequence[Linear],
    x: torch.Tensor,
    runs: Sequence[tuple[slice, torch.Tensor, torch.Tensor]],
    eps: float,
    branch: torch.Tensor | None = None,
) -> LinearInput:
    """Return the modulated_layer_norm of x [B, S, D] with a (tokens, shift, scale) for each run of its tokens, as the
    input of `layers`. branch: added to x first, in place."""
    if len(runs) == 1:
        ((_, shift, scale),) = runs
        added = None if branch is None else Branch(branch)
        return norm_for(layers, x, Norm("layer", eps), shift=shift, scale=scale, branch=added)
    # The runs share one tensor, in x's dtype: an image's tokens are one of 21 to 31 frames, and few models have them.
    out = torch.empty_like(x)
    for tokens, shift, scale in runs:
        added = None if branch is None else Branch(branch[:, tokens])
        modulated_layer_norm(x[:, tokens], shift, scale, eps, branch=added, out=out[:, tokens])
    return out


def _is_commit(context: AttentionContext) -> bool:
    """Return whether a pass is made only for the keys and values that it leaves in the cache."""
    return context.cache is not None and context.step.phase == "commit"


@dataclass(frozen=True)
class _Run:
    """Consecutive tokens that share a timestep. embedding: of the timestep, [B, D]; time: its six rows of every
    block, [B, 6, D], float32."""

    tokens: slice
    embedding: torch.Tensor
    time: torch.Tensor


@dataclass(frozen=True)
class BlockInputs:
    """Inputs of every block of one forward pass.

    runs: of tokens that share a timestep, in order. rotations: [S, head_dim / 2], complex; None where
    grid_context.cache has them. grid_context, text_context, image_context: the forward pass as self-attention and the
    cross-attentions see it; None without tokens of an image. keys_only: whether only the keys and values that
    self-attention leaves in the cache are read of the block.
    """

    runs: tuple[_Run, ...]
    rotations: torch.Tensor | None
    grid_context: AttentionContext
    text_context: AttentionContext
    image_context: AttentionContext | None
    keys_only: bool = False


class WanTransformer(DiffusionTransformer):
    """The whole denoiser. In a model of another dtype, the timestep embedding, the modulation, the layer norms and the
    gated sums are still computed in float32, as in training."""

    text_is_keys = True

    def __init__(
        self, config: WanTransformerConfig, geometry: LatentGeometry, policy: AttentionPolicy, *, prefix: str = ""
    ) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        self.patch_embedding = PatchEmbedding(config.in_channels, config.dim, config.patch)
        self.time_embedding = (
            TimestepEmbedding(config.num_waves, config.dim)
            if config.flow_map is None
            else FlowMapEmbedding(config.flow_map, config.num_waves, config.dim)
        )
        self.time_projection = Linear(config.dim, 6 * config.dim)
        self.text_embedding = TextEmbedding(config.text_dim, config.dim)
        self.image_embedding = None if config.image_dim is None else WanImageEmbedding(config)
        self.blocks = nn.ModuleList(
            self.make_block(BlockPlace(index, config.num_layers, f"{prefix}blocks.{index}"), policy)
            for index in range(config.num_layers)
        )
        self.out_modulation = nn.Parameter(torch.zeros(2, config.dim))
        self.out = Linear(config.dim, config.patch_channels)

    def make_block(self, place: BlockPlace, policy: AttentionPolicy) -> WanBlock:
        return WanBlock(self.config, place, policy)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the velocity. The text's padding is attended to, as in training. A commit leaves keys and values in
        the cache: of its last block nothing else is computed, and zeros are returned. Compiled blocks compute all of
        it, as they do in other passes."""
        text, image = inputs.text.embeddings, self.image_of(inputs)
        x, grid = self.patches(self._with_image(latents, image).to(self.out.weight.dtype), context)
        if image is None or self.config.condition_channels:
            # The tokens of a first frame, at a timestep of their own, are a range in raster order alone.
            context = self.in_token_order(context, grid, latents.device)
        sharding = context.sharding
        x = sharding.shard(x)
        image_tokens = self._image_tokens(image)
        cache = context.cache
        if cache is None:
            rotations: torch.Tensor | None = self._rotations(grid, inputs, context)
        else:
            if cache.rotations is None:
                cache = self.with_positions(cache, latents.shape, sharding)
                context = dataclasses.replace(context, cache=cache)
            # With rotations of the keys in sight, the layer applies both.
            rotations = cache.rotations if cache.key_rotations is None else None
        block_inputs = BlockInputs(
            runs=self._runs(timestep, grid, image, sharding, context.step),
            rotations=rotations,
            grid_context=context.with_layout(self.layout_of(grid, inputs, context)),
            text_context=context.with_layout(TokenLayout.text(text.shape[1])),
            image_context=None
            if image_tokens is None
            else context.with_layout(TokenLayout.text(image_tokens.shape[1])),
        )
        keys = tuple(map(CrossKeys, self._text_keys(text, context), self._image_keys(image_tokens, context)))
        num_own = x.shape[1]
        x, *_ = context.run_blocks(
            self.run_blocks_of(block_inputs, keys, inputs),
            self.streams(x, inputs, context),
            math.prod(grid),
            lambda: self._modulated_input(timestep, context.step),
        )
        if _is_commit(context):
            return torch.zeros_like(latents)
        # Without what stands behind the grid's tokens.
        x, runs = x[:, :num_own], []
        for run in block_inputs.runs:
            shift, scale = (self.out_modulation + run.embedding[:, None].float()).unbind(1)
            runs.append((run.tokens, shift, scale))
        tokens = sharding.gather(self.out(_modulated((self.out,), x, runs, self.config.eps)), math.prod(grid))
        return unpatchify(tokens, grid, self.config.patch).to(latents.dtype)

    def patches(self, latents: torch.Tensor, context: AttentionContext) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Return the tokens [B, S, D] of latents with the image in them or next to them, and their grid."""
        grid = self.geometry.grid(latents.shape)
        return self.patch_embedding(latents), grid

    def image_of(self, inputs: DenoiserInputs) -> ImageCondition | None:
        """Return the image in the latents or next to them."""
        return inputs.image

    def streams(self, x: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext) -> Streams:
        """Return the streams that go from block to block. x: the grid's tokens [B, S, D] of this process."""
        return (x,)

    def layout_of(self, grid: tuple[int, int, int], inputs: DenoiserInputs, context: AttentionContext) -> TokenLayout:
        """Return the layout of self-attention."""
        return TokenLayout(grid, tile=context.sharding.tile)

    def run_blocks_of(
        self,
        block_inputs: BlockInputs,
        keys: Sequence[CrossKeys],
        inputs: DenoiserInputs,
    ) -> Sequence[RunBlock]:
        """Return the blocks with all their inputs. keys: of each of `text_blocks`."""
        every = [block_inputs] * self.num_blocks
        if _is_commit(block_inputs.grid_context):
            every[-1] = dataclasses.replace(block_inputs, keys_only=True)
        return [overwriting(block, *read) for block, *read in zip(self.blocks, every, keys, strict=True)]

    def read_inputs(self, inputs: DenoiserInputs) -> DenoiserInputs:
        """Return the inputs without the lengths of the text, whose padding is attended to."""
        read = super().read_inputs(inputs)
        return dataclasses.replace(read, text=dataclasses.replace(read.text, lengths=()))

    def replay_refusal(self) -> str | None:
        if self.config.flow_map is not None:
            return "this checkpoint takes the timestep that a step leads to (flow map), which is no tensor"
        return None

    def settle(self, latents: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        if self.config.condition_channels or inputs.image is None:
            return latents
        return self._with_image(latents, inputs.image)

    def _with_image(self, latents: torch.Tensor, image: ImageCondition | None) -> torch.Tensor:
        """Return latents [B, channels, frames, height, width] whose first frame is the image's, where there is one; in
        a model with channels for a condition, with that after them."""
        if self.config.condition_channels:
            if image is None:
                raise RequestError("image_path: this checkpoint makes videos from an image; give one")
            return torch.cat([latents, image.latents.to(latents.device, latents.dtype)], dim=1)
        if image is None:
            return latents
        return torch.cat([image.latents.to(latents.device, latents.dtype), latents[:, :, 1:]], dim=2)

    def _image_tokens(self, image: ImageCondition | None) -> torch.Tensor | None:
        """Return the tokens of the image encoder, [B, I, image_dim]; None in models without one."""
        if self.image_embedding is None:
            return None
        assert image is not None
        assert image.embeddings is not None, "this model takes the tokens of an image encoder"
        return image.embeddings

    def _runs(
        self,
        timestep: torch.Tensor,
        grid: tuple[int, int, int],
        image: ImageCondition | None,
        sharding: SequenceSharding,
        step: StepInfo,
    ) -> tuple[_Run, ...]:
        """Return the tokens of an image that is the first frame at timestep 0, and the rest at `timestep`, which may be
        that of each frame; those of them that this process holds."""
        if timestep.dim() == 2:
            runs_of_frames = frame_runs(grid, sharding, step.frame_timesteps)
            return tuple(self._run(tokens, timestep[:, frame], step) for tokens, frame in runs_of_frames)
        if image is None or self.config.condition_channels:
            # Of any length, so that one compiled block serves clips of every size.
            return (self._run(slice(None), timestep, step),)
        num_tokens, num_image_tokens = math.prod(grid), grid[1] * grid[2]
        image_tokens = sharding.local(slice(0, num_image_tokens), num_tokens)
        later = sharding.local(slice(num_image_tokens, num_tokens), num_tokens)
        runs = []
        if image_tokens.start < image_tokens.stop:
            runs.append(self._run(image_tokens, torch.zeros_like(timestep), step))
        if later.start < later.stop:
            runs.append(self._run(later, timestep, step))
        return tuple(runs)

    def with_positions(
        self, cache: FrameCache, shape: Sequence[int], sharding: SequenceSharding, expert: int = 0
    ) -> FrameCache:
        grid, head_dim = self.geometry.grid(tuple(shape)), self.config.head_dim
        return with_positions(cache, grid, head_dim, sharding, self.out.weight.device)

    def _rotations(self, grid: tuple[int, int, int], inputs: DenoiserInputs, context: AttentionContext) -> torch.Tensor:
        """Return [S, head_dim / 2], complex; of what stands behind the grid's tokens too."""
        head_dim, device = self.config.head_dim, self.out.weight.device
        lowered = lowered_index(inputs.request)
        # Two experts may differ in the size of a head.
        return cached_for_request(
            "rotations",
            (grid, head_dim, lowered),
            context,
            lambda: context.sharding.shard(grid_rotations(grid, head_dim, device, lowered_index=lowered), 0),
        )

    def _embedded(self, timestep: torch.Tensor, step: StepInfo) -> torch.Tensor:
        """Embed the timestep to [B, D], in the dtype of the embedding's weights."""
        embedding = self.time_embedding
        embedded: torch.Tensor = (
            embedding(timestep, step) if isinstance(embedding, FlowMapEmbedding) else embedding(timestep)
        )
        return embedded

    def _run(self, tokens: slice, timestep: torch.Tensor, step: StepInfo) -> _Run:
        embedding = self._embedded(timestep, step).to(self.out.weight.dtype)
        time = self.time_projection(F.silu(embedding)).unflatten(-1, (6, -1)).float()
        return _Run(tokens, embedding, time)

    def _modulated_input(self, timestep: torch.Tensor, step: StepInfo) -> ModulatedInput:
        """Return the input that TeaCache compares: of the timestep alone, as TeaCache's authors do for Wan; not of an
        image's tokens, which one process of several may hold alone."""
        timestep = timestep if timestep.dim() == 1 else timestep[:, 0]
        run = self._run(slice(0), timestep, step)
        return ModulatedInput(self._embedded(timestep, step).float()[:, None], run.time.flatten(1)[:, None])

    def _text_keys(self, embeddings: torch.Tensor, context: AttentionContext) -> tuple[KeysAndValues, ...]:
        """Return every block's keys and values of a text [B, L, text_dim]."""

        def project() -> tuple[KeysAndValues, ...]:
            text = self.text_embedding(embeddings.to(self.out.weight.dtype))
            projected = []
            for block in self.text_blocks():
                with held_weights(block.cross_attention):
                    projected.append(block.cross_attention.keys_and_values(text))
            return tuple(projected)

        return cached_for_prompt("text_projection", embeddings, context, project)

    def _image_keys(self, tokens: torch.Tensor | None, context: AttentionContext) -> tuple[KeysAndValues | None, ...]:
        """Return every block's keys and values of an image encoder's tokens [B, I, image_dim]."""
        embedding = self.image_embedding
        if tokens is None or embedding is None:
            return (None,) * len(self.text_blocks())

        def project() -> tuple[KeysAndValues, ...]:
            image = embedding(tokens.to(self.out.weight.dtype))
            projected = []
            for layer in (block.cross_attention.image for block in self._blocks()):
                if layer is not None:
                    with held_weights(layer):
                        projected.append(layer.keys_and_values(image))
            return tuple(projected)

        return cached_for_prompt("image_projection", tokens, context, project)

    def text_blocks(self) -> Sequence[WanBlock]:
        """Return the blocks that attend to the text."""
        return tuple(self._blocks())

    def _blocks(self) -> Iterator[WanBlock]:
        return (block for block in self.blocks if isinstance(block, WanBlock))

    def add_gates(self) -> None:
        """Give every block the gate of Video Sparse Attention, without values, which the checkpoint has."""
        self.config = dataclasses.replace(self.config, has_gate=True)
        for block in self._blocks():
            with torch.device("meta"):
                block.self_attention.add_gate()
