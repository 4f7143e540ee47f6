"""GenerationPipeline: what every loaded pipeline does, whether its model is native or diffusers' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from diffusion_runtime.core.progress import OnProgress
from diffusion_runtime.generation.hooks import Hooks
from diffusion_runtime.generation.parts import PipelineParts
from diffusion_runtime.generation.saved_latents import SavedLatents
from diffusion_runtime.media import GeneratedMedia
from diffusion_runtime.media.file_writer import OpenSink
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.request_rules import RequestRules


class GenerationRules(Protocol):
    """Rules of a model about requests: RequestRules of a native one, PassthroughRules of another."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Values of request fields that are not given."""

    @property
    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """Values of request fields by the preset's name."""

    @property
    def makes_sound(self) -> bool | None:
        """True if the model makes more than pictures; None if unknown before it has generated."""

    def resolve(self, request: GenerationRequest, preset: str | None = None) -> GenerationRequest:
        """Return the request with missing values filled in. Raises RequestError for what cannot be made."""

    @property
    def wanted_images(self) -> frozenset[str]:
        """Request fields of images that the model does not do without, or is made for."""

    def is_guided(self, request: GenerationRequest, /) -> bool:
        """Return True if a resolved request runs two branches of guidance."""

    def batch_key(self, request: GenerationRequest, /) -> tuple[tuple[str, Any], ...]:
        """Resolved requests whose keys are equal may be given to one `generate`. Hashable."""


class GenerationPipeline(Protocol):
    """A loaded model. One generation at a time: a second call meanwhile is an error."""

    device: torch.device
    dtype: torch.dtype
    recipe: Mapping[str, Any]
    hooks: Hooks

    @property
    def rules(self) -> GenerationRules: ...

    @property
    def inspectable(self) -> InspectablePipeline | None:
        """Itself, with its parts, where the model is a native one; None for a pipeline of diffusers'."""

    def note_load(self, timings: Mapping[str, float]) -> None:
        """Add seconds of what comes before the first generation, among whose timings they are then: `import`,
        `prepare` (the folder, the choice of attention and its checks, the memory plan), `read` (the weights)."""

    @property
    def load_timings(self) -> dict[str, float]:
        """Timings noted since the last generation."""

    def resolve(self, request: GenerationRequest, preset: str | None = None) -> GenerationRequest:
        """`rules.resolve`."""

    def __call__(
        self, request: GenerationRequest, *, on_progress: OnProgress | None = None, open_sink: OpenSink | None = None
    ) -> GeneratedMedia:
        """Generate one video or image. Raises Cancelled, no DiffusionRuntimeError, if on_progress cancels it."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_progress: OnProgress | None = None,
        open_sink: OpenSink | None = None,
    ) -> list[GeneratedMedia]:
        """Several, in the order of the requests. on_progress: may raise Cancelled for some of them, which the result
        leaves out; Cancelled is raised where none is left. open_sink: takes the frames of each clip without sound
        while it is decoded (media.FileWriter)."""

    def set_loras(self, loras: Sequence[Any]) -> None:
        """Other LoRA files for the generations from here on, instead of those before, without loading the model
        again."""

    @property
    def profile_remarks(self) -> tuple[str, ...]:
        """Remarks for a profile of a generation: how it differs from one without profiling, and what has no name."""

    def close(self) -> None:
        """Give the memory of the model back; a later generation is a PipelineClosedError."""


class InspectablePipeline(GenerationPipeline, Protocol):
    """A loaded native model, whose parts and latents instruments see. mesh: the processes that run it together."""

    parts: PipelineParts
    mesh: ProcessMesh

    @property
    def rules(self) -> RequestRules: ...

    @property
    def transformer(self) -> DiffusionTransformer:
        """The denoiser, on our attention layers."""

    def finish(
        self,
        saved: SavedLatents,
        request: GenerationRequest | None = None,
        *,
        allow_changes: bool = False,
        on_progress: OnProgress | None = None,
        open_sink: OpenSink | None = None,
    ) -> GeneratedMedia:
        """Go on with a request from what its denoising has left, as Pipeline.finish does."""

    def latents(
        self, requests: GenerationRequest | Sequence[GenerationRequest], *, on_progress: OnProgress | None = None
    ) -> torch.Tensor:
        """Return the clean latents of a request, or of a batch that is denoised at once, float32 [batch,
        *sample_shape], without decoding them."""
