"""Prepared, what `prepare` returns: a model whose attention is decided and whose weights are still on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.description import PipelineDescription
from diffusion_runtime.generation_pipeline import GenerationPipeline, GenerationRules

OnStage = Callable[[str], None]


class Prepared(Protocol):
    """A model whose attention is decided and whose weights are still on disk."""

    @property
    def description(self) -> PipelineDescription:
        """What `load` puts together, as far as it is known without weights and self-checks."""

    @property
    def rules(self) -> GenerationRules:
        """What the model says about requests."""

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """Its attention layers in the order in which they run; empty where they are known once weights are loaded."""

    def load(self, on_stage: OnStage | None = None) -> GenerationPipeline:
        """Read the weights. on_stage: called with a phrase before each part is loaded.

        Raises BackendUnavailableError for an attention choice whose self-check fails here, before any weight is read;
        then ModelLoadError for a folder that cannot be used and DeviceMemoryError when it does not fit.
        """
