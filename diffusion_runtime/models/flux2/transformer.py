"""The FLUX.2 transformer on our attention layers, for inference.

    latents -> tokens -> double-stream blocks -> [grid, text] -> single-stream blocks -> modulated norm -> velocity

Reference images follow the grid at every step; where the config caches them, they go through the blocks once, at
timestep 0 and attending to themselves alone, and every step attends to their keys and values.

The modulation by timestep and guidance scale is computed once per step: double-stream blocks share it, and all
single-stream blocks. Shapes in this file: B batch, S grid tokens, R tokens of references, L text tokens, D width
(num_heads * head_dim).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.cache.prefix import PrefixCache
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import ModulatedInput, overwriting, then_joined
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.layers.embeddings import ConditionEmbedding, patchify, unpatchify
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.modulation import Modulation, modulated_layer_norm
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.reference_tokens import layout_with_references, with_references
from diffusion_runtime.layers.rope import followed_by_text, position_rotations
from diffusion_runtime.memory.waiting_weights import held_weights
from diffusion_runtime.models.flux2.blocks import Flux2DoubleBlock, Flux2SingleBlock
from diffusion_runtime.models.flux2.config import Flux2TransformerConfig
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.text_encoders.interface import Conditions

# Distance between images to edit on the first axis; the output is at 0.
_REFERENCE_STEP = 10


class Flux2Transformer(DiffusionTransformer):
    """The whole denoiser."""

    def __init__(self, config: Flux2TransformerConfig, geometry: LatentGeometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        self.patch_embedding = Linear(config.num_channels, config.dim, bias=False)
        self.text_embedding = Linear(config.text_dim, config.dim, bias=False)
        self.condition_embedding = ConditionEmbedding(
            config.dim, num_waves=config.num_waves, has_guidance=config.embeds_guidance, bias=False
        )
        self.double_modulation = Modulation(config.dim, 6, bias=False)
        self.double_text_modulation = Modulation(config.dim, 6, bias=False)
        self.single_modulation = Modulation(config.dim, 3, bias=False)
        total, first_single = config.num_layers, config.num_double_layers
        self.double_blocks = nn.ModuleList(
            Flux2DoubleBlock(config, LayerInfo(index, total, "self", f"double_blocks.{index}.joint_attention"), policy)
            for index in range(config.num_double_layers)
        )
        self.single_blocks = nn.ModuleList(
            Flux2SingleBlock(config, LayerInfo(first_single + index, total, "self", f"single_blocks.{index}"), policy)
            for index in range(config.num_single_layers)
        )
        self.out_modulation = Modulation(config.dim, 2, bias=False)
        self.out = Linear(config.dim, config.num_channels, bias=False)

    @property
    def num_blocks(self) -> int:
        return len(self.double_blocks) + len(self.single_blocks)

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the velocity. The text's padding counts as text in the lengths, as in training."""
        grid, lengths = self.geometry.grid(latents.shape), inputs.text.lengths
        dtype, references = self.out.weight.dtype, () if inputs.image is None else inputs.image.references
        context = self.in_token_order(context, grid, latents.device)
        slice_of_grid = context.sharding.shard(self._embed(latents.to(dtype)))
        if self.config.caches_references and references:
            context = dataclasses.replace(context, prefix=self._reference_cache(references, context))
            references = ()
        num_tokens, of_references = slice_of_grid.shape[1], [self.geometry.grid(each.shape) for each in references]
        x = with_references(slice_of_grid, references, self._embed, dtype, context)
        # A copy: the blocks write into it.
        text = self._text(inputs.text, context).clone()
        entering, num_text_tokens = x, text.shape[1]
        conditioning = F.silu(self.condition_embedding(timestep, guidance=inputs.guidance))
        rotations = self._rotations((grid, *of_references), num_text_tokens, context)
        joint = context.with_layout(
            layout_with_references(grid, x.shape[1] - num_tokens, num_text_tokens, lengths, tile=context.sharding.tile)
        )
        rows, text_rows = self.double_modulation(conditioning), self.double_text_modulation(conditioning)
        first_rows = rows
        double = [overwriting(block, rows, text_rows, rotations, joint) for block in self.double_blocks]
        rows = self.single_modulation(conditioning)
        single = [overwriting(block, rows, rotations, joint) for block in self.single_blocks]
        (x,) = context.run_blocks(
            [*then_joined(double), *single],
            (x, text),
            grid[0] * grid[1] * grid[2],
            lambda: ModulatedInput(modulated_layer_norm(entering, first_rows[0], first_rows[1], self.config.eps)),
        )
        scale, shift = self.out_modulation(conditioning)
        tokens = self.out(modulated_layer_norm(x[:, :num_tokens], shift, scale, self.config.eps))
        tokens = context.sharding.gather(tokens, grid[0] * grid[1] * grid[2])
        return unpatchify(tokens, grid, self.geometry.patch).to(latents.dtype)

    def _reference_cache(self, references: Sequence[torch.Tensor], context: AttentionContext) -> PrefixCache:
        """Return the cache of the request's references, [B, channels, 1, height, width] each; computed by its first
        forward pass."""
        return cached_for_prompt(
            "reference_keys", references[0], context, lambda: self._prefill(references, context.for_prefill())
        )

    def _prefill(self, references: Sequence[torch.Tensor], context: AttentionContext) -> PrefixCache:
        x = torch.cat([self._embed(each.to(self.out.weight.dtype)) for each in references], dim=1)
        timestep = torch.zeros(len(x), device=x.device)
        conditioning = F.silu(self.condition_embedding(timestep, guidance=None))
        grids = [self.geometry.grid(each.shape) for each in references]
        rotations = torch.cat([self._places(index, grid) for index, grid in enumerate(grids, start=1)])
        layers = []
        for blocks, modulation in (
            (self.double_blocks, self.double_modulation),
            (self.single_blocks, self.single_modulation),
        ):
            rows = modulation(conditioning)
            for block in blocks:
                assert isinstance(block, Flux2DoubleBlock | Flux2SingleBlock)
                with held_weights(block):
                    layers.append(block.prefill(x, rows, rotations, context))
        cache = PrefixCache(tuple(layers))
        context.recorder.note(
            f"reference images: keys and values of {cache.num_tokens} tokens computed once, "
            f"{cache.num_bytes / 1e6:.1f} MB"
        )
        return cache

    def _text(self, text: Conditions, context: AttentionContext) -> torch.Tensor:
        """Return the text's tokens [B, L, D], as long as the longest prompt; kept for the request's other steps."""

        def project() -> torch.Tensor:
            projected: torch.Tensor = self.text_embedding(
                text.embeddings[:, : max(text.lengths)].to(self.out.weight.dtype)
            )
            return projected

        return cached_for_prompt("text_embedding", text.embeddings, context, project)

    def _embed(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the tokens [B, tokens, D] of latents [B, channels, 1, height, width]."""
        tokens: torch.Tensor = self.patch_embedding(patchify(latents, self.geometry.patch))
        return tokens

    def _rotations(
        self, grids: tuple[tuple[int, int, int], ...], num_text_tokens: int, context: AttentionContext
    ) -> torch.Tensor:
        """Return [S + R + L, head_dim / 2]. grids: the output's, and those of the references. Pictures vary along rows
        and columns, each at its own position on the first axis; the text along the last axis."""

        def compute() -> torch.Tensor:
            on_grid, *whole = (self._places(index, grid) for index, grid in enumerate(grids))
            text = self._table((range(1), range(1), range(1), range(num_text_tokens)))
            return followed_by_text(torch.cat([context.sharding.shard(on_grid, dim=0), *whole]), text)

        return cached_for_request("rotations", (grids, num_text_tokens), context, compute)

    def _places(self, index: int, grid: tuple[int, int, int]) -> torch.Tensor:
        """Return [tokens, head_dim / 2], of the output (index 0) or of a reference."""
        first = index * _REFERENCE_STEP
        return self._table((range(first, first + 1), range(grid[1]), range(grid[2]), range(1)))

    def _table(self, places: tuple[range, ...]) -> torch.Tensor:
        return position_rotations(places, self.config.axes, self.out.weight.device, self.config.theta)
