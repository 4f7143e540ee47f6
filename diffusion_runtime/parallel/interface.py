"""What an exchange is: it moves parts of q, k, v between processes and calls `run` on what each one holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, TypeVar

if TYPE_CHECKING:
    import torch

# Whatever describes the token layout; an exchange may replace it but this row knows nothing of attention.
Layout = TypeVar("Layout")


class Exchange(ABC):
    """How the processes that share a sequence attend to all of it.

    needs_lse: whether `run` must return the log-sum-exp, as merging partial results takes.
    """

    needs_lse: ClassVar[bool] = False

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Layout,
        run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layout], tuple[torch.Tensor, torch.Tensor | None]],
    ) -> torch.Tensor:
        """q: [batch, local seq_q, heads, head_dim], k and v alike; returns out like q.

        run(q, k, v, layout) computes attention on what it is given and returns (out, lse or None).
        """


class SingleProcess(Exchange):
    """Nothing to exchange: the one process holds the whole sequence."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Layout,
        run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layout], tuple[torch.Tensor, torch.Tensor | None]],
    ) -> torch.Tensor:
        return run(q, k, v, layout)[0]
