"""Prepared, what `prepare` returns: a model whose attention is decided and whose weights are still on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.generation.interface import GenerationPipeline, GenerationRules
from diffusion_runtime.loading.description import PipelineDescription
from diffusion_runtime.request.generation_request import GenerationRequest

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

    def planned_for(self, requests: Sequence[GenerationRequest]) -> Prepared:
        """The same with the memory plan of resolved requests in its description; of the model's default one where there
        are none.

        Raises DeviceMemoryError where it does not fit, with what would.
        """

    def check_files(self) -> None:
        """Raises ModelLoadError where the weight files of a part are not there, as `load` does; reads none of them, and
        leaves out what `load` would download."""

    def load(self, on_stage: OnStage | None = None, requests: Sequence[GenerationRequest] = ()) -> GenerationPipeline:
        """Read the weights. on_stage: called with a phrase before each part is loaded, and with how far it is, from
        a thread of its own, where that takes long. requests: those that will come, resolved, for which memory is
        planned where it decides what is offloaded; none for the model's default one.

        Raises BackendUnavailableError for an attention choice whose self-check fails here, before any weight is read;
        then ModelLoadError for a folder that cannot be used and DeviceMemoryError when it does not fit.
        """
