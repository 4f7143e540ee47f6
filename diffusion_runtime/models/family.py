"""ModelFamily: one architecture as a declaration. Model: a folder of it, opened once, as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.empty_modules import empty_modules
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.decoders.interface import LatentDecoder, LatentEncoder
from diffusion_runtime.denoising.scheduler_config import read_scheduler_config
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.layers.riflex import TemporalFrequencies
from diffusion_runtime.models.declaration import (
    C,
    Decoding,
    FolderFormat,
    NamedDecoder,
    Requests,
    TextEncoding,
    Weights,
)
from diffusion_runtime.models.generation import GenerationSettings, generation_settings
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.interface import DiffusionTransformer, ImageConditioner
from diffusion_runtime.models.sampling import Sampling
from diffusion_runtime.models.text_encoder_files import CONNECTORS, TextChanges, keep_text_in_files
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.request.generation_request import REQUEST_FIELDS
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.weights.checkpoint import WeightChange
from diffusion_runtime.weights.lora.binding import LoraTarget
from diffusion_runtime.weights.lora.names import LoraNames
from diffusion_runtime.weights.quantization import Quantization
from diffusion_runtime.weights.stored_weights import StoredWeights
from diffusion_runtime.weights.transformer_files import TransformerFile
from diffusion_runtime.weights.transformer_weights import RoomFor, TransformerWeights, no_room

# The latents' geometry of a family.
G = TypeVar("G", bound=LatentGeometry)


@dataclass(frozen=True, kw_only=True)
class Model(Generic[C, G]):
    """A model folder, opened: what its json says, and functions that build and load its parts.

    config: of the transformer. generation: of generation.json. defaults: request values where neither a request nor
    generation.json says any; those of a causal model say chunk_frames, and what else is not that of a cache of
    everything. request_fields: of this folder, in addition to the family's. sampling: what its rules of requests need
    to know; inputs: the images that it takes. weights: of its transformers. num_shared_heads: heads of the
    self-attention that processes can share; None for a transformer that does not cut its tokens with
    `context.sharding`. modules: by component, the part of a transformer that the component's weights fill.

    The functions raise ModelLoadError for files that are missing, damaged or not this model's. make_transformer: see
    build_transformer. named_decoder: the one that RuntimeConfig.vae_decoder names in place of the family's.
    tiny_decoders: as of Decoding, where this folder's are not the family's.
    """

    family: ModelFamily[C, G]
    config: C
    generation: GenerationSettings
    defaults: Mapping[str, Any]
    sampling: Sampling
    weights: TransformerWeights
    num_shared_heads: int | None
    make_transformer: Callable[[AttentionPolicy], DiffusionTransformer]
    load_text_encoder: Callable[[torch.device, torch.dtype], TextEncoder]
    load_decoder: Callable[[torch.device, torch.dtype], LatentDecoder]
    load_image_conditioner: Callable[[torch.device, torch.dtype], ImageConditioner]
    load_latent_encoder: Callable[[torch.device, torch.dtype], LatentEncoder]
    inputs: ImageInputs = dataclasses.field(default_factory=ImageInputs)
    request_fields: tuple[str, ...] = ()
    named_decoder: NamedDecoder | None = None
    tiny_decoders: Mapping[int, str] | None = None
    modules: Callable[[DiffusionTransformer], Mapping[str, nn.Module]] = lambda whole: {"transformer": whole}

    @property
    def folder(self) -> AnyFolder:
        """The folder of the model."""
        return self.weights.folder

    @property
    def geometry(self) -> G:
        """The sizes that it makes."""
        return cast(G, self.sampling.geometry)

    @property
    def used_fields(self) -> frozenset[str]:
        """The request fields that not every model uses and this one does."""
        sampling = self.sampling
        facts = {
            "true_cfg_scale": sampling.embeds_guidance,
            "guidance_scale_2": len(self.weights.components) > 1,
            **dict.fromkeys(("boundary_ratio", "expert"), len(self.weights.components) > 1 and not sampling.is_causal),
            **dict.fromkeys(("init_path", "mask_path"), self.family.decoding.load_encoder is not None),
            "conditioning_scale": sampling.control is not None and sampling.control.takes_scale,
            **dict.fromkeys(("nag_scale", "nag_tau", "nag_alpha"), sampling.restoration is None),
            "noise": self.family.requests.in_comfyui_order and not sampling.is_causal,
            "decode_timestep": sampling.decodes_with_noise,
            "decode_noise_scale": sampling.decodes_with_noise,
            **{name: sampling.is_causal for name, declared in REQUEST_FIELDS.items() if declared.is_of_chunks},
            **dict.fromkeys(
                ("segment_frames", "segment_overlap", "segment_seeds"),
                sampling.segments is not None or sampling.continues_images,
            ),
            **dict.fromkeys(("context_frames", "context_overlap", "context_noise"), sampling.takes_windows),
            **dict.fromkeys(("riflex", "riflex_index"), sampling.takes_riflex),
            "prompt_switches": sampling.switches_prompts,
        }
        own = (*self.family.requests.fields, *self.request_fields, *self.inputs.images)
        return frozenset((*own, *(name for name, holds in facts.items() if holds)))

    def build_transformer(self, policy: AttentionPolicy) -> DiffusionTransformer:
        """Build the transformer without weights, on the meta device; this process's part of it where several share it.

        Raises BackendUnavailableError and ConfigError for an attention choice that cannot run.
        """
        with empty_modules():
            transformer = self.make_transformer(policy)
        for module in self.modules(transformer).values():
            self.weights.share_layers(module)
        return transformer

    def load_transformer(
        self,
        transformer: DiffusionTransformer,
        device: torch.device,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
        quantization: Quantization | None = None,
        room_for: RoomFor = no_room,
    ) -> DiffusionTransformer:
        """Read the weights into the transformer from `build_transformer`. See TransformerWeights.load."""
        self.weights.load(self.modules(transformer), device, dtype, changes, quantization, room_for)
        return transformer

    def with_decoder(self, name: str | None) -> Model[C, G]:
        """Return the model with the decoder of that name, in families that have one; itself elsewhere. Raises
        ConfigError where the folder has none."""
        named = self.family.decoding.named.get(name or "")
        if named is None:
            return self
        named.check(self.folder, str(name))
        return dataclasses.replace(
            self,
            named_decoder=named,
            sampling=dataclasses.replace(self.sampling, geometry=named.geometry(self.folder, self.geometry)),
            load_decoder=lambda device, dtype: named.load(self.folder, device, dtype),
        )

    def shared_by(self, group: RankGroup) -> Model[C, G]:
        """Return the model with its weights shared by processes; policies that transformers are built with have a mesh
        with this group. Raises ConfigError for weights that they cannot share."""
        return dataclasses.replace(self, weights=self.weights.shared_by(group))

    def with_transformer_files(
        self, files: Sequence[TransformerFile], known: Callable[[], Sequence[LoraNames]]
    ) -> Model[C, G]:
        """Return the model with weights from elsewhere. See TransformerWeights.with_files."""
        model = self
        for file in files if self.family.config_of_file is not None else ():
            model = model._of_file(file)
        return dataclasses.replace(model, weights=model.weights.with_files(files, known))

    def _of_file(self, file: TransformerFile) -> Model[C, G]:
        """Return the model with the config that a file's tensors show. Raises what with_transformer_files raises."""
        family, geometry = self.family, self.geometry
        assert family.config_of_file is not None
        config = family.config_of_file(self.config, file.shapes())
        return dataclasses.replace(
            self,
            config=config,
            weights=dataclasses.replace(self.weights, pieces=lambda _: dict(family.weights.pieces(config))),
            make_transformer=lambda policy: family.transformer(config, geometry, policy),
        )

    def keep_text_in_files(
        self, encoder: TextEncoder, device: torch.device, dtype: torch.dtype
    ) -> dict[nn.Module, StoredWeights]:
        """Leave the weights of a text encoder in their files, which was loaded for the meta device; return where those
        of each module wait. Raises ModelLoadError where its parameters cannot be told from each other in the files, or
        are not there."""
        return keep_text_in_files(encoder, self.folder, self.family.files.components_called(CONNECTORS), device, dtype)

    def text_changes(self, changes: Sequence[WeightChange] = ()) -> TextChanges:
        """Return what gives these changes to the model's text encoders."""
        return TextChanges(self.folder, self.family.files.components_called(CONNECTORS), changes)

    def lora_target(self, known: Callable[[], Sequence[LoraNames]]) -> LoraTarget:
        """Return this model as LoRA files meet it, from its json alone. known: the names of all families."""
        shapes = {component: self.weights.shapes(component) for component in self.weights.components}
        return LoraTarget(self.weights.lora_names, shapes, known, lambda: self.text_changes().shapes())


def _unchanged(model: Model[C, G]) -> Model[C, G]:
    return model


def _own_heads(config: Any) -> int:
    return int(config.num_heads)


@dataclass(frozen=True, kw_only=True)
class ModelFamily(Generic[C, G]):
    """One architecture: what its folders hold and how its parts are built. Its functions raise ModelLoadError that
    names the file and the key.

    name: for messages. roles: (role, category) of its attention layers. transformer: made of config, geometry and
    attention choices. shared_heads: see Model.num_shared_heads. images: those that a folder's model takes. adapt:
    applies the folder's settings to the model that follows from the declaration. temporal: see Sampling.temporal.
    config_of_file: (config, shapes of a single file's tensors) -> the config of the transformer in it, in families with
    one transformer whose files differ in more than the folder's json says.
    """

    name: str
    files: FolderFormat
    requests: Requests
    text: TextEncoding[C]
    decoding: Decoding
    weights: Weights[C]
    roles: tuple[tuple[str, str], ...]
    read_config: Callable[[AnyFolder], C]
    read_geometry: Callable[[AnyFolder], G]
    transformer: Callable[[C, G, AttentionPolicy], DiffusionTransformer]
    shared_heads: Callable[[C], int | None] = _own_heads
    load_image_conditioner: Callable[[AnyFolder, torch.device, torch.dtype], ImageConditioner] | None = None
    images: Callable[[AnyFolder, C, G], ImageInputs] = lambda *_: ImageInputs()
    adapt: Callable[[Model[C, G]], Model[C, G]] = _unchanged
    temporal: Callable[[C], TemporalFrequencies] | None = None
    config_of_file: Callable[[C, Mapping[str, tuple[int, ...]]], C] | None = None

    def unread_components(self, vae_decoder: str | None) -> frozenset[str]:
        """Return the components that a folder may have and that are not read. vae_decoder: of RuntimeConfig."""
        named = {name: each.component.name for name, each in self.decoding.named.items()}
        return frozenset((*self.files.left_out, *(each for name, each in named.items() if name != vae_decoder)))

    def open(self, folder: AnyFolder) -> Model[C, G]:
        """Open the model in this folder, from its json alone, after `files.check`."""
        self.files.check(folder)
        return self.describe(folder)

    def describe(self, folder: AnyFolder) -> Model[C, G]:
        """Return `open` without its check."""
        scheduler, generation = read_scheduler_config(folder), generation_settings(folder)
        config, geometry = self.read_config(folder), self.read_geometry(folder)

        def load_image_conditioner(device: torch.device, dtype: torch.dtype) -> ImageConditioner:
            if self.load_image_conditioner is None:
                raise ModelLoadError(f"{folder}: {self.name} models do not start from an image; leave out image_path")
            return self.load_image_conditioner(folder, device, dtype)

        def load_latent_encoder(device: torch.device, dtype: torch.dtype) -> LatentEncoder:
            if self.decoding.load_encoder is None:
                raise ModelLoadError(f"{folder}: {self.name} models start from no picture; leave out init_path")
            return self.decoding.load_encoder(folder, device, dtype)

        return self.adapt(
            Model(
                family=self,
                config=config,
                generation=generation,
                defaults=self.requests.defaults,
                sampling=Sampling(
                    geometry=geometry,
                    scheduler=scheduler,
                    schedule=self.requests.schedule_of(scheduler, self.name),
                    takes_guidance=self.requests.takes_guidance,
                    guidance_offset=self.requests.guidance_offset,
                    guides_parts="modality_scale" in self.requests.fields,
                    temporal=None if self.temporal is None else self.temporal(config),
                ),
                weights=TransformerWeights(
                    folder=folder,
                    family=self.name,
                    pieces=lambda _: dict(self.weights.pieces(config)),
                    lora_names=self.weights.lora_names,
                    stays_float32=self.weights.stays_float32,
                    joined_components=self.weights.joined_components,
                    shares_joined=self.weights.shares_joined,
                    prepare=self.weights.prepare,
                    is_ignored=self.weights.is_ignored,
                    arrange=self.weights.arrange,
                ),
                num_shared_heads=self.shared_heads(config),
                make_transformer=lambda policy: self.transformer(config, geometry, policy),
                load_text_encoder=lambda device, dtype: self.text.load(folder, device, dtype),
                load_decoder=lambda device, dtype: self.decoding.load(folder, device, dtype),
                load_image_conditioner=load_image_conditioner,
                load_latent_encoder=load_latent_encoder,
                inputs=self.images(folder, config, geometry),
            )
        )
