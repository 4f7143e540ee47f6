"""The Qwen-Image 2.1 transformer on our attention layers, for inference.

    text    -> tokens -> blocks, once a request, each token attending to those before it -> keys and values (prefix);
               with images to edit, the tokens of their latents are in it, each attending to all of its own image too
    latents -> tokens -> blocks, at every step, attending to the prefix and to each other -> scaled norm -> velocity

Grid and text share all weights. The text is modulated as at timestep 0 and sees nothing of the grid, so that its keys
and values are the same at every step. The timestep's modulation is the same for every block. Shapes in this file: B
batch, S grid tokens, L text tokens, D width (num_heads * head_dim).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.cache.prefix import PrefixCache
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import LocalAttention, USPAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import ModulatedInput, overwriting
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm, modulated_norm
from diffusion_runtime.layers.embeddings import TimestepEmbedding, patchify, unpatchify
from diffusion_runtime.layers.linear import GatedFeedForward, Linear, LinearInput
from diffusion_runtime.layers.modulation import Modulation, add_gated_, norm_for
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.rope import diagonal_rotations, norm_and_rotate, position_rotations
from diffusion_runtime.memory.waiting_weights import held_weights
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.models.qwen_image_21.config import QwenImage21TransformerConfig
from diffusion_runtime.text_encoders.interface import Conditions

# The model takes time in [0, 1] and multiplies it by this.
_TIME_SCALE = 1000.0
# Scale and gate of the attention, then of the feed-forward, [B, D] each.
Rows = Sequence[torch.Tensor]


class QwenImage21Block(nn.Module):
    """Attention and a gated feed-forward, each after a scaled norm and a gate; no bias anywhere, and no modulation of
    its own.

    attention: of the grid, which also sees the prefix. text_attention: of the prefix among itself, causal, which every
    process holds. picture_attention: of the tokens of a picture in it, which see all of their own and those before.
    """

    def __init__(self, config: QwenImage21TransformerConfig, layer: LayerInfo, policy: AttentionPolicy) -> None:
        super().__init__()
        self.eps = config.eps
        self.qkv = Linear(config.dim, 3 * config.dim, bias=False)
        self.norm_q = RMSNorm(config.head_dim, config.eps)
        self.norm_k = RMSNorm(config.head_dim, config.eps)
        self.out = Linear(config.dim, config.dim, bias=False)
        self.feed_forward = GatedFeedForward(config.dim, config.ffn_dim)
        heads = config.num_heads, config.head_dim
        of_steps = dataclasses.replace(layer, phase="denoise", name=f"{layer.name}.attention")
        of_prefill = dataclasses.replace(layer, phase="commit", name=f"{layer.name}.text_attention")
        self.attention = USPAttention(*heads, layer=of_steps, policy=policy, cached_keys=True)
        self.text_attention = LocalAttention(*heads, layer=of_prefill, policy=policy, causal=True, cached_keys=True)
        of_pictures = dataclasses.replace(of_prefill, name=f"{layer.name}.picture_attention")
        self.picture_attention = LocalAttention(*heads, layer=of_pictures, policy=policy, cached_keys=True)

    def forward(self, x: torch.Tensor, rows: Rows, rotations: torch.Tensor, context: AttentionContext) -> None:
        """Run the block; x [B, S, D] is overwritten. rotations: [B or nothing, S, head_dim / 2], complex. context: with
        the text as its prefix; its layout is the grid."""
        q, k, v = self._heads(self._attention_input(x, rows), rotations)
        self._add_branches(x, self.attention(q, k, v, context), rows)

    def prefill(
        self,
        x: torch.Tensor,
        rows: Rows,
        rotations: torch.Tensor,
        context: AttentionContext,
        pictures: Sequence[slice] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the block on x [B, L, D], of the prefix, which is overwritten; return its keys and values, [B, L, heads,
        head_dim].

        pictures: which tokens are of each, in their order. rotations: [L, head_dim / 2], complex. context.layout: None.
        The padding of a shorter text comes last, so that no token of it attends to that.
        """
        q, k, v = self._heads(self._attention_input(x, rows), rotations)
        attended = self.text_attention(q, k, v, context)
        if pictures:
            # The others are right already: each token of the text sees all before it.
            attended = attended.clone()
        for own in pictures:
            seen = slice(0, own.stop)
            attended[:, own] = self.picture_attention(
                q[:, own].contiguous(), k[:, seen].contiguous(), v[:, seen].contiguous(), context
            )
        self._add_branches(x, attended, rows)
        # Copies: k and v are views of a tensor that also holds q.
        return k.clone(memory_format=torch.contiguous_format), v.clone(memory_format=torch.contiguous_format)

    def modulated_input(self, x: torch.Tensor, rows: Rows) -> ModulatedInput:
        """Return the input of the first block after modulation, which TeaCache compares."""
        return ModulatedInput(modulated_norm(x, Norm("layer", self.eps), scale=rows[0]))

    def _attention_input(self, x: torch.Tensor, rows: Rows) -> LinearInput:
        return norm_for((self.qkv,), x, Norm("layer", self.eps), scale=rows[0])

    def _heads(self, x: LinearInput, rotations: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = self.qkv(x).unflatten(-1, (3, self.attention.num_heads, -1))
        shares = self.attention.num_shares
        return norm_and_rotate(product, (self.norm_q, self.norm_k), rotations, num_shares=shares)

    def _add_branches(self, x: torch.Tensor, attended: torch.Tensor, rows: Rows) -> None:
        """Add the attention's branch to x, then the feed-forward network's."""
        _, gate, ffn_scale, ffn_gate = rows
        branch = Branch(self.out(attended.flatten(2)), gate)
        normalized = norm_for((self.feed_forward.up,), x, Norm("layer", self.eps), scale=ffn_scale, branch=branch)
        add_gated_(x, self.feed_forward(normalized), ffn_gate)


class QwenImage21TextEmbedding(nn.Module):
    """Projection of the language model's hidden states to the transformer's width: a norm, and two layers with the tanh
    form of GELU between. norm_offset: its weight minus 1, as files have it."""

    def __init__(self, config: QwenImage21TransformerConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.norm_offset = nn.Parameter(torch.zeros(config.text_dim))
        self.up = Linear(config.text_dim, config.dim, bias=False)
        self.down = Linear(config.dim, config.dim, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map [B, L, text_dim] to [B, L, D]."""
        scale = self.norm_offset.expand(len(tokens), -1)
        return self.down.forward_after_gelu(self.up, modulated_norm(tokens, Norm("rms", self.eps), scale=scale))


class QwenImage21Transformer(DiffusionTransformer):
    """The whole denoiser."""

    def __init__(self, config: QwenImage21TransformerConfig, geometry: LatentGeometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        self.patch_embedding = Linear(config.num_channels, config.dim, bias=False)
        self.text_embedding = QwenImage21TextEmbedding(config)
        self.timestep_embedding = TimestepEmbedding(config.num_waves, config.dim, bias=False)
        self.modulation = Modulation(config.dim, 4, bias=False)
        self.blocks = nn.ModuleList(
            QwenImage21Block(config, LayerInfo(index, config.num_layers, "self", f"blocks.{index}"), policy)
            for index in range(config.num_layers)
        )
        self.out_modulation = Linear(config.dim, config.dim, bias=False)
        self.out = Linear(config.dim, config.num_channels, bias=False)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the velocity. Nothing attends to the text's padding, and the grid follows each sample's own text, so
        that a sample does not depend on the others of its batch."""
        grid = self.geometry.grid(latents.shape)
        num_tokens = grid[0] * grid[1] * grid[2]
        context = self.in_token_order(context, grid, latents.device)
        prefix = cached_for_prompt("text_keys", inputs.text.embeddings, context, lambda: self._prefill(inputs, context))
        joint = dataclasses.replace(context, prefix=prefix).with_layout(TokenLayout(grid, tile=context.sharding.tile))
        tokens = patchify(latents.to(self.out.weight.dtype), self.geometry.patch)
        x = context.sharding.shard(self.patch_embedding(tokens))
        conditioning = self._conditioning(timestep)
        rows = self._rows(conditioning)
        moved = sum(max(each.shape[3:]) for each in _references(inputs))
        starts = tuple(length + moved for length in inputs.text.lengths)
        rotations = cached_for_request(
            "rotations", (grid, starts), context, lambda: self._places(grid, starts, context)
        )
        blocks = (overwriting(block, rows, rotations, joint) for block in self.blocks)
        first, entering = self.blocks[0], x
        assert isinstance(first, QwenImage21Block)
        (x,) = context.run_blocks(blocks, (x,), num_tokens, lambda: first.modulated_input(entering, rows))
        scale = self.out_modulation(conditioning)
        tokens = self.out(modulated_norm(x, Norm("layer", self.config.eps), scale=scale))
        tokens = context.sharding.gather(tokens, num_tokens)
        return unpatchify(tokens, grid, self.geometry.patch).to(latents.dtype)

    def _prefill(self, inputs: DenoiserInputs, context: AttentionContext) -> PrefixCache:
        """Return keys and values of a prompt with its pictures, as many as the longest of the batch has; those of a
        request's first pass serve the others."""
        x, rotations, pictures = self._prefix(inputs.text, _references(inputs))
        num_of_pictures = sum(own.stop - own.start for own in pictures)
        lengths = tuple(length + num_of_pictures for length in inputs.text.lengths)
        rows = self._rows(self._conditioning(torch.zeros(len(x), device=x.device)))
        alone = context.for_prefill()
        layers = []
        for block in self.blocks:
            assert isinstance(block, QwenImage21Block)
            with held_weights(block):
                layers.append(block.prefill(x, rows, rotations, alone, pictures))
        cache = PrefixCache(tuple(layers), None if min(lengths) == max(lengths) else tuple(lengths))
        of = "text and pictures" if pictures else "text"
        context.recorder.note(
            f"{of}: keys and values of {cache.num_tokens} tokens computed once, {cache.num_bytes / 1e6:.1f} MB"
        )
        return cache

    def _prefix(
        self, text: Conditions, references: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, list[slice]]:
        """Return the prefix that the grid attends to: tokens [B, L, D], the text's with those of each picture where the
        language model saw it; their rotations [L, head_dim / 2]; and which are of each picture."""
        tokens = self.text_embedding(text.embeddings[:, : max(text.lengths)].to(self.out.weight.dtype))
        pieces, rotations, pictures = [], [], []
        start = position = length = 0

        def add_text(stop: int) -> None:
            nonlocal start, position, length
            pieces.append(tokens[:, start:stop])
            places = range(position, position + stop - start)
            rotations.append(diagonal_rotations(places, self.config.axes, tokens.device))
            start, position, length = stop, position + stop - start, length + stop - start

        for latents, before in zip(references, text.picture_places, strict=True):
            add_text(before)
            picture = self.patch_embedding(patchify(latents.to(tokens.device, tokens.dtype), self.geometry.patch))
            height, width = self.geometry.grid(latents.shape)[1:]
            pieces.append(picture)
            axes = (range(position, position + 1), *(_around_middle(size) for size in (height, width)))
            rotations.append(position_rotations(axes, self.config.axes, tokens.device))
            pictures.append(slice(length, length + height * width))
            position, length = position + max(height, width), length + height * width
        add_text(tokens.shape[1])
        return torch.cat(pieces, dim=1), torch.cat(rotations), pictures

    def _conditioning(self, timestep: torch.Tensor) -> torch.Tensor:
        """Return [B, D], after its activation. The division and the product round as they do in training: at hundreds
        of radians it shows in the fifth digit."""
        return F.silu(self.timestep_embedding(timestep / _TIME_SCALE * _TIME_SCALE))

    def _rows(self, conditioning: torch.Tensor) -> Rows:
        scale, gate, ffn_scale, ffn_gate = self.modulation(conditioning)
        return scale, gate.tanh(), ffn_scale, ffn_gate.tanh()

    def _places(self, grid: tuple[int, int, int], starts: Sequence[int], context: AttentionContext) -> torch.Tensor:
        """Return [B or nothing, S, head_dim / 2]. The text is along the diagonal of all axes; the picture after it on
        the first, from the sample's start, and around the middle of the others."""
        rows, columns = (_around_middle(size) for size in grid[1:])

        def table(start: int) -> torch.Tensor:
            axes = (range(start, start + grid[0]), rows, columns)
            places = position_rotations(axes, self.config.axes, self.out.weight.device)
            return context.sharding.shard(places, dim=0)

        if min(starts) == max(starts):
            return table(starts[0])
        return torch.stack([table(start) for start in starts])


def _references(inputs: DenoiserInputs) -> tuple[torch.Tensor, ...]:
    """Return the latents of the images to edit, [B, channels, 1, height, width] each."""
    return () if inputs.image is None else inputs.image.references


def _around_middle(size: int) -> range:
    return range(size // 2 - size, size // 2)
