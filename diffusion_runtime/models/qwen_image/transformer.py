"""The Qwen-Image transformer (arXiv:2508.02324) on our attention layers, for inference.

    latents -> patches -> num_layers x double-stream block -> modulated norm -> projection -> velocity

Grid and text have weights of their own and meet in the attention; the timestep shifts, scales and gates every block.
Shapes in this file: B batch, S grid tokens, R tokens of references, L text tokens, D width (num_heads * head_dim).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import RunBlock, Streams
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.denoising.guidance import extrapolate
from diffusion_runtime.layers.double_stream import DoubleStreamBlock, modulated_input
from diffusion_runtime.layers.embeddings import PatchEmbedding, TimestepEmbedding, patchify, unpatchify
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.modulation import Modulation, modulated_layer_norm
from diffusion_runtime.layers.modulation_rows import (
    ApartRows,
    modulated,
    modulations_of,
    rows_of_request,
    rows_of_step,
)
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.reference_tokens import layout_with_references, with_references
from diffusion_runtime.layers.rope import diagonal_rotations, followed_by_text, position_rotations
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.models.qwen_image.config import TIME_SCALE, QwenImageTransformerConfig
from diffusion_runtime.text_encoders.interface import Conditions


class QwenImageTransformer(DiffusionTransformer):
    """The whole denoiser."""

    def __init__(self, config: QwenImageTransformerConfig, geometry: LatentGeometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        self.patch_embedding = PatchEmbedding(config.num_channels, config.dim, geometry.patch)
        self.text_norm = RMSNorm(config.text_dim, config.eps)
        self.text_embedding = Linear(config.text_dim, config.dim)
        self.timestep_embedding = TimestepEmbedding(config.num_waves, config.dim, scale=TIME_SCALE)
        self.blocks = nn.ModuleList(
            DoubleStreamBlock(
                config.num_heads,
                config.head_dim,
                config.ffn_dim,
                config.eps,
                layer=LayerInfo(index, config.num_layers, "self", f"blocks.{index}.joint_attention"),
                policy=policy,
            )
            for index in range(config.num_layers)
        )
        self.out_modulation = Modulation(config.dim, 2)
        self.out = Linear(config.dim, config.patch_channels)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the velocity. Nothing attends to the text's padding."""
        grid = self.geometry.grid(latents.shape)
        dtype, references = self.out.weight.dtype, self.references_of(inputs)
        context = self.in_token_order(context, grid, latents.device)
        slice_of_grid = context.sharding.shard(self.patch_embedding(latents.to(dtype)))
        num_tokens, of_references = slice_of_grid.shape[1], [self.geometry.grid(each.shape) for each in references]
        x = with_references(slice_of_grid, references, self.patch_embedding, dtype, context)
        # A copy: the blocks write into it.
        text = self._text(inputs.text, context).clone()
        modulations = modulations_of(self.blocks, self.out_modulation)
        rows = rows_of_step("transformer", None, modulations, timestep, self._conditioning, context)
        rotations = self.rotations((grid, *of_references), text.shape[1], context)
        layout = layout_with_references(
            grid, x.shape[1] - num_tokens, text.shape[1], inputs.text.lengths, tile=context.sharding.tile
        )
        joint = context.with_layout(layout)
        apart = self._references_apart(x.shape[1] - num_tokens, timestep, context)
        blocks = modulated(self.blocks, rows, rotations, joint, apart=apart)
        if residuals := self.residuals_of(latents, timestep, inputs, context):
            blocks = [_adding(block, residual) for block, residual in zip(blocks, residuals, strict=True)]
        entering = x
        x, _ = context.run_blocks(
            blocks,
            (x, text),
            layout.num_grid_tokens,
            lambda: modulated_input(self.blocks, entering, rows),
        )
        scale, shift = rows.of(self.out_modulation)
        tokens = self.out(modulated_layer_norm(x[:, :num_tokens], shift, scale, self.config.eps))
        tokens = context.sharding.gather(tokens, layout.num_grid_tokens)
        return unpatchify(tokens, grid, self.geometry.patch, channels_first=True).to(latents.dtype)

    def references_of(self, inputs: DenoiserInputs) -> tuple[torch.Tensor, ...]:
        """Return the latents of images to edit."""
        return () if inputs.image is None else inputs.image.references

    def residuals_of(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        inputs: DenoiserInputs,
        context: AttentionContext,
    ) -> Sequence[torch.Tensor]:
        """Return the residuals added to the grid's tokens after each block, [B, S, D] of this process's tokens; empty
        for nothing. context: in the order of the tokens, without a layout."""
        return ()

    def _conditioning(self, timestep: torch.Tensor, _: torch.Tensor | None = None) -> torch.Tensor:
        """Return [B, D], after its activation. timestep: [B], in [0, 1000]."""
        return F.silu(self.timestep_embedding(timestep / TIME_SCALE))

    def _references_apart(
        self, num_references: int, timestep: torch.Tensor, context: AttentionContext
    ) -> ApartRows | None:
        """Return the rows of references' tokens at timestep 0, in a model that was trained with them there."""
        if not num_references or not self.config.references_at_zero:
            return None
        modulations = tuple(block.modulation for block in self.blocks if isinstance(block, DoubleStreamBlock))
        rows = rows_of_request(
            "references",
            None,
            modulations,
            len(timestep),
            lambda: self._conditioning(torch.zeros_like(timestep[:1])),
            context,
        )
        return ApartRows(num_references, rows)

    def combine_guidance(self, cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the extrapolation, every token of it as long as the conditional branch's."""
        patch = self.geometry.patch
        tokens = patchify(extrapolate(cond, uncond, scale), patch)
        wanted = patchify(cond, patch).norm(dim=-1, keepdim=True)
        length = tokens.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(tokens.dtype).tiny)
        return unpatchify(tokens * (wanted / length), self.geometry.grid(cond.shape), patch, channels_first=True)

    def rotations(
        self, grids: tuple[tuple[int, int, int], ...], num_text_tokens: int, context: AttentionContext
    ) -> torch.Tensor:
        """Return [S + R + L, head_dim / 2], complex. grids: the output's, and those of the references, each of which is
        a frame later. Rows and columns are counted from each image's centre; the text continues from the largest of
        them along the diagonal of all axes."""

        def table(frame: int, grid: tuple[int, int, int]) -> torch.Tensor:
            rows, columns = (range(size // 2 - size, size // 2) for size in grid[1:])
            axes = (range(frame, frame + grid[0]), rows, columns)
            return position_rotations(axes, self.config.axes, self.out.weight.device)

        def compute() -> torch.Tensor:
            on_grid, *whole = (table(frame, grid) for frame, grid in enumerate(grids))
            start = max(size // 2 for grid in grids for size in grid[1:])
            positions = range(start, start + num_text_tokens)
            on_text = diagonal_rotations(positions, self.config.axes, self.out.weight.device)
            return followed_by_text(torch.cat([context.sharding.shard(on_grid, dim=0), *whole]), on_text)

        return cached_for_request("rotations", (grids, num_text_tokens), context, compute)

    def _text(self, text: Conditions, context: AttentionContext) -> torch.Tensor:
        """Return the text's tokens [B, L, D], as long as the longest prompt; kept for the request's other steps."""

        def project() -> torch.Tensor:
            # A copy: the norm writes into float32 inputs.
            tokens = text.embeddings[:, : max(text.lengths)].to(self.out.weight.dtype, copy=True)
            projected: torch.Tensor = self.text_embedding(self.text_norm(tokens))
            return projected

        return cached_for_prompt("text_embedding", text.embeddings, context, project)


def _adding(block: RunBlock, residual: torch.Tensor) -> RunBlock:
    """Return a block that then adds a residual to the grid's tokens."""

    def run(streams: Streams) -> Streams:
        x, *others = block(streams)
        return (x.add_(residual), *others)

    return run
