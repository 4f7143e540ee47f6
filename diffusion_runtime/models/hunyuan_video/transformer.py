"""The HunyuanVideo transformer (Kong et al., arXiv:2412.03603) on our attention layers, for inference.

    latents -> patches ─┐
                        ├─> blocks of two streams -> blocks of one -> modulated norm -> projection -> velocity
    text -> refiner ────┘

Grid and text attend to each other jointly, the text after the grid and its padding, as a length, after everything.
Timestep, guidance scale and pooled text modulate every block. A video that starts from an image has it next to its
latents (latent concat), or as its first latent frame, whose tokens are at timestep 0 and take no guidance scale (token
replace). Shapes in this file: B batch, S grid tokens, L text tokens, D width (num_heads * head_dim).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import then_joined
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.errors import RequestError
from diffusion_runtime.layers.double_stream import DoubleStreamBlock, modulated_input
from diffusion_runtime.layers.embeddings import ConditionEmbedding, PatchEmbedding, unpatchify
from diffusion_runtime.layers.first_frame import beside_latents, in_first_frame
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.modulation import ModulatedBlock, Modulation, modulated_layer_norm
from diffusion_runtime.layers.modulation_rows import (
    ApartRows,
    ModulationRows,
    modulated,
    modulations_of,
    repeated,
    rows_of_request,
    rows_of_step,
)
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.riflex import lowered_index
from diffusion_runtime.layers.rope import followed_by_text, position_rotations
from diffusion_runtime.layers.single_stream import SingleStreamBlock
from diffusion_runtime.layers.token_refiner import TokenRefiner, UnrefinedText
from diffusion_runtime.models.hunyuan_video.config import TOKEN_REPLACE, HunyuanVideoConfig
from diffusion_runtime.models.hunyuan_video.weights import NUM_WAVES
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer, ImageCondition
from diffusion_runtime.text_encoders.interface import Conditions

REFINER_ROLE = "hunyuan_video.text_refiner"
EPS = 1e-6
# Share of the noise that a video from an image starts from; the rest is the image.
_NOISE_SHARE = 0.999


class HunyuanVideoTransformer(DiffusionTransformer):
    """The whole denoiser. Modulation, norms and gated sums are computed in float32 in a model of any dtype."""

    def __init__(self, config: HunyuanVideoConfig, geometry: LatentGeometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        sizes = (config.num_heads, config.head_dim, config.ffn_dim, EPS)
        num_blocks = config.num_layers + config.num_single_layers
        self.patch_embedding = PatchEmbedding(config.num_input_channels, config.dim, config.patch)
        self.conditioning = ConditionEmbedding(
            config.dim, num_waves=NUM_WAVES, pooled_dim=config.pooled_dim, has_guidance=config.has_guidance
        )
        self.refiner = TokenRefiner(
            config.text_dim,
            config.num_heads,
            config.head_dim,
            config.num_refiner_layers,
            num_waves=NUM_WAVES,
            role=REFINER_ROLE,
            name="refiner",
            policy=policy,
        )
        self.blocks = nn.ModuleList(
            DoubleStreamBlock(
                *sizes, layer=LayerInfo(index, num_blocks, "self", f"blocks.{index}.joint_attention"), policy=policy
            )
            for index in range(config.num_layers)
        )
        self.single_blocks = nn.ModuleList(
            SingleStreamBlock(
                *sizes,
                layer=LayerInfo(config.num_layers + index, num_blocks, "self", f"single_blocks.{index}"),
                policy=policy,
            )
            for index in range(config.num_single_layers)
        )
        self.out_modulation = Modulation(config.dim, 2)
        self.out = Linear(config.dim, config.num_channels * math.prod(config.patch))

    @property
    def num_blocks(self) -> int:
        return len(self.blocks) + len(self.single_blocks)

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        grid = self.geometry.grid(latents.shape)
        if not self._replaces_tokens:
            # The tokens of a first frame, at a timestep of their own, are a range in raster order alone.
            context = self.in_token_order(context, grid, latents.device)
        unrefined = self._unrefined(inputs.text, context)
        rows = self._rows(timestep, inputs, context)
        text = self.refiner(unrefined, timestep, context)
        num_text_tokens = text.shape[1]
        given = self._with_image(latents, inputs.image)
        x = context.sharding.shard(self.patch_embedding(given.to(self.out.weight.dtype)))
        apart = self._image_apart(timestep, grid, inputs, context)
        rotations = self._rotations(grid, num_text_tokens, context, lowered_index(inputs.request))
        joint = context.with_layout(
            TokenLayout(
                grid,
                num_suffix_tokens=num_text_tokens,
                valid_lengths=unrefined.lengths,
                tile=context.sharding.tile,
            )
        )
        double = modulated(self.blocks, rows, rotations, joint, apart=apart)
        single = modulated(self.single_blocks, rows, rotations, joint, apart=apart)
        (whole,) = context.run_blocks(
            [*then_joined(double), *single],
            (x, text),
            math.prod(grid),
            lambda: modulated_input(self.blocks, x, rows),
        )
        scale, shift = rows.of(self.out_modulation)
        tokens = self.out(modulated_layer_norm(whole[:, : x.shape[1]], shift, scale, EPS))
        tokens = context.sharding.gather(tokens, math.prod(grid))
        return unpatchify(tokens, grid, self.config.patch, channels_first=True).to(latents.dtype)

    @property
    def _replaces_tokens(self) -> bool:
        return self.config.image_condition == TOKEN_REPLACE

    def start(self, noise: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        """Return the noise, mixed with the image in every frame."""
        if inputs.image is None:
            return noise
        share = torch.tensor(_NOISE_SHARE, device=noise.device)
        return noise * share + inputs.image.latents.to(noise.device, noise.dtype) * (1 - share)

    def settle(self, latents: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        if not self._replaces_tokens or inputs.image is None:
            return latents
        return in_first_frame(latents, inputs.image.latents)

    def _with_image(self, latents: torch.Tensor, image: ImageCondition | None) -> torch.Tensor:
        """Return [B, num_input_channels, frames, height, width]. Raises RequestError for a missing image."""
        if self.config.image_condition is None:
            return latents
        if image is None:
            raise RequestError("image_path: this checkpoint makes videos from an image; give one")
        return (in_first_frame if self._replaces_tokens else beside_latents)(latents, image.latents)

    def _image_apart(
        self, timestep: torch.Tensor, grid: tuple[int, int, int], inputs: DenoiserInputs, context: AttentionContext
    ) -> ApartRows | None:
        """Return the rows of the image's tokens that this process holds, in a model whose first frame it is."""
        if not self._replaces_tokens:
            return None
        held = context.sharding.local(slice(0, grid[1] * grid[2]), math.prod(grid))
        if held.start >= held.stop:
            return None

        def condition() -> torch.Tensor:
            at_zero = self.conditioning.timestep(torch.zeros_like(timestep))
            assert inputs.text.pooled is not None
            assert self.conditioning.pooled is not None
            at_zero = at_zero + self.conditioning.pooled(inputs.text.pooled.to(at_zero.dtype))
            return F.silu(at_zero)

        blocks = (*self.blocks, *self.single_blocks)
        modulations = tuple(block.modulation for block in blocks if isinstance(block, ModulatedBlock))
        rows = rows_of_request("image", inputs.text.pooled, modulations, len(timestep), condition, context)
        return ApartRows(held.stop - held.start, rows, is_first=True)

    def _rows(self, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext) -> ModulationRows:
        """Return the modulation rows of all blocks and of the last norm, by timestep, guidance and pooled text. Raises
        RequestError when one of them is missing."""
        guidance, pooled = inputs.guidance, inputs.text.pooled
        if pooled is None or (guidance is None and self.config.has_guidance):
            raise RequestError("this transformer takes a pooled text and a guidance scale; give DenoiserInputs both")
        if guidance is not None:
            # Rounded as its authors' sampler does: in thousandths, in the dtype of the model.
            guidance = float(torch.tensor(guidance, dtype=self.out.weight.dtype) * 1000) / 1000

        def condition(timestep: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
            pooled_of_each = repeated(pooled, len(timestep))
            return F.silu(self.conditioning(timestep, guidance=guidance, pooled=pooled_of_each))

        modulations = modulations_of((*self.blocks, *self.single_blocks), self.out_modulation)
        return rows_of_step("transformer", pooled, modulations, timestep, condition, context)

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

    def _unrefined(self, text: Conditions, context: AttentionContext) -> UnrefinedText:
        """Return the refiner's values that depend on the prompts alone, once per request and branch."""
        return cached_for_prompt(
            "unrefined_text", text, context, lambda: self.refiner.prepare(text.embeddings, text.lengths)
        )
