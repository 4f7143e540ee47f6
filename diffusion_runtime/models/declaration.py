"""Parts of a family's declaration, by who reads them: folder, request values, text encoding, decoding, weights."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.config import tile_pixels
from diffusion_runtime.core.model_folder import (
    AnyFolder,
    Workflow,
    read_index,
    refuse_other_pipelines,
    refuse_unknown_index_keys,
)
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.decoders.interface import LatentDecoder, LatentEncoder
from diffusion_runtime.decoders.latent_upsampler import SecondStage
from diffusion_runtime.decoders.sample_decoder import Tiling
from diffusion_runtime.denoising.flow_schedule import FlowSchedule
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.errors import ConfigError, ModelLoadError, shown
from diffusion_runtime.kernels.fp8_rows.api import ALIGNMENT, product_refusal
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.weights.lora.names import LoraNames
from diffusion_runtime.weights.pieces import NamedPieces
from diffusion_runtime.weights.weight_loading import Arrange

# The transformer's config of a family.
C = TypeVar("C")


def _nothing(_: AnyFolder) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class FolderFormat:
    """Contents of a family's folders.

    transformer_classes: the class names in model_index.json that it loads. pipeline_classes: the pipelines that it
    replaces; index_keys: keys that model_index.json may have in addition to components. diffusers_components: those
    that classes of diffusers compute; check_parts: reads the folder's other settings of them. controlnet_class: of
    diffusers, whose ControlNets its models take; None where they take none. unread: further components and folders that
    a repository may have and that are neither read nor downloaded. optional: components that are read where the folder
    has them, which models made of single files do without. workflows: modes beside the first one, by the name that
    RuntimeConfig.workflow has -> component of the model -> the component of the folder that takes its place.
    """

    transformer_classes: tuple[str, ...]
    pipeline_classes: tuple[str, ...]
    diffusers_components: tuple[DiffusersComponent, ...]
    index_keys: tuple[str, ...] = ()
    controlnet_class: str | None = None
    unread: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    workflows: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    check_parts: Callable[[AnyFolder], object] = _nothing

    @property
    def left_out(self) -> frozenset[str]:
        """Components that a folder may have and the first workflow does not read."""
        return frozenset((*self.unread, *(each for names in self.workflows.values() for each in names.values())))

    def workflow(self, name: str, family: str) -> Workflow:
        """Return a workflow by its name. family: its name, for messages. Raises ConfigError."""
        if name not in self.workflows:
            known = f": use {' or '.join(self.workflows)}, or leave it out" if self.workflows else "; leave it out"
            raise ConfigError(f"workflow: {shown(name)}: {family} models have no such workflow{known}")
        return Workflow(name, self.workflows[name])

    def check(self, folder: AnyFolder) -> None:
        """Check that everything in the folder's json besides the transformer is supported. Imports diffusers for
        components that no module of ours computes."""
        refuse_other_pipelines(folder, self.pipeline_classes)
        refuse_unknown_index_keys(folder, self.index_keys)
        for component in self.diffusers_components:
            component.check(folder)
        self.check_parts(folder)

    def components_called(self, name: str) -> list[DiffusersComponent]:
        """Return the components of diffusers of this name: one or none."""
        return [component for component in self.diffusers_components if component.name == name]

    def decoding_library(self, folder: AnyFolder) -> str:
        """Return the library whose attention the decoder runs: "diffusers", or "torch" for a module of ours."""
        found = [component.decoding_library(folder) for component in self.components_called(COMPONENT)]
        return found[0] if found else "diffusers"


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Requests of a family's models.

    defaults: request values that neither the request nor the folder's generation.json sets. fields: those that not
    every model uses (RequestField.refusal) and this family does, in addition to the ones that loading reads off the
    folder: image_path, true_cfg_scale, guidance_scale_2. guidance_offset: is added to guidance_scale to make it the
    factor of uncond + factor * (cond - uncond). schedule: where the flow shift is a number; read_schedule: for models
    whose shift may follow the size, which are refused without it. second_stage: refines upsampled latents, in families
    with an upsampler. in_comfyui_order: whether latents hold their numbers in the order of ComfyUI's, [channels,
    frames, height, width], those of a sound behind them.
    """

    defaults: Mapping[str, Any]
    fields: tuple[str, ...] = ()
    takes_guidance: bool = True
    guidance_offset: float = 0.0
    schedule: FlowSchedule = field(default_factory=FlowSchedule)
    read_schedule: Callable[[SchedulerConfig], FlowSchedule] | None = None
    second_stage: SecondStage | None = None
    in_comfyui_order: bool = False

    def schedule_of(self, scheduler: SchedulerConfig, family: str) -> FlowSchedule:
        """Return the schedule of a folder. family: its name, for messages. Raises ModelLoadError."""
        if self.read_schedule is not None:
            return self.read_schedule(scheduler)
        if scheduler.shifts_by_size:
            raise ModelLoadError(
                f"{scheduler.path}: use_dynamic_shifting: expected False for a {family} model, got True; this "
                "is not supported"
            )
        return self.schedule


@dataclass(frozen=True)
class TextShapes:
    """Shapes of a transformer's conditions for one prompt. streams: (tokens, dim) of each encoder's tokens at their
    longest, the first encoder's first. pooled_dim: of the pooled vector. image: (tokens, dim) of an image encoder's
    embeddings. condition_channels: of an image's condition of every frame, 0 where it is the first latent frame alone.
    num_layers: how many layers of the first encoder are loaded, None for all. tokens_per_image: further ones of the
    first encoder for each image to edit. sees: whether the first encoder is loaded with the half of it that reads
    pictures."""

    streams: tuple[tuple[int, int], ...]
    pooled_dim: int | None = None
    image: tuple[int, int] | None = None
    condition_channels: int = 0
    num_layers: int | None = None
    tokens_per_image: int = 0
    sees: bool = False


@dataclass(frozen=True, kw_only=True)
class TextEncoding(Generic[C]):
    """Text encoders of a family. shapes: conditions that memory is planned for. library: whose attention the encoder
    runs, for the report."""

    load: Callable[[AnyFolder, torch.device, torch.dtype], TextEncoder]
    shapes: Callable[[AnyFolder, C], TextShapes]
    library: Callable[[AnyFolder, torch.dtype], str] = lambda *_: "transformers"


@dataclass(frozen=True)
class NamedDecoder:
    """Another decoder of the same latents that a folder may have, by a name in RuntimeConfig.vae_decoder. component: of
    the folder; load: as Decoding.load. geometry: (folder, geometry of the model) -> that of clips that it decodes.
    num_bytes: (folder, dtype, height, width, frames) -> activations of a decode."""

    component: DiffusersComponent
    load: Callable[[AnyFolder, torch.device, torch.dtype], LatentDecoder]
    geometry: Callable[[AnyFolder, Any], Any]
    num_bytes: Callable[[AnyFolder, torch.dtype, int, int, int], int]

    def check(self, folder: AnyFolder, name: str) -> None:
        """Check that the folder has it. Raises ConfigError, and ModelLoadError for settings that are not known."""
        if self.component.name not in read_index(folder):
            raise ConfigError(
                f"vae_decoder: {name}: {folder} has no {self.component.name} ({self.component.class_name}); leave out "
                "--vae-decoder, or use a folder that has one"
            )
        self.component.check(folder)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Decoder of a family. is_shared: whether several processes decode together, so that every one needs a decoder.
    modes: of RuntimeConfig.vae_decode beside `exact`; tiling: an autoencoder's module -> the decoder's tiles, None for
    one that decodes at once alone; has_exact_tiles: whether these are Tiling.is_exact. tiny_decoders: number of latent
    channels -> the name of the decoder for previews that TAEHV publishes for them. named: further ones of a folder.
    attention: makes the layers of a decoder that runs on some (LatentDecoder.attending), before any weight is read;
    their role is among the family's. load_encoder: the encoder of the same autoencoder, for pictures and videos
    that denoising starts from; None in families that start from none."""

    load: Callable[[AnyFolder, torch.device, torch.dtype], LatentDecoder]
    load_encoder: Callable[[AnyFolder, torch.device, torch.dtype], LatentEncoder] | None = None
    is_shared: bool = False
    tiling: Callable[[Any], Tiling] | None = None
    has_exact_tiles: bool = False
    modes: tuple[str, ...] = ()
    tiny_decoders: Mapping[int, str] = field(default_factory=dict)
    named: Mapping[str, NamedDecoder] = field(default_factory=dict)
    attention: Callable[[AnyFolder, AttentionPolicy], Sequence[AttentionLayer]] | None = None

    def check_mode(self, mode: str, family: str) -> None:
        """Check RuntimeConfig.vae_decode. Raises ConfigError where the decoder has no such mode."""
        if mode not in ("exact", *self.modes):
            has = f"modes exact and {self.modes[0]}" if self.modes else "one mode, exact"
            raise ConfigError(
                f"vae_decode: {mode}: the decoder of {family} models has {has}; leave out --vae-decode (fast is for "
                "the decoders of most videos and of Qwen-Image, fp8 for that of MiniMax-H3)"
            )

    def check_products(self, mode: str, device: torch.device, dtype: torch.dtype) -> None:
        """Check RuntimeConfig.vae_decode on a device. Raises ConfigError for one that does not multiply so."""
        refusal = product_refusal(device, dtype, ALIGNMENT, ALIGNMENT) if mode == "fp8" else None
        if refusal is not None:
            raise ConfigError(f"vae_decode: fp8: {refusal}; leave out --vae-decode")

    def check_tiling(self, choice: str, family: str, pixels: int) -> None:
        """Check RuntimeConfig.vae_tiling. pixels: of a latent that is denoised, a side. Raises ConfigError where the
        decoder has no tiles, or none of that size."""
        if choice in ("auto", "off"):
            return
        if self.tiling is None:
            raise ConfigError(
                f"vae_tiling: {choice}: the decoder of {family} models has no tiles; leave out --vae-tiling"
            )
        if self.has_exact_tiles and ":" in choice:
            size, overlap = tile_pixels(choice)
            raise ConfigError(
                f"vae_tiling: {choice}: the tiles of {family} models are exact, an overlap of {overlap} "
                f"would change nothing: --vae-tiling {size}"
            )
        wrong = [] if choice == "on" else [each for each in tile_pixels(choice) if each is not None and each % pixels]
        if wrong:
            near = ", ".join(f"{each} is near {max(1, round(each / pixels)) * pixels}" for each in wrong)
            raise ConfigError(
                f"vae_tiling: {choice}: sizes and overlaps of {family} models are multiples of {pixels}: {near}"
            )


@dataclass(frozen=True, kw_only=True)
class Weights(Generic[C]):
    """Weights of a family's transformers. pieces: our parameter names, and the checkpoint tensors that fill each.
    lora_names: names of its modules in LoRA files. float32: patterns, with `*`, of our names of the parameters that are
    not converted to the model's dtype. The others are as in TransformerWeights, of every model of the family; `adapt`
    sets what a config decides."""

    pieces: Callable[[C], Iterator[NamedPieces]]
    lora_names: LoraNames
    float32: tuple[str, ...] = ()
    joined_components: tuple[str, ...] = ()
    shares_joined: bool = False
    prepare: Callable[[nn.Module, Collection[str]], object] | None = None
    is_ignored: Callable[[str], bool] = lambda _: False
    arrange: Arrange | None = None

    def stays_float32(self, name: str) -> bool:
        """Return whether our parameter `name` is kept in float32 when the model is loaded in another dtype."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.float32)
