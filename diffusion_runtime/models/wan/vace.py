"""Wan VACE (arXiv:2503.07598): a Wan transformer with control blocks, which read a control video, a mask of its
regenerated part, and reference images.

    control -> patches -> projection, + the grid's tokens -> c
    at some blocks:  c = control block(c);  x = block(x);  x += scale * hint(c)

The reference images are latent frames before those of the clip, in the control and in the latents; they are denoised
with it and left out at the end. Shapes as in transformer.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import RunBlock, Streams
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.layers.embeddings import PatchEmbedding
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.models.wan.config import WanTransformerConfig
from diffusion_runtime.models.wan.cross_attention import BlockPlace, CrossKeys
from diffusion_runtime.models.wan.transformer import BlockInputs, WanBlock, WanTransformer

# Attention in the control blocks: among the control's tokens, and to the text.
CONTROL_SELF_ROLE, CONTROL_TEXT_ROLE = "wan.control_self", "wan.control_cross"


class WanControlledBlock(WanBlock):
    """A block with a control block. hint: map of the control's tokens to their addition to the grid's."""

    def __init__(self, config: WanTransformerConfig, place: BlockPlace, policy: AttentionPolicy) -> None:
        super().__init__(config, place, policy)
        layers = config.control_layers
        number = layers.index(place.index)
        self.control = WanBlock(
            config,
            BlockPlace(number, len(layers), f"{place.path}.control", CONTROL_SELF_ROLE, CONTROL_TEXT_ROLE),
            policy,
        )
        self.hint = Linear(config.dim, config.dim)

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        control: torch.Tensor,
        inputs: BlockInputs,
        keys: CrossKeys,
        control_keys: CrossKeys,
        scale: torch.Tensor,
    ) -> torch.Tensor:
        """Run both blocks. x, control: [B, S, D], both overwritten; x is returned. scale: of the hint, a number."""
        self.control(control, inputs, control_keys)
        WanBlock.forward(self, x, inputs, keys)
        return x.add_(self.hint(control) * scale)


class WanVaceTransformer(WanTransformer):
    """Wan transformer with control blocks. inputs.image.latents: the control [B, control channels, frames, height,
    width], of as many frames as the latents. inputs.request.conditioning_scale: one number for all hints, or one for
    each; None is 1."""

    def __init__(
        self, config: WanTransformerConfig, geometry: LatentGeometry, policy: AttentionPolicy, *, prefix: str = ""
    ) -> None:
        super().__init__(config, geometry, policy, prefix=prefix)
        self.control_embedding = PatchEmbedding(config.control_channels, config.dim, config.patch)
        self.control_in = Linear(config.dim, config.dim)

    def make_block(self, place: BlockPlace, policy: AttentionPolicy) -> WanBlock:
        made = WanControlledBlock if place.index in self.config.control_layers else WanBlock
        return made(self.config, place, policy)

    def image_of(self, inputs: DenoiserInputs) -> ImageCondition | None:
        """Return None: no image is in the latents or next to them."""
        return None

    def streams(self, x: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext) -> Streams:
        """Return the grid's tokens, and the control's."""
        assert inputs.image is not None, "the control is made of every request"
        control = self.control_embedding(inputs.image.latents.to(x.device, x.dtype))
        return x, self.control_in(context.sharding.shard(control)).add_(x)

    def run_blocks_of(
        self, block_inputs: BlockInputs, keys: Sequence[CrossKeys], inputs: DenoiserInputs
    ) -> Sequence[RunBlock]:
        of_control = iter(zip(keys[self.num_blocks :], self._scales(inputs), strict=True))

        def bound(block: WanBlock, own: CrossKeys) -> RunBlock:
            of_hint = next(of_control) if isinstance(block, WanControlledBlock) else None

            def run(streams: Streams) -> Streams:
                x, control = streams
                if of_hint is None:
                    block(x, block_inputs, own)
                else:
                    block(x, control, block_inputs, own, of_hint[0], x.new_full((), of_hint[1]))
                return streams

            return run

        return [bound(block, own) for block, own in zip(self._blocks(), keys, strict=False)]

    def text_blocks(self) -> Sequence[WanBlock]:
        """Return the blocks, then the control blocks."""
        blocks = tuple(self._blocks())
        return *blocks, *(block.control for block in blocks if isinstance(block, WanControlledBlock))

    def settle(self, latents: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        """Return the frames of the clip, without those of the reference images before them."""
        return latents[:, :, -self.geometry.sample_shape(inputs.size)[1] :]

    def _scales(self, inputs: DenoiserInputs) -> Sequence[float]:
        given = inputs.request.conditioning_scale
        return (
            given if isinstance(given, tuple) else (1.0 if given is None else given,) * len(self.config.control_layers)
        )
