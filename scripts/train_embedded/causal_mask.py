"""The block-causal attention mask of teacher forcing: noisy chunks see the clean chunks before them, and themselves.

A sequence is [clean frames | noisy frames], each a latent frame of n tokens. Of the past a chunk sees the first `sink`
frames and the newest that fit into `span` together with itself, as the key-value cache keeps them when generating.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

BLOCK_SIZE = 128


@dataclass(frozen=True)
class ChunkMask:
    """num_frames: latent frames of a clip; chunk: of a chunk; span: in sight of a chunk, itself and the sink included,
    None for all; sink: first frames that stay in sight."""

    num_frames: int
    chunk: int
    span: int | None = None
    sink: int = 0

    def __post_init__(self) -> None:
        if self.num_frames % self.chunk:
            raise ValueError(f"{self.num_frames} frames are no whole number of chunks of {self.chunk}")
        if self.span is not None and self.span < self.sink + self.chunk:
            raise ValueError(f"span {self.span} is smaller than sink {self.sink} plus chunk {self.chunk}")

    @property
    def num_chunks(self) -> int:
        return self.num_frames // self.chunk

    def frames(self) -> Tensor:
        """[2 * num_frames, 2 * num_frames] bool, queries by keys: True where a frame sees another."""
        frame = torch.arange(self.num_frames)
        first = frame // self.chunk * self.chunk
        oldest = torch.zeros_like(first) if self.span is None else first + self.chunk - (self.span - self.sink)
        past = frame[None] < first[:, None]
        past &= (frame[None] < self.sink) | (frame[None] >= oldest[:, None])
        own = first[None] == first[:, None]
        nothing = torch.zeros_like(own)
        return torch.cat([torch.cat([past | own, nothing], dim=1), torch.cat([past, own], dim=1)])

    def tokens(self, tokens_per_frame: int) -> Tensor:
        """The same for every token, [S, S] bool with S = 2 * num_frames * tokens_per_frame."""
        return self.frames().repeat_interleave(tokens_per_frame, 0).repeat_interleave(tokens_per_frame, 1)


@lru_cache(maxsize=64)
def dense_mask(mask: ChunkMask, tokens_per_frame: int, device: str) -> Tensor:
    """[S, S] bool on a device, kept: for scaled_dot_product_attention."""
    return mask.tokens(tokens_per_frame).to(device)


@lru_cache(maxsize=64)
def block_mask(mask: ChunkMask, tokens_per_frame: int, device: str) -> BlockMask:
    """The same as a block mask of FlexAttention, kept."""
    frames = mask.frames().to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001 (the signature)
        return frames[query // tokens_per_frame, key // tokens_per_frame]

    length = 2 * mask.num_frames * tokens_per_frame
    return create_block_mask(sees, None, None, length, length, device=device, BLOCK_SIZE=BLOCK_SIZE)
