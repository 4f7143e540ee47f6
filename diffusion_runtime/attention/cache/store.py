"""Key stores: the keys and values of one layer, written slot by slot and read where they lie."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from diffusion_runtime.attention.cache.copies import put_tokens
from diffusion_runtime.attention.cache.plan import CachePlan
from diffusion_runtime.attention.cache.stored import KeyParts, PageFormat


@dataclass(frozen=True)
class KeyStoreSize:
    """The size of a store: num_tokens keys and values of num_heads heads (those of this process) for each sample of the
    batch, in the order in which they come, in dtype on device."""

    batch: int
    num_tokens: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class KeyStore(ABC):
    """Keys and values of one layer, guidance branch and expert. Its memory is allocated once. copied: what `read` does
    to all that is in sight, in a word of the report; empty where it is read in place."""

    copied: ClassVar[str] = ""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Return the bytes it has allocated."""

    @property
    def num_shared_bytes(self) -> int:
        """Return the bytes it shares with forks, counted whole; 0 for stores that are copied."""
        return 0

    @property
    def num_saturated(self) -> int:
        """Stored numbers so far that were too large for the store's dtype."""
        return 0

    @abstractmethod
    def fork(self) -> Self:
        """Another store with the same keys and values, between two passes; what is written to one is not in the
        other."""

    def release(self) -> None:  # noqa: B027 - most share nothing
        """Give back what forks share; nothing is written to the store or read from it again."""

    @abstractmethod
    def write(self, plan: CachePlan, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put the keys and values of a forward pass, [batch, plan.num_frames * plan.tokens_per_frame, heads, head_dim],
        into their slots, over what is there."""

    @abstractmethod
    def read(self, plan: CachePlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in sight, [batch, plan.num_keys, heads, head_dim] each, in the order of plan.read; they must
        not be written to."""

    def page_format(self, plan: CachePlan) -> PageFormat | None:  # noqa: ARG002
        """Return how the keys in sight are stored, for backends that may read them in place; None where only `read`
        can."""
        return None

    def read_parts(self, plan: CachePlan) -> KeyParts:
        """Return the keys in sight where they are stored, in place of `read` and after `write` of the same pass. Only
        stores with a page_format have it."""
        raise NotImplementedError(f"{type(self).__name__} has no page_format")


class RingStore(KeyStore):
    """One tensor [2, batch, num_tokens, heads, head_dim] in the dtype that comes in. While it fills, and once it is
    full, what is in sight is one run of it, which is read in place."""

    def __init__(self, size: KeyStoreSize) -> None:
        shape = (2, size.batch, size.num_tokens, size.num_heads, size.head_dim)
        self.keys_and_values = torch.zeros(shape, dtype=size.dtype, device=size.device)

    @property
    def num_bytes(self) -> int:
        return self.keys_and_values.nbytes

    def fork(self) -> Self:
        twin = copy.copy(self)
        twin.keys_and_values = self.keys_and_values.clone()
        return twin

    def write(self, plan: CachePlan, k: torch.Tensor, v: torch.Tensor) -> None:
        keys, values = self.keys_and_values
        if plan.write_index is not None:
            put_tokens(keys, plan.write_index, k)
            put_tokens(values, plan.write_index, v)
            return
        for here, cached in plan.write_copies:
            keys[:, cached] = k[:, here]
            values[:, cached] = v[:, here]

    def read(self, plan: CachePlan) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.keys_and_values
        if plan.read_run is not None:
            return keys[:, plan.read_run], values[:, plan.read_run]
        # Of a pass that sees a part of the ring alone, such as a commit under a new prompt.
        runs = [cached for _, cached in plan.read_copies]
        return tuple(torch.cat([x[:, run] for run in runs], dim=1) for x in (keys, values))  # type: ignore[return-value]
