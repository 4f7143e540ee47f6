"""USP (unified sequence parallel): heads shared within Ulysses groups, blocks of keys within rings (Fang and Zhao,
arXiv:2405.07719)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.parallel.interface import AttentionInputs, Exchange, Run
from diffusion_runtime.parallel.ring import RingExchange
from diffusion_runtime.parallel.sharding import slices_of
from diffusion_runtime.parallel.ulysses import UlyssesExchange


@dataclass(frozen=True)
class USPExchange(Exchange):
    """All-to-alls along the mesh's Ulysses axis, around ring steps along its ring axis.

    A backend that needs every key gets Ulysses over all processes that share the sequence instead, when the mesh has an
    Ulysses axis and there are enough heads: a ring gives it only part of the keys at a time.
    """

    mesh: ProcessMesh
    num_head_groups: int = 1

    @property
    def _ulysses(self) -> UlyssesExchange:
        ring = self.mesh.ring
        return UlyssesExchange(self.mesh.ulysses, self.num_head_groups, ring.index, ring.size)

    @property
    def _ring(self) -> RingExchange:
        return RingExchange(self.mesh.ring, self.mesh.ulysses.size)

    @property
    def needs_lse(self) -> bool:
        return self._ring.needs_lse

    @property
    def splits_heads(self) -> bool:
        return self._ulysses.splits_heads

    def check(self, num_heads: int, num_kv_heads: int, *, causal: bool) -> None:
        self._ulysses.check(num_heads, num_kv_heads, causal=causal)
        self._ring.check(num_heads, num_kv_heads, causal=causal)

    def with_every_key(self, num_heads: int) -> Exchange | None:
        if self.mesh.ring.size == 1:
            return self._ulysses.with_every_key(num_heads)
        if self.mesh.ulysses.size == 1 or self.mesh.sequence.size > num_heads:
            return None
        return UlyssesExchange(self.mesh.sequence)

    def describe(self) -> str:
        return " x ".join(part for part in (self._ulysses.describe(), self._ring.describe()) if part)

    def attend(self, inputs: AttentionInputs, run: Run) -> torch.Tensor:
        if self.mesh.ring.size == 1:
            return self._ulysses.attend(inputs, run)
        if self.mesh.ulysses.size == 1:
            return self._ring.attend(inputs, run)
        slices = slices_of(inputs, self.mesh.sequence.size)
        ring = self._ring
        return self._ulysses.attend(inputs, lambda part: (ring.attend_block(part, slices, run), None))
