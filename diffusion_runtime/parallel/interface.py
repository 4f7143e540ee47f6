"""The interface of an exchange: it moves parts of q, k, v between processes and calls `run` on each process's part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from diffusion_runtime.core.token_layout import TokenLayout

if TYPE_CHECKING:
    import torch

    from diffusion_runtime.core.packed_tokens import PackedTokens


class AttentionInputs(NamedTuple):
    """One attention call, whole or a part of it.

    q: [batch, seq_q, heads, head_dim]; k, v: [batch, seq_k, kv_heads, head_dim]. layout: where the keys of the whole
    sequence sit; None for a grid alone, without padding. gate: as q, or None. mask: [batch or 1, heads or 1, seq_q
    or 1, seq_k] over the whole sequence, or None. first_head: the index of q's first head among all num_heads_total of
    the layer, some of which other processes may hold; None for q's own number. packed: the same q, k and v as rows of
    the blocks that the layer's `token_blocks` named, which no exchange sees.

    On the way into an exchange q, k, v and gate hold this process's tokens: the text before the grid, its slice of the
    grid with the padding of SequenceSharding, the text after the grid.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: TokenLayout | None = None
    gate: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    first_head: int = 0
    num_heads_total: int | None = None
    packed: PackedTokens | None = None


# Attention on the given inputs: (out like q, log-sum-exp or None).
Run = Callable[[AttentionInputs], "tuple[torch.Tensor, torch.Tensor | None]"]


class Exchange(ABC):
    """Method by which the processes that share a sequence compute attention over all of it."""

    @property
    @abstractmethod
    def needs_lse(self) -> bool:
        """True if `run` gets part of the keys at a time, and must return the log-sum-exp that merges the parts."""

    @property
    @abstractmethod
    def splits_heads(self) -> bool:
        """True if `run` gets part of the heads."""

    @abstractmethod
    def check(self, num_heads: int, num_kv_heads: int, *, causal: bool) -> None:
        """Raises ConfigError when a layer with these heads cannot be shared in this way."""

    @abstractmethod
    def with_every_key(self, num_heads: int) -> Exchange | None:
        """Return the exchange for a backend that needs every key, all heads of a process in one call; None without
        one."""

    @abstractmethod
    def describe(self) -> str:
        """Describe how the sequence is shared, for messages; empty when it is not."""

    @abstractmethod
    def attend(self, inputs: AttentionInputs, run: Run) -> torch.Tensor:
        """Attention of this process's queries to all keys, out like q. Raises ConfigError for lengths that do not fit.

        run: called on parts of the inputs; a process with nothing to compute does not call it.
        """


class SingleProcess(Exchange):
    """No exchange: the single process holds the whole sequence."""

    needs_lse = False
    splits_heads = False

    def check(self, num_heads: int, num_kv_heads: int, *, causal: bool) -> None:
        """Refuse nothing."""

    def with_every_key(self, num_heads: int) -> Exchange:  # noqa: ARG002
        return self

    def describe(self) -> str:
        return ""

    def attend(self, inputs: AttentionInputs, run: Run) -> torch.Tensor:
        return run(inputs)[0]
