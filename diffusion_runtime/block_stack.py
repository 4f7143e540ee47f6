"""Block stacks: the transformer blocks of one forward pass, and the runner that a step cache puts in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from diffusion_runtime.step_info import StepInfo

# What goes from block to block: the grid's tokens first, [batch, seq, dim], then those of text or sound where these are
# apart from it.
Streams: TypeAlias = tuple[torch.Tensor, ...]
RunBlock: TypeAlias = Callable[[Streams], Streams]


class BlockRunner:
    """Runs every block of a stack. One that keeps anything is made for one request."""

    def run(
        self,
        blocks: Sequence[RunBlock],
        streams: Streams,
        step: StepInfo,  # noqa: ARG002 - of a step cache
        num_grid_tokens: int,  # noqa: ARG002
    ) -> Streams:
        """The streams after the last block. They may be overwritten.

        num_grid_tokens: of this process, without padding: the first tokens of the first stream.
        """
        for block in blocks:
            streams = block(streams)
        return streams


def overwriting(block: Callable[..., Any], *inputs: Any) -> RunBlock:
    """A block that is called with the streams and `inputs`, and overwrites the streams."""

    def run(streams: Streams) -> Streams:
        block(*streams, *inputs)
        return streams

    return run


def then_joined(blocks: Sequence[RunBlock]) -> list[RunBlock]:
    """The blocks, the last of which leaves all streams as one sequence."""

    def joined(streams: Streams) -> Streams:
        for block in blocks[-1:]:
            streams = block(streams)
        return (torch.cat(streams, dim=1),)

    return [*blocks[:-1], joined]
