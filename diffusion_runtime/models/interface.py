"""What a model family gives the pipeline: a transformer on our attention layers, a latent decoder and its settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.denoising.flow_schedule import FlowSchedule
from diffusion_runtime.denoising.guidance import extrapolate
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.media.audio import Audio
from diffusion_runtime.model_folder import refuse_other_pipelines, refuse_unknown_index_keys
from diffusion_runtime.models.autoencoder import DiffusersComponent
from diffusion_runtime.models.checkpoint import WeightChange
from diffusion_runtime.models.geometry import ClipSize, LatentGeometry
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder


@dataclass(frozen=True)
class ImageCondition:
    """The image that a video starts from, as a transformer takes it.

    latents: [batch, channels, 1, height, width], normalised. embeddings: [batch, tokens, dim] of an image encoder,
    None for models without one.
    """

    latents: torch.Tensor
    embeddings: torch.Tensor | None = None

    def repeat(self, times: int) -> ImageCondition:
        """The same images once more for every guidance branch of a batch."""
        embeddings = None if self.embeddings is None else self.embeddings.repeat(times, 1, 1)
        return ImageCondition(self.latents.repeat(times, 1, 1, 1, 1), embeddings)


@dataclass(frozen=True)
class DenoiserInputs:
    """What a prediction is conditioned on, the same at every step of a request.

    text: the prompts, on the model's device and in its dtype. size: of the clip. guidance: the scale that a model
    distilled from guidance takes as an input, None for others. image: what the video starts from, if anything.
    """

    text: Conditions
    size: ClipSize
    guidance: float | None = None
    image: ImageCondition | None = None


class DiffusionTransformer(nn.Module, ABC):
    """A denoiser whose every attention is one of our layers."""

    geometry: LatentGeometry

    @abstractmethod
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Velocity (noise minus data), in the shape and dtype of `latents`.

        latents: [batch, channels, frames, height, width], or [batch, *geometry.sample_shape] where that is another
        shape. timestep: [batch], in [0, 1000].
        inputs: what the prediction is conditioned on. The same value comes at every step of a request.
        context: step, state and recorder of this forward pass; layouts are made here, from the latents.
        """

    def attention_layers(self) -> Iterator[AttentionLayer]:
        """Every attention layer in the order in which they run, for reports and dry runs."""
        return (module for module in self.modules() if isinstance(module, AttentionLayer))

    def expert_at(self, timestep: float) -> int:
        """Which of its experts predicts at a timestep in [0, 1000]; 0 in models that have one."""
        return 0

    def combine_guidance(self, cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
        """The guided velocity, float32, out of the two branches', as the model's authors combine them."""
        return extrapolate(cond, uncond, scale)

    def settle(self, latents: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        """The clean latents after the last step; models that keep a part of them from an image put it back here."""
        return latents


class LatentDecoder(ABC):
    """Latents to frames, by a library's autoencoder.

    library, implementation: who decodes, for the report of attention that a library runs itself. splits_rows: whether
    it can decode a band of rows, given what lies beyond (layers/spatial_parallel.py), as within the whole.
    """

    splits_rows: ClassVar[bool] = False

    library: str
    implementation: str

    @abstractmethod
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Frames, float32 in [0, 1], [batch, frames, height, width, 3].

        latents: normalised, as the transformer works on them, [batch, channels, frames, height, width].
        """

    def decode_audio(self, latents: torch.Tensor) -> Audio | None:
        """The sound of one sample; None from a decoder that knows pictures alone.

        latents: normalised, [1, channels, length, bins].
        """
        return None


class ImageConditioner(ABC):
    """Makes the condition of image-to-video out of an image; loaded when the first request brings one."""

    @abstractmethod
    def encode(self, image: torch.Tensor, size: ClipSize) -> ImageCondition:
        """image: [height, width, 3], uint8, already of the clip's size. Returns a batch of one."""


class ModelFamily(ABC):
    """One architecture: what its folders hold and how its parts are built.

    name: for messages. transformer_classes: the class names in model_index.json that it loads. pipeline_classes: those
    whose work it does; index_keys: what model_index.json may say beside components. diffusers_components: what classes
    of diffusers compute.
    roles: (role, category) of its attention layers. defaults: request values where neither the request nor the
    folder's generation.json says any. guidance_offset: what is added to its guidance_scale to make it
    the factor of uncond + factor * (cond - uncond).
    """

    name: ClassVar[str]
    transformer_classes: ClassVar[tuple[str, ...]]
    pipeline_classes: ClassVar[tuple[str, ...]]
    index_keys: ClassVar[tuple[str, ...]] = ()
    diffusers_components: ClassVar[tuple[DiffusersComponent, ...]]
    roles: ClassVar[tuple[tuple[str, str], ...]]
    defaults: ClassVar[Mapping[str, Any]]
    # Whether its decoder has LatentDecoder.splits_rows, so that every process needs one.
    decoder_splits_rows: ClassVar[bool] = False
    guidance_offset: ClassVar[float] = 0.0

    def check_settings(self, folder: Path) -> None:
        """Whether everything that the folder's json asks for can be honoured; reads no weight.

        Raises ModelLoadError that names the file and the key.
        """
        refuse_other_pipelines(folder, self.pipeline_classes)
        refuse_unknown_index_keys(folder, self.index_keys)
        for component in self.diffusers_components:
            component.check(folder)

    def transformer_components(self, folder: Path) -> tuple[str, ...]:
        """The components that hold its transformers. Raises ModelLoadError."""
        return ("transformer",)

    def request_defaults(self, folder: Path) -> Mapping[str, Any]:
        """`defaults` as they are for the model in this folder. Raises ModelLoadError."""
        return self.defaults

    def schedule(self, folder: Path, scheduler: SchedulerConfig) -> FlowSchedule:
        """How its noise levels are spaced. Raises ModelLoadError, here for a shift that follows the size."""
        if scheduler.shifts_by_size:
            raise ModelLoadError(
                f"{scheduler.path}: use_dynamic_shifting: expected False for a {self.name} model, got True; this "
                "is not supported"
            )
        return FlowSchedule()

    def embeds_guidance(self, folder: Path) -> bool:
        """Whether the transformer takes the guidance scale as an input: `guidance_scale` is then that, and
        `true_cfg_scale` is the scale of classifier-free guidance. Raises ModelLoadError."""
        return False

    def takes_guidance(self, folder: Path) -> bool:
        """Whether classifier-free guidance can be asked for; not of a model that was distilled to run without, and
        whose authors' pipeline leaves the scale unread. Raises ModelLoadError."""
        return True

    def takes_image(self, folder: Path) -> bool:
        """Whether requests may bring an image that the video starts from. Raises ModelLoadError."""
        return False

    def num_shared_heads(self, folder: Path) -> int | None:
        """The heads of the self-attention that processes can share; None for a family whose transformer does not cut
        its tokens with `context.sharding`. Raises ModelLoadError."""
        return None

    def needs_image(self, folder: Path) -> bool:
        """Whether every request must bring one. Raises ModelLoadError."""
        return False

    def load_image_conditioner(self, folder: Path, device: torch.device, dtype: torch.dtype) -> ImageConditioner:
        """What turns that image into a condition. Raises ModelLoadError."""
        raise ModelLoadError(f"{folder}: {self.name} models do not start from an image; leave out image_path")

    @abstractmethod
    def geometry(self, folder: Path) -> LatentGeometry:
        """From the folder's json alone. Raises ModelLoadError that names the file and the key."""

    @abstractmethod
    def build_transformer(self, folder: Path, policy: AttentionPolicy) -> DiffusionTransformer:
        """The transformer without weights, on the meta device, from the folder's json alone.

        Raises BackendUnavailableError and ConfigError for an attention choice that cannot run, ModelLoadError for a
        config that is broken or asks for something this family does not have.
        """

    @abstractmethod
    def load_text_encoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        """The folder's text encoders as one, ready to run. Raises ModelLoadError."""

    @abstractmethod
    def load_transformer(
        self,
        folder: Path,
        transformer: DiffusionTransformer,
        device: torch.device,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
    ) -> DiffusionTransformer:
        """Read the weights into what `build_transformer` returned: in eval mode, without gradients.

        changes: made to the checkpoint's tensors as they are read, such as a LoRA. Raises ModelLoadError for files that
        are missing, damaged or not this model's, and for changes made for another model.
        """

    @abstractmethod
    def load_decoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> LatentDecoder:
        """The folder's latent decoder, ready to run. Raises ModelLoadError."""
