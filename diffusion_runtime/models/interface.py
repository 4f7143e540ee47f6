"""The parts a model gives the pipeline: a transformer on our attention layers, an image encoder."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import nn

from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.normalized_guidance import NormalizedGuidance
from diffusion_runtime.attention.token_order import in_shared_order
from diffusion_runtime.core.latent_geometry import ClipSize, LatentGeometry
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.core.token_layout import Extent
from diffusion_runtime.denoising.guidance import RequestGuidance, extrapolate, rescaled, with_guidance
from diffusion_runtime.denoising.interface import Predict
from diffusion_runtime.denoising.segments import Segment
from diffusion_runtime.media.images import open_picture, read_image
from diffusion_runtime.parallel.sharding import SequenceSharding
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.request.generation_request import INPUT_FIELDS, REQUEST_FIELDS, GenerationRequest, image_paths
from diffusion_runtime.text_encoders.interface import Conditions

# For inputs that no pipeline made: a transformer run on its own.
_PLAIN_REQUEST = GenerationRequest("(no request)")


@dataclass(frozen=True)
class GivenMedia:
    """A reference as tokens of its own size: an image, a video or a sound. pictures: normalised latents, [batch,
    channels, frames, height, width], None for a sound; sound: [batch, channels, length, sides], None without one."""

    pictures: torch.Tensor | None = None
    sound: torch.Tensor | None = None

    def repeat(self, times: int) -> GivenMedia:
        """Return the reference repeated for every sample of a batch."""
        pictures, sound = self.pictures, self.sound
        return GivenMedia(
            None if pictures is None else pictures.repeat(times, 1, 1, 1, 1),
            None if sound is None else sound.repeat(times, 1, 1, 1),
        )


@dataclass(frozen=True)
class ImageCondition:
    """The images that a video starts from, and may end with, as a transformer takes them.

    latents: the first latent frame, [batch, channels, 1, height, width], normalised; in models that take a condition of
    every frame next to the latents or in control blocks, [batch, condition channels, frames, height, width].
    embeddings: [batch, tokens, dim] of an image encoder, None for models without one.

    sound: in models that make pictures and sound, the normalised latents of a given one, [batch, channels, length,
    bins]; latents has 0 frames where there is no image with it.

    In models that take images at any frame, latents are the one at the first, with its strength in first_strength, and
    further those at others, [batch, channels, 1, height, width], with each one's frame of the video and its strength in
    places, those of strength 1 first. Strength 1 keeps an image as it is; 0 leaves its place to the noise. The last
    num_generated of them, of strength 0, are no images but keyframes that the model makes.

    In models for editing, latents are those of the first reference image, [batch, channels, 1, height, width] of its
    own size, and further those of the others.

    In models with references of several kinds, media are these in the order of the request, and latents has 0 frames.
    """

    latents: torch.Tensor
    embeddings: torch.Tensor | None = None
    further: tuple[torch.Tensor, ...] = ()
    sound: torch.Tensor | None = None
    places: tuple[tuple[int, float], ...] = ()
    first_strength: float = 1.0
    media: tuple[GivenMedia, ...] = ()
    num_generated: int = 0

    def repeat(self, times: int) -> ImageCondition:
        """Return the images repeated for every guidance branch of a batch."""
        latents, *further = (each.repeat(times, 1, 1, 1, 1) for each in self.references)
        return dataclasses.replace(
            self,
            latents=latents,
            embeddings=None if self.embeddings is None else self.embeddings.repeat(times, 1, 1),
            further=tuple(further),
            sound=None if self.sound is None else self.sound.repeat(times, 1, 1, 1),
            media=tuple(each.repeat(times) for each in self.media),
        )

    @property
    def references(self) -> tuple[torch.Tensor, ...]:
        """Latents of every reference image, in their order."""
        return (self.latents, *self.further)


@dataclass(frozen=True)
class DenoiserInputs:
    """Conditions of a prediction, the same at every step of a request.

    text: the prompts, on the model's device and in its dtype. size: of the clip. guidance: the scale that a model
    distilled from guidance takes as an input, None for others. image: the images or sound that the video starts from,
    if any. request: the values that the requests of the batch share, resolved; its prompt, negative prompt and seed are
    those of the first one. prompt: the conditional branch's text in every branch, in models whose ControlNet reads it
    there. attention_guidance: of a pass whose text is that of all samples, then their negative texts; None without.
    """

    text: Conditions
    size: ClipSize
    guidance: float | None = None
    image: ImageCondition | None = None
    request: GenerationRequest = _PLAIN_REQUEST
    prompt: Conditions | None = None
    attention_guidance: NormalizedGuidance | None = None


class DiffusionTransformer(nn.Module, ABC):
    """A denoiser whose every attention is one of our layers."""

    geometry: LatentGeometry
    # Whether it reads the timestep that a step leads to, and that for its modulation rows alone (rows_of_step).
    rows_take_next: bool = False
    # Whether tokens attend to the text as keys and never otherwise: a pass may have more texts than samples.
    text_is_keys: bool = False

    @abstractmethod
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the velocity (noise minus data), in the shape and dtype of `latents`.

        latents: [batch, channels, frames, height, width], or [batch, *geometry.sample_shape] where that is another
        shape. timestep: [batch], in [0, 1000]. inputs: conditions of the prediction. The same value comes at every step
        of a request. context: step, state and recorder of this forward pass; layouts are made here, from the latents,
        in the order of `in_token_order`. Blocks run through `context.run_blocks`, so that a step cache can skip some,
        with the ModulatedInput of the first.
        """

    @property
    def text_roles(self) -> frozenset[str]:
        """Roles of the attention in which a picture's or a sound's tokens meet the prompt."""
        return frozenset({"cross" if self.text_is_keys else "self"})

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Number of blocks that a forward pass gives to `context.run_blocks`."""

    def attention_layers(self) -> Iterator[AttentionLayer]:
        """Yield every attention layer in the order in which they run, for reports and dry runs."""
        return (module for module in self.modules() if isinstance(module, AttentionLayer))

    def in_token_order(self, context: AttentionContext, grid: Extent, device: torch.device) -> AttentionContext:
        """Return the context as all blocks see it, made before the grid's tokens are: where all attention layers
        compute in one order, `context.sharding` brings tokens into it and back, and names it for their layout."""
        return in_shared_order(context, self.attention_layers(), grid, device)

    def with_positions(
        self,
        cache: FrameCache,
        shape: Sequence[int],
        sharding: SequenceSharding,
        expert: int = 0,
    ) -> FrameCache:
        """Return the cache of a forward pass with the rotary positions of its frames, made before the pass, as a CUDA
        graph reads them; in models that make videos chunk by chunk. shape: of the latents of the pass."""
        return cache

    def expert_at(self, timestep: float) -> int:
        """Return the expert that predicts at a timestep in [0, 1000]; 0 in models that have one."""
        return 0

    def read_inputs(self, inputs: DenoiserInputs) -> DenoiserInputs:
        """Return the inputs without the values that no forward pass reads: passes whose other inputs are equal, except
        for the numbers in their tensors, can be replayed from one CUDA graph."""
        text = dataclasses.replace(inputs.text, unknown_words=(), num_cut_tokens=(), encoder=None, further_cuts=())
        # Of a request, transformers read the fields that not every model uses; of an image, its latents.
        own = {name for name, declared in REQUEST_FIELDS.items() if declared.refusal is not None} - set(INPUT_FIELDS)
        values = {name: getattr(inputs.request, name) for name in own}
        request = dataclasses.replace(_PLAIN_REQUEST, **values)
        return dataclasses.replace(inputs, text=text, request=request)

    def replay_refusal(self) -> str | None:
        """Return why its forward passes cannot be replayed from a CUDA graph; None where they can: those that read
        nothing of a step but its timestep tensor, branch and expert, and what attention reads."""
        return None

    def guided(self, predict: Predict, guidance: RequestGuidance, inputs: DenoiserInputs) -> Predict:
        """Return the guidance of a batch around a prediction that reads `step.branch`; models with a guidance of their
        own make it here. inputs: of the conditional branch."""
        combine = rescaled(self.combine_guidance, inputs.request.guidance_rescale or 0.0)
        others = guidance.branches, guidance.wrappers, guidance.skip
        return with_guidance(predict, guidance.scale, guidance.mode, combine, *others)

    def combine_guidance(self, cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the guided velocity, float32, out of the two branches', as the model's authors combine them."""
        return extrapolate(cond, uncond, scale)

    def start(self, noise: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        """Return the initial latents; models trained with a trace of the image in the noise mix it in here."""
        return noise

    def begin_again(self, clean: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        """Return clean latents of the clip as they are noised, for another stage or to start from; models whose images
        are denoised with the clip put them in here. inputs: of that stage, whose sizes the latents have."""
        return clean

    def estimate(
        self, latents: torch.Tensor, velocity: torch.Tensor, step: StepInfo, inputs: DenoiserInputs
    ) -> torch.Tensor:
        """Return the clean latents that a guided velocity leads to, before `settle`; models whose parts have noise
        levels of their own take each part's here. latents: of the step, float32 or wider."""
        assert step.sigma is not None
        return latents - step.sigma * velocity.to(latents.dtype)

    def settle(self, latents: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        """Return clean latents after the last step, of the clip and of what was denoised with it. Models that keep
        parts of an image restore them here."""
        return latents


class ImageConditioner(ABC):
    """Source of a model's condition from images; loaded when the first request brings one."""

    def fast(self) -> ImageConditioner:
        """Return the same in its quickest mode, whose latents differ by rounding; itself where it has none."""
        return self

    def in_tiles(self, choice: str) -> ImageConditioner:
        """Return the same, encoding in the tiles that LatentDecoder.in_tiles decodes in; itself where it has none."""
        return self

    @property
    def libraries(self) -> tuple[LibraryAttention, ...]:
        """Libraries that compute it, for the report of attention that a library runs itself."""
        return ()

    def of_segment(self, segment: Segment, before: torch.Tensor | None) -> ImageConditioner:
        """Return the conditioner of one segment of a video, in a model that makes longer ones in segments; called on
        that of the segment before. before: the frames that it begins with, [3, frames, height, width] in [-1, 1]; None
        for the first segment, and for those of the blended kind. A model that begins a clip with an image is given the
        last of them as the image of the segment's request."""
        return self

    @abstractmethod
    def condition(self, request: GenerationRequest, size: ClipSize) -> ImageCondition:
        """Return the condition from the images of a resolved request, which its rules have seen, as a batch of one. It
        depends on neither its prompts nor its seed: a request with the same inputs has the same. size: of the clip."""


class FrameConditioner(ImageConditioner):
    """Conditioner of image-to-video models: images that are frames of the clip."""

    def condition(self, request: GenerationRequest, size: ClipSize) -> ImageCondition:
        paths = [path for name in ("image_path", "last_image_path") for path in image_paths(request, name)]
        opened = (numpy.array(open_picture(path), dtype=numpy.uint8) for path in paths)
        pictures: Iterator[torch.Tensor] = map(torch.from_numpy, opened)
        pixels = [torch.from_numpy(read_image(path, size.height, size.width)) for path in paths]
        condition = self.encode(pixels[0], size, *pixels[1:])
        embeddings = self.embed(pictures)
        return condition if embeddings is None else dataclasses.replace(condition, embeddings=embeddings)

    def embed(self, pictures: Iterator[torch.Tensor]) -> torch.Tensor | None:
        """Return ImageCondition.embeddings of the images at their own sizes, [height, width, 3] of uint8, in the order
        of the clip; None in a model without an image encoder, and in one whose image encoder sees the pixels that
        `encode` gets."""
        return None

    @abstractmethod
    def encode(self, image: torch.Tensor, size: ClipSize, last_image: torch.Tensor | None = None) -> ImageCondition:
        """Encode images to a batch of one. image, last_image: [height, width, 3], uint8, already of the clip's size;
        the clip starts from the first and ends with the last, which only some models take."""
