"""PipelineParts: what a loaded model consists of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from diffusion_runtime.config import LoraConfig
from diffusion_runtime.core.kept_results import KeptResults
from diffusion_runtime.decoders.decoder_graphs import DecoderGraphs
from diffusion_runtime.decoders.frame_interpolation import FrameInterpolator
from diffusion_runtime.decoders.interface import LatentDecoder, LatentEncoder
from diffusion_runtime.decoders.latent_upsampler import LatentUpsampler
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.generation.participants import (
    CompileTime,
    CountedProducts,
    EagerLayers,
    OffloadedParts,
    Participant,
    Participants,
    ReplayedDecoder,
    ShortageRemark,
)
from diffusion_runtime.layers.eight_bit_linear import ProductCounter
from diffusion_runtime.memory.offloading import Offloading
from diffusion_runtime.models.interface import DiffusionTransformer, ImageConditioner
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.request_rules import RequestRules
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.unknown_words import Vocabulary
from diffusion_runtime.weights.lora.binding import Lora
from diffusion_runtime.weights.lora.switching import LoraSwitch


class MemoryAdviser(Protocol):
    """Memory planning of the requests that come after loading."""

    def make_room(self, batch: Sequence[GenerationRequest]) -> None:
        """Offload more for a batch that needs more than what was planned. Raises DeviceMemoryError."""

    def fitting(self, request: GenerationRequest) -> str:
        """Return what to offload so that a request fits, for the message of one that ran out of memory."""


class _NoAdvice:
    """Memory of a model that nothing was planned for."""

    def make_room(self, batch: Sequence[GenerationRequest]) -> None:
        del batch

    def fitting(self, request: GenerationRequest) -> str:
        del request
        return ""


_NO_ADVICE = _NoAdvice()


class RulesWithLoras(Protocol):
    """Rules of a model with other LoRA files."""

    def __call__(self, rules: RequestRules, configs: Sequence[LoraConfig], loras: tuple[Lora, ...]) -> RequestRules: ...


def _same_rules(rules: RequestRules, configs: Sequence[LoraConfig], loras: tuple[Lora, ...]) -> RequestRules:
    del configs, loras
    return rules


def _no_encoder() -> LatentEncoder:
    raise ConfigError("init_path: this pipeline was made without an encoder; leave it out, or load the model's folder")


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelineParts:
    """The parts of a loaded model.

    load_image_conditioner: called when the first request has an image; load_latent_encoder: when the first one starts
    from a picture or a video. upsampler: of a second stage, where there is one. interpolator: of frames between those
    of the decoder, where there is one. products: counts the products of quantised linear layers. graphs: the CUDA
    graphs of the transformer's forward passes, None for none; decoder_graphs: those of the decoder. offloading: the
    parts that wait in the machine's memory. loras: the LoRA files of the transformer, None where its folder is not
    known; rules_with_loras: the rules of the model with other files. memory: plans requests that are larger than what
    the model was loaded for. encodings: of texts and images of earlier requests. vocabulary: all that prompts may be
    made of, None where it is open.
    """

    text_encoder: TextEncoder
    transformer: DiffusionTransformer
    decoder: LatentDecoder
    load_image_conditioner: Callable[[], ImageConditioner]
    load_latent_encoder: Callable[[], LatentEncoder] = _no_encoder
    upsampler: LatentUpsampler | None = None
    interpolator: FrameInterpolator | None = None
    products: ProductCounter = field(default_factory=ProductCounter)
    graphs: ForwardGraphs | None = None
    decoder_graphs: DecoderGraphs | None = None
    offloading: Offloading | None = None
    loras: LoraSwitch | None = None
    rules_with_loras: RulesWithLoras = _same_rules
    memory: MemoryAdviser = _NO_ADVICE
    encodings: KeptResults = field(default_factory=lambda: KeptResults(0))
    vocabulary: Vocabulary | None = None

    @functools.cached_property
    def image_conditioner(self) -> ImageConditioner:
        """The image conditioner, loaded when it is first asked for."""
        return self.load_image_conditioner()

    @functools.cached_property
    def latent_encoder(self) -> LatentEncoder:
        """The encoder of pictures and videos that denoising starts from, loaded when it is first asked for."""
        return self.load_latent_encoder()

    @functools.cached_property
    def _widths(self) -> frozenset[int]:
        """Numbers of a token in the transformer's attention layers."""
        return frozenset(each.num_heads_total * each.head_dim for each in self.transformer.attention_layers())

    def participants(self, device: torch.device) -> Participants:
        """Return the subsystems of these parts that take part in a generation."""
        several: list[Participant] = [CountedProducts(self.products)]
        if self.offloading is not None:
            several.append(OffloadedParts(self.offloading))
        several += [ShortageRemark(device), EagerLayers(device, self._widths), CompileTime()]
        if self.decoder_graphs is not None:
            several.append(ReplayedDecoder(self.decoder_graphs))
        return Participants(several)
