"""Frame cache: the key-value cache as the attention layers of one forward pass see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

from diffusion_runtime.attention.cache.plan import CachePlan
from diffusion_runtime.attention.cache.store import KeyStore, KeyStoreSize, RingStore
from diffusion_runtime.kernels.qk_norm_rope.reference import rotate


@dataclass(frozen=True)
class FrameCache:
    """A plan, and how layers store and rotate their keys.

    plan: what the pass reads and writes. positions: of the frames that keys are rotated by, `absolute` for their places
    in the video, `window` for those among the frames in sight, as LongLive's infinite mode has them. make_store: makes
    the store of a layer when it is first called. uncond_tokens: that stores of the unconditional branch have room for,
    where only the first chunks are guided; None for as many as the others.

    rotations: complex, [tokens, head_dim / 2]; with `absolute` of this process's tokens of the pass, whose queries and
    keys are rotated before the layer; with `window` of all tokens of the pass, and key_rotations [num_keys, head_dim /
    2] of those in sight: keys are stored without positions and rotated where they are read. None until a model's
    with_positions has made them.
    """

    plan: CachePlan
    positions: str = "absolute"
    make_store: Callable[[KeyStoreSize], KeyStore] = RingStore
    rotations: torch.Tensor | None = None
    key_rotations: torch.Tensor | None = None
    uncond_tokens: int | None = None

    def with_rotations(self, rotations: torch.Tensor, keys: torch.Tensor | None = None) -> Self:
        """The same with positions. Stored keys are never rotated again: 200 roundings in bfloat16 put them 6.3 % off,
        one 0.17 %."""
        return dataclasses.replace(self, rotations=rotations, key_rotations=keys)

    def new_store(self, k: torch.Tensor, branch: str = "cond") -> KeyStore:
        """An empty store for a layer of a guidance branch whose keys are like k, [batch, seq, kv_heads, head_dim]."""
        batch, _, num_heads, head_dim = k.shape
        num_tokens = self.plan.capacity
        if branch == "uncond" and self.uncond_tokens is not None:
            num_tokens = self.uncond_tokens
        return self.make_store(KeyStoreSize(batch, num_tokens, num_heads, head_dim, k.dtype, k.device))

    @property
    def reads_as_stored(self) -> bool:
        """Return whether keys are attended to as they are stored: positions are in them."""
        return self.key_rotations is None

    def read(self, store: KeyStore, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q of the pass -> q, and the keys and values in sight, all [batch, tokens, heads, head_dim]; those of the pass
        have been written."""
        keys, values = store.read(self.plan)
        if self.rotations is not None and self.key_rotations is not None:
            q, keys = _rotated(q, self.rotations), _rotated(keys, self.key_rotations)
        return q, keys, values


def _rotated(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """A new tensor: `rotate` overwrites float32."""
    return rotate(x.clone() if x.dtype == torch.float32 else x, rotations)
