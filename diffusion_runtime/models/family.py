"""ModelFamily: one architecture as a declaration. Model: a folder of it, opened once, as a value."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import nn

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.empty_modules import empty_modules
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.model_folder import (
    AnyFolder,
    refuse_other_pipelines,
    refuse_unknown_index_keys,
)
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.decoders.latent_upsampler import SecondStage
from diffusion_runtime.denoising.flow_schedule import FlowSchedule
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig, read_scheduler_config
from diffusion_runtime.errors import ConfigError, ModelLoadError
from diffusion_runtime.layers.fp8_linear import quantized_weights
from diffusion_runtime.models.generation import GenerationSettings, generation_settings
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.interface import DiffusionTransformer, ImageConditioner
from diffusion_runtime.models.quantization import Quantization
from diffusion_runtime.models.sampling import Sampling
from diffusion_runtime.models.tensor_parallel import TensorParallel, shared_pieces
from diffusion_runtime.models.text_encoder_files import CONNECTORS, TextChanges, keep_text_in_files
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.weights.checkpoint import Checkpoint, Piece, TensorSource, WeightChange
from diffusion_runtime.weights.joined_weights import joined
from diffusion_runtime.weights.lora.binding import LoraTarget
from diffusion_runtime.weights.lora.names import LoraNames
from diffusion_runtime.weights.stored_weights import Conversions, StoredWeights
from diffusion_runtime.weights.tensor_names import Expected
from diffusion_runtime.weights.transformer_files import TransformerFile
from diffusion_runtime.weights.weight_files import GGUF
from diffusion_runtime.weights.weight_loading import (
    Arrange,
    MakeEmpty,
    check_names,
    expect_blocks,
    load_weights,
    rewrite_weights,
    stored_weight,
)

# The transformer's config and the latents' geometry of a family.
C = TypeVar("C")
G = TypeVar("G", bound=LatentGeometry)


# (component, its module): allocates the tensors for its weights; None for the model's device.
RoomFor: TypeAlias = Callable[[str, nn.Module], MakeEmpty | None]


def no_room(_: str, __: nn.Module) -> None:
    """Return None: the weights lie on the model's device."""


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
class Model(Sampling, ImageInputs, Generic[C, G]):
    """A model folder, opened: what its json says, and functions that build and load its parts.

    config: of the transformer. generation: of generation.json. defaults: request values where neither a request nor
    generation.json says any; those of a causal model say chunk_frames, and what else is not that of a cache of
    everything. num_shared_heads: heads of the self-attention that processes can share; None for a transformer that does
    not cut its tokens with `context.sharding`.
    transformer_components: folders of its transformers' weights. pieces: by component, our parameter name -> the
    checkpoint tensors that fill it. modules: by component, the part of a transformer that it fills.

    decodes_with_noise: the decoder takes noise and its level (decode_noise_scale, decode_timestep). caches_prefix: it
    computes keys and values of tokens that every step attends to once a request (PrefixCache).

    The functions raise ModelLoadError for files that are missing, damaged or not this model's. make_transformer: see
    build_transformer. prepare: adds the parts to a component's module that only the names of its checkpoint's tensors
    show; is_ignored: tensors of a checkpoint that nothing reads; arrange: see load_weights. transformer_files: weights
    that are read from elsewhere than the folder; known_names: the modules of all families. tensor: the processes that
    share the weights, None for one alone.
    """

    family: ModelFamily[C, G]
    folder: AnyFolder
    config: C
    geometry: G
    generation: GenerationSettings
    defaults: Mapping[str, Any]
    num_shared_heads: int | None
    make_transformer: Callable[[AttentionPolicy], DiffusionTransformer]
    pieces: Callable[[str], Mapping[str, tuple[Piece, ...]]]
    load_text_encoder: Callable[[torch.device, torch.dtype], TextEncoder]
    load_decoder: Callable[[torch.device, torch.dtype], LatentDecoder]
    load_image_conditioner: Callable[[torch.device, torch.dtype], ImageConditioner]
    transformer_components: tuple[str, ...] = ("transformer",)
    modules: Callable[[DiffusionTransformer], Mapping[str, nn.Module]] = lambda whole: {"transformer": whole}
    prepare: Callable[[nn.Module, Collection[str]], object] = lambda *_: None
    is_ignored: Callable[[str], bool] = lambda _: False
    arrange: Arrange | None = None
    decodes_with_noise: bool = False
    caches_prefix: bool = False
    transformer_files: tuple[TransformerFile, ...] = ()
    known_names: Callable[[], Sequence[LoraNames]] = lambda: ()
    tensor: TensorParallel | None = None
    # As those of the family, of this folder.
    request_fields: tuple[str, ...] = ()
    # Components whose weights are read with the transformer's, under their name and a dot.
    joined_components: tuple[str, ...] = ()

    def build_transformer(self, policy: AttentionPolicy) -> DiffusionTransformer:
        """Build the transformer without weights, on the meta device; this process's part of it where several share it.

        Raises BackendUnavailableError and ConfigError for an attention choice that cannot run.
        """
        with empty_modules():
            transformer = self.make_transformer(policy)
        for module in self.modules(transformer).values():
            self._share_layers(module)
        return transformer

    def shared_by(self, group: RankGroup) -> Model[C, G]:
        """Return the model with its weights shared by processes; policies that transformers are built with have a mesh
        with this group. Raises ConfigError for weights that they cannot share."""
        if group.size == 1:
            return self
        blocks = [file.path for file in self.transformer_files if file.place.suffix.lower() == GGUF]
        if blocks:
            raise ConfigError(
                f"parallel.tensor_parallel_size: {blocks[0]}: the blocks of a GGUF file are not shared by processes in "
                "this version; leave out --tensor-parallel-size, or use a safetensors file"
            )
        if self.joined_components:
            raise ConfigError(
                f"parallel.tensor_parallel_size: the weights of a {self.joined_components[0]} are not shared by "
                "processes in this version; leave out --tensor-parallel-size; --ulysses-degree works"
            )
        return dataclasses.replace(self, tensor=TensorParallel.of(self.family.name, group))

    def _share_layers(self, module: nn.Module) -> None:
        if self.tensor is not None:
            self.tensor.apply(module)

    def _make_room(self, module: nn.Module, names: Collection[str]) -> None:
        """Call `prepare`, and share what it adds like the rest."""
        self.prepare(module, names)
        self._share_layers(module)

    def with_transformer_files(
        self, files: Sequence[TransformerFile], known: Callable[[], Sequence[LoraNames]]
    ) -> Model[C, G]:
        """Return the model with weights from elsewhere. known: the names of all families.

        Raises ConfigError for a component that the model does not have, and what opening the files raises.
        """
        for file in files:
            if file.component not in self.transformer_components:
                raise ConfigError(
                    f"{file.key}: the model has one transformer, and no {file.component}; leave out "
                    f"--{file.key.replace('_', '-')}"
                )
        model = dataclasses.replace(self, transformer_files=tuple(files), known_names=known)
        for file in files:
            file.check_settings(self.folder)
            model._checkpoint(file.component).close()
        return model

    def make_room(self, transformer: DiffusionTransformer) -> bool:
        """Give an empty transformer the parts that only the names of the files' tensors show, such as gates; nothing
        where there are no files yet, or none that can be read. Returns whether all of them could be read."""
        reads_files = True
        for component, module in self.modules(transformer).items():
            try:
                with self._checkpoint(component) as checkpoint:
                    self._make_room(module, checkpoint.shapes)
            except ModelLoadError:
                reads_files = False
        return reads_files

    def expect_stored(
        self,
        transformer: DiffusionTransformer,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
        quantization: Quantization | None = None,
    ) -> None:
        """Make an empty transformer what loading makes of it, except for the numbers, so that its bytes count: with the
        parts, the quantised layers and the dtypes in the heads of its files; by its config alone where there are no
        files yet, or none that can be read. The arguments are load_transformer's."""
        for component, module in self.modules(transformer).items():
            try:
                with self._checkpoint(component, changes) as checkpoint:
                    self._ready_module(transformer, component, checkpoint, dtype, quantization)
            except ModelLoadError:
                self.set_loaded_dtypes(module, dtype)

    def check_weights(self, transformer: DiffusionTransformer, components: Collection[str] | None = None) -> bool:
        """Return whether weights of the transformer from `build_transformer` are quantised in their files. components:
        those to check, None for all. Reads the heads of files; raises ModelLoadError for those that cannot be read or
        do not fit."""
        found = False
        for component, module in self.modules(transformer).items():
            if components is not None and component not in components:
                continue
            with self._checkpoint(component) as checkpoint:
                self._make_room(module, checkpoint.shapes)
                check_names(module, checkpoint, self.pieces(component), self.is_ignored)
                found |= any(checkpoint.quantized(name) for name in checkpoint.shapes)
        return found

    def _checkpoint(
        self,
        component: str,
        changes: Sequence[WeightChange] = (),
        kept: dict[str, torch.Tensor] | None = None,
    ) -> Checkpoint:
        file = next((file for file in self.transformer_files if file.component == component), None)
        source = None if file is None else file.source(self.expected(component))
        if self.joined_components:
            source = joined(self.folder, component, self.joined_components, source)
        return Checkpoint(
            self.folder / component,
            changes=changes,
            kept=kept,
            reads_fp8=True,
            source=source,
            place=None if file is None else file.place,
        )

    def expected(self, component: str) -> Expected:
        """Return the tensors that a file of a transformer must have."""
        shapes = {piece.name: piece.shape for several in self.pieces(component).values() for piece in several}
        beside = tuple(f"{name}." for name in self.joined_components)
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(beside)}
        return Expected(shapes, self.family.lora_names, self.known_names, self.is_ignored)

    def load_transformer(
        self,
        transformer: DiffusionTransformer,
        device: torch.device,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
        quantization: Quantization | None = None,
        room_for: RoomFor = no_room,
    ) -> DiffusionTransformer:
        """Read the weights into the transformer from `build_transformer`: in eval mode, without gradients.

        changes: made to the checkpoint's tensors as they are read, such as a LoRA. quantization: keeps the layers that
        are quantised in the files as they are; None dequantises them. room_for: allocates the weights of a component's
        module, whose parameters then have the dtypes of loaded ones; None for `device`.

        Raises ModelLoadError for files that are missing, damaged or not this model's, and for changes made for another
        model.
        """
        for component in self.modules(transformer):
            with self._checkpoint(component, changes) as checkpoint:
                self.fill_component(transformer, component, checkpoint, device, dtype, quantization, room_for)
        return transformer

    def fill_component(
        self,
        transformer: DiffusionTransformer,
        component: str,
        source: TensorSource,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None = None,
        room_for: RoomFor = no_room,
    ) -> None:
        """Fill the part of an empty transformer that one component's tensors are for. Raises as load_transformer."""
        module, pieces = self._ready_module(transformer, component, source, dtype, quantization)
        load_weights(
            module,
            source,
            pieces,
            device,
            dtype,
            self.family.stays_float32,
            self.is_ignored,
            self.arrange,
            room_for(component, module),
        )

    def keep_in_files(
        self,
        transformer: DiffusionTransformer,
        device: torch.device,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
        quantization: Quantization | None = None,
    ) -> dict[str, StoredWeights]:
        """Leave the weights in their files, otherwise like load_transformer; return them by component."""
        kept = {}
        for component in self.modules(transformer):
            with self._checkpoint(component, changes) as checkpoint:
                module, pieces = self._ready_module(transformer, component, checkpoint, dtype, quantization)
                check_names(module, checkpoint, self.pieces(component), self.is_ignored)
            conversions = Conversions(
                functools.partial(self._checkpoint, component),
                pieces,
                device,
                dtype,
                self.family.stays_float32,
                self.arrange,
            )
            kept[component] = StoredWeights(module, conversions, changes)
        return kept

    def keep_text_in_files(
        self, encoder: TextEncoder, device: torch.device, dtype: torch.dtype
    ) -> dict[nn.Module, StoredWeights]:
        """Leave the weights of a text encoder in their files, which was loaded for the meta device; return where those
        of each module wait. Raises ModelLoadError where its parameters cannot be told from each other in the files, or
        are not there."""
        return keep_text_in_files(encoder, self.folder, self._text_parts, device, dtype)

    def _ready_module(
        self,
        transformer: DiffusionTransformer,
        component: str,
        source: TensorSource,
        dtype: torch.dtype,
        quantization: Quantization | None,
    ) -> tuple[nn.Module, Mapping[str, tuple[Piece, ...]]]:
        """Return the empty module for a component's tensors, as its files and quantisation define it, and the pieces
        that fill its parameters here."""
        module = self.modules(transformer)[component]
        self._make_room(module, source.shapes)
        pieces = shared_pieces(module, self.pieces(component))
        if quantization is not None:
            quantization.keep_stored(module, functools.partial(stored_weight, source, pieces))
            expect_blocks(module, source, pieces, dtype)
        self.set_loaded_dtypes(module, dtype)
        return module, pieces

    def set_loaded_dtypes(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Give the parameters of an empty transformer the dtypes that loading gives them, so that their bytes count."""
        quantized = quantized_weights(module)
        scales = set(quantized.values())
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point() and name not in quantized and name not in scales:
                parameter.data = parameter.data.to(torch.float32 if self.family.stays_float32(name) else dtype)

    def lora_target(self, known: Callable[[], Sequence[LoraNames]]) -> LoraTarget:
        """Return this model as LoRA files meet it, from its json alone. known: the names of all families."""
        pieces = {component: self.pieces(component) for component in self.transformer_components}
        shapes = {
            component: {piece.name: piece.shape for several in of.values() for piece in several}
            for component, of in pieces.items()
        }
        return LoraTarget(self.family.lora_names, shapes, known, lambda: self.text_changes().shapes())

    def text_changes(self, changes: Sequence[WeightChange] = ()) -> TextChanges:
        """Return what gives these changes to the model's text encoders."""
        return TextChanges(self.folder, self._text_parts, changes)

    @property
    def _text_parts(self) -> list[DiffusersComponent]:
        """Components of diffusers between text encoder and transformer."""
        return [component for component in self.family.diffusers_components if component.name == CONNECTORS]

    def rewrite_transformer(
        self,
        transformer: DiffusionTransformer,
        changed: Mapping[str, Collection[str]],
        changes: Sequence[WeightChange],
        kept: Mapping[str, dict[str, torch.Tensor]],
        dtype: torch.dtype,
    ) -> None:
        """Give a loaded transformer other changes: the result equals what `load_transformer` makes of them.

        changed: by component, the checkpoint's tensors that earlier changes or these concern; all others stay. kept: by
        component, the checkpoint's tensors that need not be read again; those that are read are added. dtype: of the
        model.
        """
        for component, module in self.modules(transformer).items():
            if not changed[component]:
                continue
            with self._checkpoint(component, changes, kept[component]) as checkpoint:
                pieces = shared_pieces(module, self.pieces(component))
                rewrite_weights(module, checkpoint, pieces, changed[component], dtype, self.arrange)


def _unchanged(model: Model[C, G]) -> Model[C, G]:
    return model


def _nothing(_: AnyFolder) -> None:
    return None


@dataclass(frozen=True)
class ModelFamily(Generic[C, G]):
    """One architecture: what its folders hold and how its parts are built. Its functions raise ModelLoadError that
    names the file and the key.

    name: for messages. transformer_classes: the class names in model_index.json that it loads. pipeline_classes: the
    pipelines that it replaces; index_keys: keys that model_index.json may have in addition to components.
    diffusers_components: those that classes of diffusers compute; check_parts: reads the folder's other settings of
    them. roles: (role, category) of its attention layers. defaults: request values that neither the request nor the
    folder's generation.json sets.

    transformer: made of config, geometry and attention choices. pieces: our parameter name -> the checkpoint tensors
    that fill it; stays_float32: parameters that are not converted to the model's dtype. lora_names: names of its
    modules in LoRA files. shared_heads: see Model.num_shared_heads. text_shapes: conditions that memory is planned for.
    shares_decoding: whether several processes decode together, so that every one needs a decoder. decodes_fast: whether
    the decoder has a `fast` mode; has_tiles: whether it can decode in tiles; decodes_in_tiles: whether it does unless
    told otherwise. text_library: library whose attention the text encoder runs, for the report. tiny_decoders: number
    of latent channels -> the name of the decoder for previews that TAEHV publishes for them. request_fields: those that
    not every model uses (RequestField.refusal) and this family does, in addition to the ones that loading reads off the
    folder: image_path, true_cfg_scale, guidance_scale_2. guidance_offset: is added to guidance_scale to make it the
    factor of uncond + factor * (cond - uncond).

    controlnet_class: of diffusers, whose ControlNets its models take; None where they take none.

    second_stage: refines upsampled latents, in families with an upsampler.

    schedule: where the flow shift is a number; read_schedule: for models whose shift may follow the size, which are
    refused without it. adapt: applies the folder's settings to the model that follows from the declaration.
    """

    name: str
    transformer_classes: tuple[str, ...]
    pipeline_classes: tuple[str, ...]
    diffusers_components: tuple[DiffusersComponent, ...]
    roles: tuple[tuple[str, str], ...]
    defaults: Mapping[str, Any]
    read_config: Callable[[AnyFolder], C]
    read_geometry: Callable[[AnyFolder], G]
    transformer: Callable[[C, G, AttentionPolicy], DiffusionTransformer]
    pieces: Callable[[C], Mapping[str, tuple[Piece, ...]]]
    lora_names: LoraNames
    load_text_encoder: Callable[[AnyFolder, torch.device, torch.dtype], TextEncoder]
    load_decoder: Callable[[AnyFolder, torch.device, torch.dtype], LatentDecoder]
    shared_heads: Callable[[C], int | None]
    text_shapes: Callable[[AnyFolder, C], TextShapes]
    stays_float32: Callable[[str], bool] = lambda _: False
    load_image_conditioner: Callable[[AnyFolder, torch.device, torch.dtype], ImageConditioner] | None = None
    text_library: Callable[[AnyFolder, torch.dtype], str] = lambda *_: "transformers"
    index_keys: tuple[str, ...] = ()
    shares_decoding: bool = False
    has_tiles: bool = False
    decodes_in_tiles: bool = False
    decodes_fast: bool = False
    tiny_decoders: Mapping[int, str] = field(default_factory=dict)
    guidance_offset: float = 0.0
    request_fields: tuple[str, ...] = ()
    controlnet_class: str | None = None
    schedule: FlowSchedule = field(default_factory=FlowSchedule)
    read_schedule: Callable[[SchedulerConfig], FlowSchedule] | None = None
    second_stage: SecondStage | None = None
    check_parts: Callable[[AnyFolder], object] = _nothing
    adapt: Callable[[Model[C, G]], Model[C, G]] = _unchanged

    def open(self, folder: AnyFolder) -> Model[C, G]:
        """Open the model in this folder, from its json alone, after `check`."""
        self.check(folder)
        return self.describe(folder)

    def decoding_library(self, folder: AnyFolder) -> str:
        """Return the library whose attention the decoder runs: "diffusers", or "torch" for a module of ours."""
        found = [each.decoding_library(folder) for each in self.diffusers_components if each.name == COMPONENT]
        return found[0] if found else "diffusers"

    def check(self, folder: AnyFolder) -> None:
        """Check that everything in the folder's json besides the transformer is supported. Imports diffusers for
        components that no module of ours computes."""
        refuse_other_pipelines(folder, self.pipeline_classes)
        refuse_unknown_index_keys(folder, self.index_keys)
        for component in self.diffusers_components:
            component.check(folder)
        self.check_parts(folder)

    def check_decode_mode(self, mode: str) -> None:
        """Check RuntimeConfig.vae_decode. Raises ConfigError where the decoder has no such mode."""
        if mode == "fast" and not self.decodes_fast:
            raise ConfigError(
                f"vae_decode: fast: the decoder of {self.name} models has one mode, exact; leave out --vae-decode "
                "(fast is for the decoders of videos and of Qwen-Image)"
            )

    def check_tiling(self, choice: str) -> None:
        """Check RuntimeConfig.vae_tiling. Raises ConfigError where the decoder has no tiles."""
        if choice == "on" and not self.has_tiles:
            raise ConfigError(
                f"vae_tiling: on: the decoder of {self.name} models has no tiles; leave out --vae-tiling (on is for "
                "the decoders of videos and of Qwen-Image)"
            )

    def describe(self, folder: AnyFolder) -> Model[C, G]:
        """Return `open` without `check`."""
        scheduler, generation = read_scheduler_config(folder), generation_settings(folder)
        config, geometry = self.read_config(folder), self.read_geometry(folder)

        def load_image_conditioner(device: torch.device, dtype: torch.dtype) -> ImageConditioner:
            if self.load_image_conditioner is None:
                raise ModelLoadError(f"{folder}: {self.name} models do not start from an image; leave out image_path")
            return self.load_image_conditioner(folder, device, dtype)

        return self.adapt(
            Model(
                family=self,
                folder=folder,
                config=config,
                geometry=geometry,
                generation=generation,
                scheduler=scheduler,
                schedule=self._schedule(scheduler),
                guidance_offset=self.guidance_offset,
                guides_parts="modality_scale" in self.request_fields,
                defaults=self.defaults,
                num_shared_heads=self.shared_heads(config),
                make_transformer=lambda policy: self.transformer(config, geometry, policy),
                pieces=lambda _: self.pieces(config),
                load_text_encoder=lambda device, dtype: self.load_text_encoder(folder, device, dtype),
                load_decoder=lambda device, dtype: self.load_decoder(folder, device, dtype),
                load_image_conditioner=load_image_conditioner,
            )
        )

    def _schedule(self, scheduler: SchedulerConfig) -> FlowSchedule:
        if self.read_schedule is not None:
            return self.read_schedule(scheduler)
        if scheduler.shifts_by_size:
            raise ModelLoadError(
                f"{scheduler.path}: use_dynamic_shifting: expected False for a {self.name} model, got True; this "
                "is not supported"
            )
        return self.schedule
