"""The Z-Image transformer (arXiv:2511.22699) on our attention layers, for inference.

    latents -> patches -> refiner blocks (of the picture alone)  \
                                                                   joined -> blocks -> scaled norm -> velocity
    text    -> tokens  -> refiner blocks (of the text alone)     /

One kind of block serves all: attention and a gated feed-forward, each between two norms. Picture and text are each
filled up to a multiple of 32 tokens with a trained one, which counts as any other. Shapes in this file: B batch,
S grid tokens, P tokens that fill the picture up, L text tokens, D width (num_heads * head_dim).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer, LocalAttention, USPAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import ModulatedInput, RunBlock, overwriting
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm, add_branch_, modulated_norm
from diffusion_runtime.layers.embeddings import TimestepEmbedding, patchify, unpatchify
from diffusion_runtime.layers.linear import GatedFeedForward, Linear, LinearInput
from diffusion_runtime.layers.modulation import BlockModulation, ModulatedBlock, Modulation, norm_for
from diffusion_runtime.layers.modulation_rows import modulations_of, rows_of_step
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.rope import position_rotations
from diffusion_runtime.layers.rotated_attention import rotated_attention
from diffusion_runtime.memory.waiting_weights import held_weights
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.models.z_image.config import TOKEN_MULTIPLE, ZImageTransformerConfig
from diffusion_runtime.text_encoders.interface import Conditions

TEXT_ROLE = "z_image.text_refiner"


class ZImageAttention(nn.Module):
    """Attention among all tokens, with rotary positions; no bias anywhere."""

    def __init__(self, config: ZImageTransformerConfig, attention: AttentionLayer) -> None:
        super().__init__()
        self.qkv = Linear(config.dim, 3 * config.dim, bias=False)
        self.norm_q = RMSNorm(config.head_dim, config.qk_eps)
        self.norm_k = RMSNorm(config.head_dim, config.qk_eps)
        self.out = Linear(config.dim, config.dim, bias=False)
        self.attention = attention

    def forward(self, x: LinearInput, rotations: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Attend. x: [B, tokens, D]; rotations: [B or nothing, tokens, head_dim / 2], complex."""
        product = self.qkv(x).unflatten(-1, (3, self.attention.num_heads, -1))
        attended = rotated_attention(self.attention, product, (self.norm_q, self.norm_k), rotations, context)
        out: torch.Tensor = self.out(attended.flatten(2))
        return out


class ZImageModulation(BlockModulation):
    """Scale and gate of attention, then of the feed-forward, from the timestep; tanh bounds the gates."""

    def __init__(self, config: ZImageTransformerConfig) -> None:
        super().__init__(config.dim, 4, in_dim=config.conditioning_dim)

    def stacked(self, conditioning: torch.Tensor) -> torch.Tensor:
        rows = super().stacked(conditioning)
        rows[1::2] = rows[1::2].tanh()
        return rows


class ZImageOutModulation(Modulation):
    """Scale of the last norm."""

    def __init__(self, config: ZImageTransformerConfig) -> None:
        super().__init__(config.dim, 1, in_dim=config.conditioning_dim)

    def stacked(self, conditioning: torch.Tensor) -> torch.Tensor:
        return super().stacked(F.silu(conditioning))


class ZImageBlock(ModulatedBlock):
    """Block. Its rows are those of ZImageModulation, [4, B, D]; the text's refiner has none."""

    def __init__(self, config: ZImageTransformerConfig, attention: AttentionLayer, *, is_modulated: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.eps)
        self.self_attention = ZImageAttention(config, attention)
        self.attention_out_norm = RMSNorm(config.dim, config.eps)
        self.ffn_norm = RMSNorm(config.dim, config.eps)
        self.feed_forward = GatedFeedForward(config.dim, config.ffn_dim)
        self.ffn_out_norm = RMSNorm(config.dim, config.eps)
        if is_modulated:
            self.modulation = ZImageModulation(config)

    def forward(
        self, x: torch.Tensor, rows: torch.Tensor | None, rotations: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """Run the block; return x [B, tokens, D], overwritten. rows: of `modulation`, None in the text's refiner."""
        scale, gate, ffn_scale, ffn_gate = (None,) * 4 if rows is None else rows.unbind()
        normalized = norm_for((self.self_attention.qkv,), x, self.attention_norm.as_norm, scale=scale)
        branch = self.self_attention(normalized, rotations, context)
        attended = Branch(branch, gate, self.attention_out_norm.as_norm)
        normalized = norm_for((self.feed_forward.up,), x, self.ffn_norm.as_norm, scale=ffn_scale, branch=attended)
        return add_branch_(x, Branch(self.feed_forward(normalized), ffn_gate, self.ffn_out_norm.as_norm))

    def modulated_input(self, x: torch.Tensor, rows: torch.Tensor) -> ModulatedInput:
        """Return the input of the first block after modulation, which TeaCache compares."""
        return ModulatedInput(modulated_norm(x, self.attention_norm.as_norm, scale=rows[0]))


class ZImageTransformer(DiffusionTransformer):
    """The whole denoiser."""

    def __init__(self, config: ZImageTransformerConfig, geometry: LatentGeometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        self.patch_embedding = Linear(config.patch_channels, config.dim)
        self.timestep_embedding = TimestepEmbedding(
            config.num_waves, config.conditioning_dim, config.timestep_hidden_dim
        )
        self.text_norm = RMSNorm(config.text_dim, config.eps)
        self.text_embedding = Linear(config.text_dim, config.dim)
        self.grid_filler = nn.Parameter(torch.zeros(1, config.dim))
        self.text_filler = nn.Parameter(torch.zeros(1, config.dim))
        total = config.num_layers + config.num_refiner_layers

        def layer(kind: type[AttentionLayer], role: str, place: int, name: str) -> AttentionLayer:
            info = LayerInfo(place, total, role, f"{name}.self_attention.attention")
            return kind(config.num_heads, config.head_dim, layer=info, policy=policy)

        self.text_refiner = nn.ModuleList(
            ZImageBlock(config, layer(LocalAttention, TEXT_ROLE, index, f"text_refiner.{index}"), is_modulated=False)
            for index in range(config.num_refiner_layers)
        )
        self.grid_refiner = nn.ModuleList(
            ZImageBlock(config, layer(USPAttention, "self", index, f"grid_refiner.{index}"), is_modulated=True)
            for index in range(config.num_refiner_layers)
        )
        self.blocks = nn.ModuleList(
            ZImageBlock(
                config,
                layer(USPAttention, "self", config.num_refiner_layers + index, f"blocks.{index}"),
                is_modulated=True,
            )
            for index in range(config.num_layers)
        )
        self.out_modulation = ZImageOutModulation(config)
        self.out = Linear(config.dim, config.patch_channels)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the velocity. The model's own time runs from noise at 0 to data at 1000."""
        grid = self.geometry.grid(latents.shape)
        context = self.in_token_order(context, grid, latents.device)
        sharding = context.sharding
        num_tokens, dtype = math.prod(grid), self.out.weight.dtype
        num_filling = -num_tokens % TOKEN_MULTIPLE
        lengths = tuple(filled(length) for length in inputs.text.lengths)
        modulations = modulations_of((*self.grid_refiner, *self.blocks), self.out_modulation)
        rows = rows_of_step("z_image", None, modulations, timestep, self._condition, context)
        tokens = patchify(latents.to(dtype), self.config.patch, channels_first=False)
        x = sharding.shard(self.patch_embedding(tokens))
        x = torch.cat([x, self.grid_filler.expand(len(x), num_filling, -1)], dim=1)
        picture, joint_rotations = cached_for_request(
            "rotations", (grid, lengths), context, lambda: self._rotations(grid, lengths, context)
        )
        layout = TokenLayout(grid, num_suffix_tokens=num_filling, tile=sharding.tile, num_given_tokens=num_filling)
        for block in self.grid_refiner:
            assert isinstance(block, ZImageBlock)
            x = block(x, rows.of(block.modulation), picture, context.with_layout(layout))
        text = cached_for_prompt(
            "text", inputs.text.embeddings, context, lambda: self._text(inputs.text, lengths, context)
        )
        x = torch.cat([x, text], dim=1)
        layout = TokenLayout(
            grid,
            num_suffix_tokens=num_filling + text.shape[1],
            valid_lengths=tuple(num_filling + length for length in lengths),
            tile=sharding.tile,
            num_given_tokens=num_filling,
        )
        joint = context.with_layout(layout)
        first, entering = self.blocks[0], x
        assert isinstance(first, ZImageBlock)

        def run_of(block: nn.Module) -> RunBlock:
            assert isinstance(block, ZImageBlock)
            return overwriting(block, rows.of(block.modulation), joint_rotations, joint)

        def modulated_input() -> ModulatedInput:
            with held_weights(first):
                return first.modulated_input(entering, rows.of(first.modulation))

        (x,) = context.run_blocks(map(run_of, self.blocks), (x,), num_tokens, modulated_input)
        x = x[:, : x.shape[1] - layout.num_suffix_tokens]
        (scale,) = rows.of(self.out_modulation)
        normalized = modulated_norm(x, Norm("layer", self.config.out_eps), scale=scale)
        tokens = sharding.gather(self.out(normalized), num_tokens)
        return unpatchify(tokens, grid, self.config.patch).neg().to(latents.dtype)

    def _condition(self, timestep: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        """Return what modulations take of timesteps [B]: the embedding, [B, conditioning_dim]."""
        embedded: torch.Tensor = self.timestep_embedding(1000.0 - timestep)
        return embedded.to(self.out.weight.dtype)

    def _text(self, text: Conditions, lengths: Sequence[int], context: AttentionContext) -> torch.Tensor:
        """Return the refined tokens [B, L, D] of a text. lengths: of each sample, padding included."""
        num_tokens = max(lengths)
        embeddings = text.embeddings[:, :num_tokens].to(self.out.weight.dtype)
        x: torch.Tensor = self.text_embedding(modulated_norm(embeddings, self.text_norm.as_norm))
        filler = self.text_filler.expand(len(x), num_tokens - x.shape[1], -1)
        x = torch.cat([x, filler], dim=1)
        for sample, length in enumerate(text.lengths):
            x[sample, length:] = self.text_filler
        rotations = self._text_rotations(num_tokens, x.device)
        layout = TokenLayout.text(num_tokens, tuple(lengths))
        for block in self.text_refiner:
            x = block(x, None, rotations, context.with_layout(layout))
        return x

    def _rotations(
        self, grid: tuple[int, int, int], lengths: tuple[int, ...], context: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotations of the picture [B or nothing, S + P, head_dim / 2], and of the picture followed by the
        text. lengths: of each sample's text, padding included."""
        picture = [self._grid_rotations(grid, length, context) for length in lengths]
        text = self._text_rotations(max(lengths), self.out.weight.device)
        return _of_each(picture), _of_each([torch.cat([rotations, text]) for rotations in picture])

    def _text_rotations(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """Return [L, head_dim / 2]: the text is along the first axis, from 1 on."""
        axes = (range(1, num_tokens + 1), range(1), range(1))
        return position_rotations(axes, self.config.axes, device, self.config.theta)

    def _grid_rotations(
        self, grid: tuple[int, int, int], num_text_tokens: int, context: AttentionContext
    ) -> torch.Tensor:
        """Return [S + P, head_dim / 2]: the picture follows its text on the first axis; its padding is not turned."""
        first = num_text_tokens + 1
        axes = (range(first, first + grid[0]), range(grid[1]), range(grid[2]))
        table = position_rotations(axes, self.config.axes, self.out.weight.device, self.config.theta)
        filling = table.new_ones(-math.prod(grid) % TOKEN_MULTIPLE, table.shape[1])
        return torch.cat([context.sharding.shard(table, dim=0), filling])


def filled(num_tokens: int) -> int:
    """Return `num_tokens` with their padding."""
    return num_tokens + -num_tokens % TOKEN_MULTIPLE


def _of_each(rotations: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [tokens, head_dim / 2] of one sample, [B, tokens, head_dim / 2] of several."""
    return rotations[0] if len(rotations) == 1 else torch.stack(list(rotations))
