"""The Wan-Animate 2 transformer on our attention layers, for inference.

    driving video -> Wan's blocks, once a request, at timestep 1 and with a text of its own -> keys and values
    latents       -> Wan's blocks, at every step; a frame also attends to the driving video's frame of its time

The latents' first frame is the reference image's, which attends to the latents alone. The two videos have positions of
their own: by default the driving video lies to the right of the other, at the same times. The branch of the negative
prompt leaves out one block. Shapes as in wan/transformer.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from diffusion_runtime.attention.cache.reference import ReferenceFrames
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.reference_frames import ReferenceFrameAttention
from diffusion_runtime.core.block_stack import BlockRunner, RunBlock, Streams
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import Extent
from diffusion_runtime.layers.prompt_cache import cached_for_prompt
from diffusion_runtime.layers.rope import position_rotations, split_head_dim
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.models.wan.config import WanTransformerConfig
from diffusion_runtime.models.wan.cross_attention import BlockPlace, CrossKeys, KeysAndValues
from diffusion_runtime.models.wan.transformer import BlockInputs, WanBlock, WanSelfAttention, WanTransformer
from diffusion_runtime.models.wan_animate_2.config import WanAnimate2Config
from diffusion_runtime.text_encoders.interface import Conditions

# Attention of each frame to that of the driving video.
REFERENCE_ROLE = "wan_animate_2.reference"
# The block that the branch of the negative prompt leaves out, in models that have as many.
LEFT_OUT = 9
# The reference image's frame.
NUM_BEFORE = 1


class _SelfAttention(WanSelfAttention):
    def make_attention(self, config: WanTransformerConfig, layer: LayerInfo, policy: AttentionPolicy) -> AttentionLayer:
        return ReferenceFrameAttention(
            config.num_heads, config.head_dim, layer=layer, policy=policy, reference_role=REFERENCE_ROLE
        )


class WanAnimate2Block(WanBlock):
    """A block whose self-attention reads the driving video's keys."""

    self_attention_type = _SelfAttention


class WanAnimate2Transformer(WanTransformer):
    """The whole denoiser.

    inputs.image.latents: [B, condition channels + channels, frames, height, width], next to the latents the condition,
    behind it the latents of the driving video, whose first frame is that of the second one and whose own first frame is
    empty. inputs.image.embeddings: the image encoder's tokens of the reference image, then as many of the driving
    video's first frame. inputs.text.further: the text of the driving video. All samples of a batch have one driving
    video.
    """

    config: WanAnimate2Config

    def make_block(self, place: BlockPlace, policy: AttentionPolicy) -> WanBlock:
        return WanAnimate2Block(self.config, place, policy)

    def in_token_order(self, context: AttentionContext, grid: Extent, device: torch.device) -> AttentionContext:
        """Return the context as it is: frames are found in raster order."""
        return context

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the velocity; the first pass of a request computes the driving video's keys and values before."""
        image = inputs.image
        assert image is not None, "the condition is made of every request"
        own, driving = cached_for_prompt("images", image, context, lambda: self._divided(image))
        context.state.request.get_or_create("reference pass", lambda: self._prefill(driving, inputs, context))
        context = dataclasses.replace(context, reference=ReferenceFrames(is_written=False, num_before=NUM_BEFORE))
        return super().forward(latents, timestep, dataclasses.replace(inputs, image=own), context)

    def _divided(self, image: ImageCondition) -> tuple[ImageCondition, ImageCondition]:
        """Return the condition of the latents, and that of the driving video: its latents, a mask of ones and its
        latents again, of one sample."""
        of_condition = self.config.condition_channels
        own, driving = image.latents[:, :of_condition], image.latents[:1, of_condition:, NUM_BEFORE:]
        known = driving.new_ones(1, of_condition - self.config.num_channels, *driving.shape[2:])
        tokens = [None, None] if image.embeddings is None else list(image.embeddings.chunk(2, dim=1))
        of_driving = None if tokens[1] is None else tokens[1][:1]
        return (
            ImageCondition(own, tokens[0]),
            ImageCondition(torch.cat([known, driving], dim=1), of_driving, further=(driving,)),
        )

    def _prefill(self, driving: ImageCondition, inputs: DenoiserInputs, context: AttentionContext) -> bool:
        """Run the driving video's pass, which leaves its keys and values in the request's cache."""
        (latents,), (text,) = driving.further, inputs.text.further
        given = dataclasses.replace(inputs, text=Conditions.of(text.embeddings[:1], text.lengths[:1]), image=driving)
        # A step cache reuses nothing of this pass at the steps.
        alone = dataclasses.replace(
            context.for_prefill(), reference=ReferenceFrames(is_written=True), block_runner=BlockRunner()
        )
        super().forward(latents, latents.new_ones(1, dtype=torch.float32), given, alone)
        return True

    def run_blocks_of(
        self, block_inputs: BlockInputs, keys: Sequence[CrossKeys], inputs: DenoiserInputs
    ) -> Sequence[RunBlock]:
        runs = list(super().run_blocks_of(block_inputs, keys, inputs))
        branch, reference = block_inputs.grid_context.step.branch, block_inputs.grid_context.reference
        if len(runs) <= LEFT_OUT or reference is None or reference.is_written:
            return runs
        if branch == "uncond":
            runs[LEFT_OUT] = _skip
        elif branch == "both":
            runs[LEFT_OUT] = self._of_first_half(block_inputs, keys[LEFT_OUT])
        return runs

    def _of_first_half(self, block_inputs: BlockInputs, keys: CrossKeys) -> RunBlock:
        """Return the block that is left out as one for the first half of a batch, the conditional branch's."""
        block = self.blocks[LEFT_OUT]

        def run(streams: Streams) -> Streams:
            (x,) = streams
            half = len(x) // 2
            runs = tuple(
                dataclasses.replace(run, embedding=run.embedding[:half], time=run.time[:half])
                for run in block_inputs.runs
            )
            own = CrossKeys(_first(keys.text, half), None if keys.image is None else _first(keys.image, half))
            block(x[:half], dataclasses.replace(block_inputs, runs=runs), own)
            return streams

        return run

    def _rotations(self, grid: tuple[int, int, int], inputs: DenoiserInputs, context: AttentionContext) -> torch.Tensor:
        if context.reference is None or not context.reference.is_written:
            return super()._rotations(grid, inputs, context)
        starts = [
            size if start is None else start for size, start in zip(grid, self.config.reference_start, strict=True)
        ]
        strides = (self.config.reference_stride, 1, 1)
        axes = tuple(
            range(start, start + size * stride, stride)
            for start, size, stride in zip(starts, grid, strides, strict=True)
        )
        device = self.out.weight.device
        return context.sharding.shard(position_rotations(axes, split_head_dim(self.config.head_dim), device), 0)

    def settle(self, latents: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        """Return the frames of the clip, without the reference image's before them."""
        return latents[:, :, NUM_BEFORE:]

    def replay_refusal(self) -> str | None:
        return "the driving video's keys and values, tens of GB, would be copied for the graphs"


def _skip(streams: Streams) -> Streams:
    return streams


def _first(keys: KeysAndValues, count: int) -> KeysAndValues:
    """Return the keys and values of the first samples."""
    return keys[0][:count], keys[1][:count]
