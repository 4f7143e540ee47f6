"""Ring attention: keys and values circulate among processes, block by block (Liu et al., arXiv:2310.01889;
arXiv:2411.01783).

Every process keeps its queries. The next block of keys and values is transferred while attention to the current one is
computed; the parts are merged by their log-sum-exps (online softmax). Blocks are not padded: padding is removed before
the first one is sent. Every process has the whole text, which is never sent: the process that computes block 0 adds the
text's keys to it, so each key counts once. All processes compute the text's queries, with equal results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.parallel.collectives import RankGroup, start_handover
from diffusion_runtime.parallel.interface import AttentionInputs, Exchange, Run
from diffusion_runtime.parallel.merging import PartialAttention
from diffusion_runtime.parallel.sharding import Slices, around, rows, slices_of


@dataclass(frozen=True)
class RingExchange(Exchange):
    """Ring exchange within `group`. slices_of_block: number of sequence slices that make up one process's block."""

    group: RankGroup
    slices_of_block: int = 1

    splits_heads = False

    @property
    def needs_lse(self) -> bool:
        return self.group.size > 1

    def check(self, num_heads: int, num_kv_heads: int, *, causal: bool) -> None:  # noqa: ARG002
        if causal and self.group.size > 1:
            raise ConfigError(
                "ring attention computes causal attention nowhere yet: its blocks would wait for each other; share "
                "the sequence with ulysses_degree alone"
            )

    def with_every_key(self, num_heads: int) -> Exchange | None:  # noqa: ARG002
        return self if self.group.size == 1 else None

    def describe(self) -> str:
        return f"ring {self.group.size}" if self.group.size > 1 else ""

    def attend(self, inputs: AttentionInputs, run: Run) -> torch.Tensor:
        if self.group.size == 1:
            return run(inputs)[0]
        return self.attend_block(inputs, slices_of(inputs, self.group.size * self.slices_of_block), run)

    def attend_block(self, inputs: AttentionInputs, slices: Slices, run: Run) -> torch.Tensor:
        """`attend` for inputs that hold this process's block of the grid, with or without padding."""
        if inputs.gate is not None:
            raise ConfigError("ring attention has no gated branch: a gate is applied to the whole result, not to parts")
        own, num_local = self.group.index, inputs.q.shape[1]
        lengths = [self._block_length(slices, block) for block in range(self.group.size)]
        q, k, v = (_without_padding(x, slices, lengths[own]) for x in (inputs.q, inputs.k, inputs.v))
        part = inputs._replace(q=q, mask=self._mask_rows(inputs.mask, slices, lengths[own]))
        travelling = _packed(k, v, slices, lengths[own])
        merged, text_parts = PartialAttention(), dict[int, tuple[torch.Tensor, torch.Tensor]]()
        for step in range(self.group.size):
            block = (own - step) % self.group.size
            handover = None
            if step + 1 < self.group.size:
                after = max(1, lengths[(block - 1) % self.group.size])
                handover = start_handover(self.group, travelling, (2, k.shape[0], after, *k.shape[2:]))
            computed = self._attend_keys(part, travelling[:, :, : lengths[block]], k, v, slices, block, run)
            if computed is not None:
                merged.add(*computed)
                if slices.num_text:
                    text_parts[block] = _text_rows(*computed, slices)
            if handover is not None:
                travelling = handover.wait()
        out = merged.result(q)
        if text_parts:
            self._merge_text_in_order(out, text_parts, slices)
        return _with_padding(out, slices, num_local)

    def _block_length(self, slices: Slices, block: int) -> int:
        return slices.num_real(block * self.slices_of_block, self.slices_of_block)

    def _attend_keys(
        self,
        part: AttentionInputs,
        travelling: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slices: Slices,
        block: int,
        run: Run,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """This process's queries on one block; block 0 includes the text. None where there is nothing to compute."""
        with_text = block == 0 and slices.num_text > 0
        length = travelling.shape[2]
        if part.q.shape[1] == 0 or (length == 0 and not with_text):
            return None
        keys, values = travelling.unbind(0)
        if with_text:
            keys, values = (
                around(rows(x, 0, slices.num_prefix), grid, rows(x, x.shape[1] - slices.num_suffix, slices.num_suffix))
                for x, grid in ((k, keys), (v, values))
            )
        layout = None if part.layout is None else part.layout.part(length, with_text=with_text)
        mask = part.mask
        if mask is not None:
            start = slices.num_prefix + block * self.slices_of_block * slices.length
            mask = _columns(mask, slices, start, length, with_text)
        out, lse = run(part._replace(k=keys, v=values, layout=layout, mask=mask))
        assert lse is not None, "a backend that was chosen for its log-sum-exp returned none"
        return out, lse

    def _mask_rows(self, mask: torch.Tensor | None, slices: Slices, length: int) -> torch.Tensor | None:
        """Return the mask rows of this process's queries."""
        if mask is None or mask.shape[2] == 1:
            return mask
        start = slices.num_prefix + self.group.index * self.slices_of_block * slices.length
        return _columns(mask.transpose(2, 3), slices, start, length, with_text=True).transpose(2, 3)

    @staticmethod
    def _merge_text_in_order(
        out: torch.Tensor, parts: dict[int, tuple[torch.Tensor, torch.Tensor]], slices: Slices
    ) -> None:
        """Merge the text rows again in block order, so that the sums round alike on every process."""
        merged = PartialAttention()
        for block in sorted(parts):
            merged.add(*parts[block])
        text = merged.result(next(iter(parts.values()))[0])
        out[:, : slices.num_prefix] = rows(text, 0, slices.num_prefix)
        out[:, out.shape[1] - slices.num_suffix :] = rows(text, slices.num_prefix, slices.num_suffix)


def _packed(k: torch.Tensor, v: torch.Tensor, slices: Slices, length: int) -> torch.Tensor:
    """[2, batch, tokens, kv_heads, head_dim] of a block's grid tokens. An empty block is sent as one token that is
    never read: communicators are set up in the first exchange, which needs all processes."""
    if length == 0:
        return k.new_zeros(2, k.shape[0], 1, *k.shape[2:])
    return torch.stack([rows(x, slices.num_prefix, length) for x in (k, v)])


def _columns(mask: torch.Tensor, slices: Slices, start: int, length: int, with_text: bool) -> torch.Tensor:
    """Columns of a mask over the whole sequence: part of the grid, with or without the text around it."""
    grid = mask.narrow(3, start, length) if length else mask[..., :0]
    if not with_text or not slices.num_text:
        return grid
    return torch.cat([mask[..., : slices.num_prefix], grid, mask[..., mask.shape[3] - slices.num_suffix :]], dim=3)


def _text_rows(out: torch.Tensor, lse: torch.Tensor, slices: Slices) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the text rows of a result, those before the grid first."""
    grid = slice(slices.num_prefix, out.shape[1] - slices.num_suffix)
    return (
        torch.cat([out[:, : grid.start], out[:, grid.stop :]], dim=1),
        torch.cat([lse[:, :, : grid.start], lse[:, :, grid.stop :]], dim=2),
    )


def _without_padding(x: torch.Tensor, slices: Slices, length: int) -> torch.Tensor:
    """x with only the first `length` grid tokens of its block."""
    if x.shape[1] == length + slices.num_text:
        return x
    suffix = rows(x, x.shape[1] - slices.num_suffix, slices.num_suffix)
    return around(rows(x, 0, slices.num_prefix), rows(x, slices.num_prefix, length), suffix)


def _with_padding(out: torch.Tensor, slices: Slices, num_rows: int) -> torch.Tensor:
    """out with zeros after the grid's tokens, num_rows in all."""
    missing = num_rows - out.shape[1]
    if missing == 0:
        return out
    end = out.shape[1] - slices.num_suffix
    zeros = out.new_zeros(out.shape[0], missing, *out.shape[2:])
    return torch.cat([out[:, :end], zeros, out[:, end:]], dim=1)
