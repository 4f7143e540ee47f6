"""The FLUX.1 transformer on our attention layers, for inference.

    latents -> patches -> double-stream blocks -> [grid, text] -> single-stream blocks -> modulated norm -> velocity

In a double-stream block grid and text have weights of their own and meet in the attention; in a single-stream block
they are one sequence. Timestep, guidance scale and CLIP's vector shift, scale and gate every block.
Shapes in this file: B batch, S grid tokens, R tokens of references, L text tokens, D width (num_heads * head_dim).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import then_joined
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.errors import RequestError
from diffusion_runtime.layers.double_stream import DoubleStreamBlock, modulated_input
from diffusion_runtime.layers.embeddings import ConditionEmbedding, PatchEmbedding, unpatchify
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.modulation import Modulation, modulated_layer_norm
from diffusion_runtime.layers.modulation_rows import ModulationRows, modulated, modulations_of, repeated, rows_of_step
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.reference_tokens import layout_with_references, with_references
from diffusion_runtime.layers.rope import followed_by_text, position_rotations
from diffusion_runtime.layers.single_stream import SingleStreamBlock
from diffusion_runtime.models.flux1.config import Flux1TransformerConfig
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer, ImageCondition
from diffusion_runtime.text_encoders.interface import Conditions


class Flux1Transformer(DiffusionTransformer):
    """The whole denoiser."""

    def __init__(self, config: Flux1TransformerConfig, geometry: LatentGeometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        num_channels = config.num_channels + config.condition_channels
        self.patch_embedding = PatchEmbedding(num_channels, config.dim, geometry.patch)
        self.text_embedding = Linear(config.text_dim, config.dim)
        self.condition_embedding = ConditionEmbedding(
            config.dim, num_waves=config.num_waves, pooled_dim=config.pooled_dim, has_guidance=config.embeds_guidance
        )
        self.double_blocks = nn.ModuleList(
            DoubleStreamBlock(
                config.num_heads,
                config.head_dim,
                config.ffn_dim,
                config.eps,
                layer=LayerInfo(index, config.num_layers, "self", f"double_blocks.{index}.joint_attention"),
                policy=policy,
            )
            for index in range(config.num_double_layers)
        )
        self.single_blocks = nn.ModuleList(
            SingleStreamBlock(
                config.num_heads,
                config.head_dim,
                config.ffn_dim,
                config.eps,
                layer=LayerInfo(config.num_double_layers + index, config.num_layers, "self", f"single_blocks.{index}"),
                policy=policy,
            )
            for index in range(config.num_single_layers)
        )
        self.out_modulation = Modulation(config.dim, 2)
        self.out = Linear(config.dim, config.patch_channels)

    @property
    def num_blocks(self) -> int:
        return len(self.double_blocks) + len(self.single_blocks)

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the velocity. The text's padding counts as text in the lengths, as in training."""
        grid, lengths = self.geometry.grid(latents.shape), inputs.text.lengths
        dtype, (beside, references) = self.out.weight.dtype, self._images(inputs.image)
        context = self.in_token_order(context, grid, latents.device)
        with_condition = torch.cat([each.to(dtype) for each in (latents, *beside)], dim=1)
        slice_of_grid = context.sharding.shard(self.patch_embedding(with_condition))
        num_tokens, of_references = slice_of_grid.shape[1], [self.geometry.grid(each.shape) for each in references]
        x = with_references(slice_of_grid, references, self.patch_embedding, dtype, context)
        # A copy: the blocks write into it.
        text = self._text(inputs.text, context).clone()
        entering, num_text_tokens = x, text.shape[1]
        rows = self._rows(timestep, inputs, context)
        rotations = self._rotations((grid, *of_references), num_text_tokens, context)
        layout = layout_with_references(
            grid, x.shape[1] - num_tokens, num_text_tokens, lengths, tile=context.sharding.tile
        )
        joint = context.with_layout(layout)
        double = modulated(self.double_blocks, rows, rotations, joint)
        single = modulated(self.single_blocks, rows, rotations, joint)
        (x,) = context.run_blocks(
            [*then_joined(double), *single],
            (x, text),
            grid[0] * grid[1] * grid[2],
            lambda: modulated_input(self.double_blocks, entering, rows),
        )
        scale, shift = rows.of(self.out_modulation)
        tokens = self.out(modulated_layer_norm(x[:, :num_tokens], shift, scale, self.config.eps))
        tokens = context.sharding.gather(tokens, grid[0] * grid[1] * grid[2])
        return unpatchify(tokens, grid, self.geometry.patch, channels_first=True).to(latents.dtype)

    def _rows(self, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext) -> ModulationRows:
        """Return the modulation rows of all blocks and of the last norm."""
        pooled = inputs.text.pooled

        def condition(timestep: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
            own = None if pooled is None else repeated(pooled, len(timestep))
            return F.silu(self.condition_embedding(timestep, guidance=inputs.guidance, pooled=own))

        modulations = modulations_of((*self.double_blocks, *self.single_blocks), self.out_modulation)
        return rows_of_step("transformer", pooled, modulations, timestep, condition, context)

    def _images(self, image: ImageCondition | None) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Return the condition next to the latents, and the images to edit, whose tokens follow the latents'."""
        if self.config.condition_channels:
            if image is None:
                raise RequestError("image_path: this checkpoint makes images from an image; give one")
            return (image.latents,), ()
        return (), () if image is None else image.references

    def _rotations(
        self, grids: tuple[tuple[int, int, int], ...], num_text_tokens: int, context: AttentionContext
    ) -> torch.Tensor:
        """Return [S + R + L, head_dim / 2], complex. grids: the output's, and those of the references, which are at 1
        on the first axis. The text is at position 0 on every axis, and so not turned."""

        def table(grid: tuple[int, int, int], first: int) -> torch.Tensor:
            axes = (range(first, first + 1), range(grid[1]), range(grid[2]))
            return position_rotations(axes, self.config.axes, self.out.weight.device)

        def compute() -> torch.Tensor:
            whole = [table(grid, 1) for grid in grids[1:]]
            on_grid = context.sharding.shard(table(grids[0], 0), dim=0)
            return followed_by_text(torch.cat([on_grid, *whole]), num_text_tokens)

        return cached_for_request("rotations", (grids, num_text_tokens), context, compute)

    def _text(self, text: Conditions, context: AttentionContext) -> torch.Tensor:
        """Return the text's tokens [B, L, D], as long as the longest prompt; kept for the request's other steps."""

        def project() -> torch.Tensor:
            projected: torch.Tensor = self.text_embedding(
                text.embeddings[:, : max(text.lengths)].to(self.out.weight.dtype)
            )
            return projected

        return cached_for_prompt("text_embedding", text.embeddings, context, project)
