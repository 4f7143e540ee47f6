"""One process per GPU: the same weights and the same steps everywhere, other data, averaged gradients, one clock.

`torchrun --standalone --nproc-per-node N -m ...` starts the processes; without it there is one, and nothing is sent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(seconds=300)
"""How long a process waits for the others before it fails."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together. Every method that sends must be called by all of them."""

    rank: int
    count: int
    device: str
    """ "cuda" is this process's own GPU."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes the log and the weights."""
        return self.rank == 0

    def seed(self, seed: int) -> int:
        """A seed of this process's own; on the first it is `seed`."""
        return seed + 1_000_003 * self.rank

    def agree(self, value: float) -> float:
        """The first process's value."""
        if self.count == 1:
            return value
        # The exchange needs the device; float64 is the number that Python has.
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, src=0)
        return float(shared.item())

    @torch.no_grad()
    def align(self, tensors: Sequence[Tensor]) -> float:
        """Give all processes the first one's tensors; returns how far apart they were, at most, on any of them.

        Equal gradients keep the weights equal; this makes sure of it, and the figure in the log shows it.
        """
        if self.count == 1:
            return 0.0
        held = torch.cat([tensor.detach().float().flatten() for tensor in tensors])
        sent = held.clone()
        dist.broadcast(sent, src=0)
        apart = (held - sent).abs().amax()
        dist.all_reduce(apart, op=dist.ReduceOp.MAX)
        for tensor, part in zip(tensors, sent.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))
        return float(apart.item())

    def leave(self) -> None:
        """Close the connections; call it at the end of a run that went well, after everything was written.

        On GPUs this ends the process: torch's own end did not return within 30 s on two H200s (NCCL, torch 2.11), and
        the launcher waited for it until it was killed.
        """
        if self.count == 1:
            return
        if self.device == "cuda":
            dist.barrier()
            sys.stdout.flush()
            os._exit(0)
        dist.destroy_process_group()


def join_ranks() -> Ranks:
    """Join the processes that torchrun started: NCCL between GPUs, gloo between CPUs."""
    count, rank, local = (int(os.environ.get(name, default)) for name, default in _TORCHRUN.items())
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local)
    if count > 1:
        # NVLink multicast gains nothing on 28 MB, and not every host allows it.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        dist.init_process_group(
            "nccl" if cuda else "gloo", timeout=TIMEOUT, device_id=torch.device("cuda", local) if cuda else None
        )
    return Ranks(rank, count, "cuda" if cuda else "cpu")


_TORCHRUN = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}


class GradientAverage:
    """Averages gradients over the processes by one all-reduce of a flat float32 buffer that is made once."""

    def __init__(self, parameters: Sequence[Tensor], ranks: Ranks) -> None:
        self._parameters, self._ranks = list(parameters), ranks
        sizes = [parameter.numel() for parameter in self._parameters]
        length = sum(sizes) if ranks.count > 1 else 0
        self._buffer = torch.zeros(length, device=ranks.device)
        self._views = (
            [part.view_as(one) for part, one in zip(self._buffer.split(sizes), self._parameters, strict=True)]
            if length
            else []
        )

    @torch.no_grad()
    def __call__(self) -> None:
        """Replace every gradient by its mean; a parameter without one must be without it on all processes."""
        if self._ranks.count == 1:
            return
        gradients, views = [], []
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not None:
                gradients.append(parameter.grad)
                views.append(view)
        torch._foreach_copy_(views, gradients)
        dist.all_reduce(self._buffer)
        self._buffer.div_(self._ranks.count)
        torch._foreach_copy_(gradients, views)
