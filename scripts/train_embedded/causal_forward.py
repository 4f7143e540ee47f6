"""Wan's forward pass with a timestep, a position and a caption per latent frame, and attention that the caller gives.

The modules and the numbers are WanTransformer3DModel's; with one timestep, one caption and full attention it is the
model's own forward (a test proves it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from scripts.train_embedded.attention import rotate

CAPTION_FRAMES = 2
"""Latent frames that share a caption, at most: the smallest chunk. Independent of the chunks of a step, so that one
compiled block serves all."""
ROPE_THETA = 10000.0

Mask = Tensor | BlockMask | None
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(index of the layer, q, k, v), each [B, heads, S, head_dim], q and k rotated -> the same shape as q."""


@dataclass(frozen=True)
class FrameInputs:
    """What is given per latent frame; F frames, of a sequence [clean | noisy] or of one chunk."""

    timestep: Tensor
    """[B, F], 0 to 1000."""
    positions: Tensor
    """[F] int64: where the frame stands in the stream."""
    caption: Tensor
    """[B, F] int64: which of the sample's captions."""


def frame_rotations(positions: Tensor, height: int, width: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [1, F * height * width, 1, head_dim] float32, every angle twice, as Wan's own.

    positions: [F]; height and width in tokens. Angles are computed in float64: positions may be of an hour's stream.
    """
    side = 2 * (head_dim // 6)
    device = positions.device
    rows, columns = (torch.arange(size, device=device, dtype=torch.float64) for size in (height, width))
    grid = torch.meshgrid(positions.double(), rows, columns, indexing="ij")
    angles = []
    for place, dim in zip(grid, (head_dim - 2 * side, side, side), strict=True):
        rates = ROPE_THETA ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
        angles.append(place[..., None] * rates)
    angle = torch.cat(angles, dim=-1).reshape(1, -1, 1, head_dim // 2).repeat_interleave(2, dim=-1)
    return angle.cos().float(), angle.sin().float()


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """[B, heads, S, head_dim] each; a dense mask [S, S], a block mask, or None for full attention."""
    if isinstance(mask, BlockMask):
        out: Tensor = flex_attention(q, k, v, block_mask=mask)
        return out
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1))


def run_block(
    block: WanTransformerBlock,
    x: Tensor,
    modulation: Tensor,
    rotation: tuple[Tensor, Tensor],
    text: Tensor,
    caption: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """x: [B, F * n, D]; modulation: [B, F, 6, D]; text: [B, captions, L, D]; caption: [B, groups of frames]."""
    num_frames = modulation.shape[1]
    rows = (block.scale_shift_table[:, None] + modulation.float()).unsqueeze(3).unbind(2)

    def modulated(norm: torch.nn.Module, shift: Tensor, scale: Tensor) -> Tensor:
        frames = norm(x.float()).unflatten(1, (num_frames, -1))
        return (frames * (1 + scale) + shift).flatten(1, 2).type_as(x)

    def gated(branch: Tensor, gate: Tensor) -> Tensor:
        frames = branch.float().unflatten(1, (num_frames, -1)) * gate
        return (x.float() + frames.flatten(1, 2)).type_as(x)

    own, heads = block.attn1, block.attn1.heads
    hidden = modulated(block.norm1, rows[0], rows[1])
    value = _heads(own.to_v(hidden), heads)
    query, key = (
        rotate(_heads(norm(project(hidden)), heads), *rotation).to(value.dtype)
        for project, norm in ((own.to_q, own.norm_q), (own.to_k, own.norm_k))
    )
    out = attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    x = gated(own.to_out[0](out.transpose(1, 2).flatten(2)), rows[2])

    cross, groups = block.attn2, caption.shape[1]
    query = _heads(cross.norm_q(cross.to_q(block.norm2(x.float()).type_as(x))), heads)
    query = query.unflatten(1, (groups, -1)).flatten(0, 1)
    index = caption[:, :, None, None].expand(-1, -1, text.shape[2], text.shape[3])
    key, value = (
        _heads(projected.gather(1, index).flatten(0, 1), heads)
        for projected in (cross.norm_k(cross.to_k(text)), cross.to_v(text))
    )
    out = F.scaled_dot_product_attention(
        query.to(value.dtype).transpose(1, 2), key.to(value.dtype).transpose(1, 2), value.transpose(1, 2)
    )
    x = x + cross.to_out[0](out.transpose(1, 2).flatten(2).unflatten(0, (-1, groups)).flatten(1, 2))
    return gated(block.ffn(modulated(block.norm3, rows[3], rows[4])), rows[5])


def run_masked_block(
    block: WanTransformerBlock,
    x: Tensor,
    modulation: Tensor,
    rotation: tuple[Tensor, Tensor],
    text: Tensor,
    caption: Tensor,
    mask: Mask,
) -> Tensor:
    """A block under a mask: what is compiled."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return masked_attention(q, k, v, mask)

    return run_block(block, x, modulation, rotation, text, caption, attend)


RunBlock = Callable[..., Tensor]


def causal_forward(
    transformer: WanTransformer3DModel,
    latents: Tensor,
    frames: FrameInputs,
    text: Tensor,
    *,
    mask: Mask = None,
    attend: Attend | None = None,
    run: RunBlock = run_masked_block,
) -> Tensor:
    """The prediction, [B, C, F, h, w] as latents.

    text: [B, captions, L, text_dim]. mask: for the self-attention of all layers; or attend: the self-attention itself,
    which may know keys of earlier chunks. run: `run_masked_block`, or the same compiled.
    """
    batch, _, num_frames, height, width = latents.shape
    _, patch_h, patch_w = transformer.config.patch_size
    tokens = transformer.patch_embedding(latents).flatten(2).transpose(1, 2).contiguous()
    embedded, modulation, text, _ = transformer.condition_embedder(
        frames.timestep.flatten(), text.to(tokens.dtype), None, timestep_seq_len=num_frames
    )
    modulation = modulation.unflatten(2, (6, -1))
    head_dim = transformer.config.attention_head_dim
    rotation = frame_rotations(frames.positions, height // patch_h, width // patch_w, head_dim)
    caption = frames.caption[:, ::CAPTION_FRAMES] if num_frames % CAPTION_FRAMES == 0 else frames.caption
    for index, block in enumerate(transformer.blocks):
        if attend is None:
            tokens = run(block, tokens, modulation, rotation, text, caption, mask)
        else:
            tokens = run_block(
                block, tokens, modulation, rotation, text, caption, lambda q, k, v, i=index: attend(i, q, k, v)
            )
    shift, scale = (transformer.scale_shift_table[:, None] + embedded.float().unsqueeze(2)).chunk(2, dim=2)
    normed = transformer.norm_out(tokens.float()).unflatten(1, (num_frames, -1))
    tokens = transformer.proj_out((normed * (1 + scale) + shift).flatten(1, 2).type_as(tokens))
    pixels = tokens.reshape(batch, num_frames, height // patch_h, width // patch_w, patch_h, patch_w, -1)
    return pixels.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)
