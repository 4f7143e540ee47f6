"""Prepared, what `prepare` returns: a model whose attention is decided and whose weights are still on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.generation.interface import GenerationPipeline, GenerationRules
from diffusion_runtime.loading.description import PipelineDescription
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.request_rules import RequestRules
from diffusion_runtime.weights.lora.binding import Lora
from diffusion_runtime.weights.quantization import Quantization

OnStage = Callable[[str], None]


class Prepared(Protocol):
    """A model whose attention is decided and whose weights are still on disk."""

    @property
    def description(self) -> PipelineDescription:
        """The parts that `load` puts together, as far as they are known without weights and self-checks."""

    @property
    def rules(self) -> GenerationRules:
        """The model's rules for requests."""

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """Its attention layers in the order in which they run; empty where they are known once weights are loaded."""

    @property
    def inspectable(self) -> InspectableModel | None:
        """Itself, with its parts, where the model is a native one; None for a pipeline of diffusers', whose parts are
        known once weights are loaded."""

    def planned_for(self, requests: Sequence[GenerationRequest]) -> Prepared:
        """The same with the memory plan of resolved requests in its description; of the model's default one where there
        are none.

        Raises DeviceMemoryError where it does not fit, with what would.
        """

    def planned_to_load(self, requests: Sequence[GenerationRequest]) -> Prepared:
        """The same with the plan that `load` makes where it needs one, and what that decides; itself where none is
        needed. Every process of a run calls it. Raises what `planned_for` raises."""

    def for_these_alone(self, requests: Sequence[GenerationRequest]) -> Prepared:
        """The same for resolved requests that are all it will ever be given: weights that none of them uses are neither
        planned for nor read, such as those of the other one of two experts."""

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


class InspectableModel(Prepared, Protocol):
    """A native model, whose parts are there without weights."""

    @property
    def rules(self) -> RequestRules: ...

    @property
    def model(self) -> Model[Any, Any]:
        """Its folder, opened."""

    @property
    def transformer(self) -> DiffusionTransformer:
        """The denoiser, on the meta device."""

    @property
    def loras(self) -> Sequence[Lora]:
        """Its LoRA files, read."""

    @property
    def quantization(self) -> Quantization:
        """The quantisation of its linear layers, as far as the config asks for it."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def mesh(self) -> ProcessMesh:
        """The processes of one generation."""

    def load(self, on_stage: OnStage | None = None, requests: Sequence[GenerationRequest] = ()) -> Pipeline:
        """Read the weights, as Prepared.load does."""
