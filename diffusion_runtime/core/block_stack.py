"""Block stacks: the transformer blocks of one forward pass, and the runner that a step cache puts in its place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from diffusion_runtime.core.step_info import StepInfo

# What goes from block to block: the grid's tokens first, [batch, seq, dim], then those of text or sound where these are
# apart from it.
Streams: TypeAlias = tuple[torch.Tensor, ...]
RunBlock: TypeAlias = Callable[[Streams], Streams]


@dataclass(frozen=True)
class ModulatedInput:
    """Input that TeaCache (arXiv:2411.19108) compares from step to step, to estimate the change of the output.

    values: the grid's tokens after the norm, shift and scale of the first block, [batch, seq, dim] as in the first
    stream; of a model whose timestep is compared alone (Wan), its embedding, [batch, 1, dim]. projection: there, what
    is made of it for the blocks, [batch, 1, dim].
    """

    values: torch.Tensor
    projection: torch.Tensor | None = None


MakeModulatedInput: TypeAlias = Callable[[], ModulatedInput]


class BlockRunner:
    """Runs every block of a stack. One that keeps anything is made for one request."""

    def run(
        self,
        blocks: Sequence[RunBlock],
        streams: Streams,
        step: StepInfo,  # noqa: ARG002 - of a step cache
        num_grid_tokens: int,  # noqa: ARG002
        modulated_input: MakeModulatedInput | None = None,  # noqa: ARG002
    ) -> Streams:
        """Run the blocks and return the streams after the last one. They may be overwritten.

        num_grid_tokens: of this process, without padding: the first tokens of the first stream. modulated_input:
        computes what TeaCache compares, from the streams as they enter.
        """
        for block in blocks:
            streams = block(streams)
        return streams


def overwriting(block: Callable[..., Any], *inputs: Any) -> RunBlock:
    """Return a block that is called with the streams and `inputs`, and overwrites the streams."""

    def run(streams: Streams) -> Streams:
        block(*streams, *inputs)
        return streams

    return run


def without(blocks: Sequence[RunBlock], skipped: Collection[int]) -> list[RunBlock]:
    """Return the blocks, some of which leave the streams as they are. skipped: their indices."""
    return [_passing(block) if index in skipped else block for index, block in enumerate(blocks)]


def _passing(block: RunBlock) -> RunBlock:
    join: RunBlock | None = getattr(block, _JOIN, None)
    return (lambda streams: streams) if join is None else join


# The attribute of a RunBlock behind which the streams are one: joins them without the block.
_JOIN = "join"


def then_joined(blocks: Sequence[RunBlock]) -> list[RunBlock]:
    """Return the blocks, the last of which leaves all streams as one sequence."""

    def join(streams: Streams) -> Streams:
        return (torch.cat(streams, dim=1),)

    def joined(streams: Streams) -> Streams:
        for block in blocks[-1:]:
            streams = block(streams)
        return join(streams)

    setattr(joined, _JOIN, join)
    return [*blocks[:-1], joined]
