"""What one attention call needs to know, as one argument."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Self

from diffusion_runtime.attention.state import AttentionState
from diffusion_runtime.attention_report import AttentionRecorder
from diffusion_runtime.parallel.sharding import SequenceSharding
from diffusion_runtime.step_info import StepInfo
from diffusion_runtime.token_layout import TokenLayout


@dataclass(frozen=True)
class AttentionContext:
    """One forward pass of a model, as its attention layers see it.

    layout: where the key tokens sit; None when nothing is padded and no backend asks for a grid.
    step: where in the denoising loop; state: what backends keep during the request; recorder: counts what ran.
    sharding: how the grid's tokens are cut over the processes that share the sequence.
    """

    layout: TokenLayout | None = None
    step: StepInfo = field(default_factory=StepInfo)
    state: AttentionState = field(default_factory=AttentionState)
    recorder: AttentionRecorder = field(default_factory=AttentionRecorder)
    sharding: SequenceSharding = field(default_factory=SequenceSharding)

    def with_layout(self, layout: TokenLayout | None) -> Self:
        """The same forward pass for a call whose keys sit otherwise, such as a cross-attention's."""
        return dataclasses.replace(self, layout=layout)
