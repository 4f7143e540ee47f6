"""The HunyuanVideo-1.5 transformer (arXiv:2511.18870) on our attention layers, for inference.

    latents, image, where it is -> patches ─┐
                                            ├─> blocks of two streams -> modulated norm -> projection -> velocity
    image, text to write, prompt -> tokens ─┘

Grid and text attend to each other jointly, the text after the grid and its padding, as a length, after everything. The
timestep modulates every block. Shapes in this file: B batch, S grid tokens, L text tokens, D width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.errors import RequestError
from diffusion_runtime.layers.double_stream import DoubleStreamBlock, modulated_input
from diffusion_runtime.layers.embeddings import ConditionEmbedding, PatchEmbedding, unpatchify
from diffusion_runtime.layers.first_frame import beside_latents
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.modulation import Modulation, modulated_layer_norm
from diffusion_runtime.layers.modulation_rows import modulated, modulations_of, rows_of_step
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.riflex import lowered_index
from diffusion_runtime.layers.rope import followed_by_text, position_rotations
from diffusion_runtime.models.hunyuan_video_15.config import HunyuanVideo15Config
from diffusion_runtime.models.hunyuan_video_15.text_stream import PreparedText, TextStreamEmbedding
from diffusion_runtime.models.hunyuan_video_15.weights import NUM_WAVES
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer

EPS = 1e-6


class HunyuanVideo15Transformer(DiffusionTransformer):
    """The whole denoiser. Modulation, norms and gated sums are computed in float32 in a model of any dtype."""

    def __init__(self, config: HunyuanVideo15Config, geometry: LatentGeometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        self.patch_embedding = PatchEmbedding(config.num_input_channels, config.dim, config.patch)
        self.conditioning = ConditionEmbedding(
            config.dim, num_waves=NUM_WAVES, takes_next_timestep=config.takes_next_timestep
        )
        self.text = TextStreamEmbedding(config, policy)
        self.blocks = nn.ModuleList(
            DoubleStreamBlock(
                config.num_heads,
                config.head_dim,
                config.ffn_dim,
                EPS,
                layer=LayerInfo(index, config.num_layers, "self", f"blocks.{index}.joint_attention"),
                policy=policy,
            )
            for index in range(config.num_layers)
        )
        self.out_modulation = Modulation(config.dim, 2)
        self.out = Linear(config.dim, config.num_channels * math.prod(config.patch))

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the velocity. Raises RequestError when a model that starts from an image gets none."""
        if inputs.image is None and self.config.starts_from_image:
            raise RequestError("image_path: this checkpoint makes videos from an image; give one, or take its t2v twin")
        grid = self.geometry.grid(latents.shape)
        context = self.in_token_order(context, grid, latents.device)

        def condition(timestep: torch.Tensor, next_timestep: torch.Tensor | None) -> torch.Tensor:
            return F.silu(self.conditioning(timestep, next_timestep=next_timestep))

        modulations = modulations_of(self.blocks, self.out_modulation)
        takes_next = self.config.takes_next_timestep
        rows = rows_of_step("transformer", None, modulations, timestep, condition, context, takes_next=takes_next)
        text = self.text(self._prepared(inputs, context), timestep, context)
        num_text_tokens = text.values.shape[1]
        image = None if inputs.image is None else inputs.image.latents
        x = self.patch_embedding(beside_latents(latents, image).to(self.out.weight.dtype))
        x = context.sharding.shard(x)
        rotations = self._rotations(grid, num_text_tokens, context, lowered_index(inputs.request))
        joint = context.with_layout(
            TokenLayout(grid, num_suffix_tokens=num_text_tokens, valid_lengths=text.lengths, tile=context.sharding.tile)
        )
        blocks = modulated(self.blocks, rows, rotations, joint)
        entering = x
        x, _ = context.run_blocks(
            blocks,
            (x, text.values),
            math.prod(grid),
            lambda: modulated_input(self.blocks, entering, rows),
        )
        scale, shift = rows.of(self.out_modulation)
        tokens = self.out(modulated_layer_norm(x, shift, scale, EPS))
        tokens = context.sharding.gather(tokens, math.prod(grid))
        return unpatchify(tokens, grid, self.config.patch, channels_first=True).to(latents.dtype)

    def replay_refusal(self) -> str | None:
        if self.config.takes_next_timestep:
            return "this checkpoint takes the timestep that a step leads to (MeanFlow), which is no tensor"
        return None

    def _rotations(
        self, grid: tuple[int, int, int], num_text_tokens: int, context: AttentionContext, lowered: int | None
    ) -> torch.Tensor:
        """Return [S + L, head_dim / 2], complex; the text is not turned. lowered: index of the frequency that RIFLEx
        lowers."""

        def compute() -> torch.Tensor:
            axes, device = tuple(range(size) for size in grid), self.out.weight.device
            channels, theta = self.config.axis_channels, self.config.theta
            table = position_rotations(axes, channels, device, theta, lowered_index=lowered)
            return followed_by_text(context.sharding.shard(table, dim=0), num_text_tokens)

        return cached_for_request("rotations", (grid, num_text_tokens, lowered), context, compute)

    def _prepared(self, inputs: DenoiserInputs, context: AttentionContext) -> PreparedText:
        """Return the parts of the text stream that no step changes, once per request and branch."""
        return cached_for_prompt("prepared_text", inputs, context, lambda: self.text.prepare(inputs))
