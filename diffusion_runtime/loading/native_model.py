"""Native loading: a prepared model of our own, on the meta device until `load` reads its weights."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diffusion_runtime.attention.layer_decisions import first_imports
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.self_check import SelfChecker, remarks_on
from diffusion_runtime.config import Degrees, RuntimeConfig
from diffusion_runtime.core.device_guard import device_guard
from diffusion_runtime.core.kept_results import KeptResults
from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.decoders.frame_interpolation import InterpolationFile
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.decoders.latent_upsampler import UpsamplerFolder
from diffusion_runtime.decoders.shared_decoder import SharedDecoder
from diffusion_runtime.decoders.tiny_decoder import TinyFile
from diffusion_runtime.errors import ConfigError, DeviceMemoryError, ModelLoadError, first_line
from diffusion_runtime.generation.denoising_stages import stages_of
from diffusion_runtime.generation.parts import PipelineParts
from diffusion_runtime.generation.prompt_encoding import texts_of
from diffusion_runtime.kernels.compile_ahead import compiling_ahead, is_useful_on
from diffusion_runtime.kernels.launches import expecting_launches
from diffusion_runtime.layers.stored_linear import StoredLinear
from diffusion_runtime.loading.cuda_graphs import make_decoder_graphs, make_graphs
from diffusion_runtime.loading.description import PipelineDescription, planned_attention
from diffusion_runtime.loading.interface import OnStage
from diffusion_runtime.loading.later_requests import LaterRequests
from diffusion_runtime.loading.memory_planning import (
    PlannedDemand,
    demand_of,
    fitting_offloads,
    is_planned,
    largest_demand,
    may_exceed_the_machine,
    plan_memory,
    planned_batch,
)
from diffusion_runtime.loading.memory_remedies import Alternative, remedies_of
from diffusion_runtime.loading.model_rules import rules_with_loras
from diffusion_runtime.loading.read_progress import ReadProgress, transformer_bytes
from diffusion_runtime.loading.text_encoders import TextEncoderLoader
from diffusion_runtime.memory.cpu_memory import bound_primitive_cache
from diffusion_runtime.memory.device_memory import explain_memory_shortage, use_expandable_segments
from diffusion_runtime.memory.host_arena import HostArena
from diffusion_runtime.memory.machine_memory import share_of_device
from diffusion_runtime.memory.offloaded_part import arena_for
from diffusion_runtime.memory.offloading import Offloading
from diffusion_runtime.memory.plan import MemoryDemand
from diffusion_runtime.memory.transfers import Transfers, transfers_of
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.interface import DiffusionTransformer, ImageConditioner
from diffusion_runtime.models.memory_demand import PlannedRequest
from diffusion_runtime.models.model_sources import check_weights_are_there, fetch_weights
from diffusion_runtime.models.part_files import named_components
from diffusion_runtime.models.registry import lora_names_of_families
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.parallel.world import World
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.quality.vocabularies import vocabulary_of
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.batch_settings import expert_by_timestep
from diffusion_runtime.rules.request_rules import RequestRules
from diffusion_runtime.text_encoders.ahead import encoding_ahead
from diffusion_runtime.text_encoders.attention_choice import EncoderAttention
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.weights.checkpoint import WeightChange
from diffusion_runtime.weights.lora.binding import Lora
from diffusion_runtime.weights.lora.switching import LoraSwitch, Rewrite
from diffusion_runtime.weights.quantization import Quantization
from diffusion_runtime.weights.transformer_weights import RoomFor, no_room
from diffusion_runtime.weights.weight_files import check_component_files
from diffusion_runtime.weights.weight_loading import MakeEmpty

_logger = logging.getLogger("diffusion_runtime.loading")
# Some twenty prompts of the widest encoders: one of FLUX.2 [dev] takes 15 MB.
_MAX_KEPT_ENCODINGS = 256 * 2**20
_IN_TILES = (
    "a whole decode does not fit: the plan decodes in tiles (vae_tiling: on), {}; --vae-tiling off refuses instead"
)


@dataclass(frozen=True)
class PreparedModel:
    """A native model. transformer: on the meta device. loras: read, and not yet merged. world: the processes that run
    the model together, None for one alone. tiny: the decoder for previews that takes the place of the model's own.
    upsampler: of a second stage. quantization: of the transformer's linear layers, already made in `transformer` as far
    as the config asks for it. planned: what its memory plan is for, None without one. text_attention: what was chosen
    for the text encoders, None for transformers' own choice. decoder_attention: of a decoder that attends by layers of
    ours, None for others. interpolation: weights for frames between those of the model, None without. unread:
    transformers that are not read."""

    description: PipelineDescription
    model: Model[Any, Any]
    transformer: DiffusionTransformer
    policy: AttentionPolicy
    device: torch.device
    dtype: torch.dtype
    loras: tuple[Lora, ...]
    mesh: ProcessMesh
    world: World | None
    tiny: TinyFile | None
    upsampler: UpsamplerFolder | None
    quantization: Quantization
    planned: PlannedRequest | None = None
    text_attention: EncoderAttention | None = None
    decoder_attention: Sequence[AttentionLayer] = ()
    interpolation: InterpolationFile | None = None
    unread: tuple[str, ...] = ()

    @property
    def rules(self) -> RequestRules:
        assert isinstance(self.description.rules, RequestRules)
        return self.description.rules

    @property
    def inspectable(self) -> PreparedModel:
        return self

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        return self.rules.attention_layers

    def planned_for(self, requests: Sequence[GenerationRequest]) -> PreparedModel:
        """Return the model with the memory plan of resolved requests, as Prepared.planned_for says."""
        demand = self._largest_demand(self.transformer, requests)
        try:
            memory = plan_memory(demand, self.description.config, self.device, self.description.planned_on)
        except DeviceMemoryError:
            in_tiles = self._planned_in_tiles(requests)
            if in_tiles is None:
                raise
            return in_tiles
        planned = None if demand is None else demand.request
        return dataclasses.replace(
            self, description=dataclasses.replace(self.description, memory=memory), planned=planned
        )

    def _planned_in_tiles(self, requests: Sequence[GenerationRequest]) -> PreparedModel | None:
        """Return the model with a plan that decodes in tiles, where the config leaves that open and the plan fits."""
        decoding = self.model.family.decoding
        config = self.description.config
        if config.vae_tiling != "auto" or decoding.tiling is None or config.vae_decoder is not None:
            return None
        try:
            planned = self._with_tiling("on").planned_for(requests)
        except DeviceMemoryError:
            return None
        plan = planned.description.memory
        assert plan is not None
        note = _IN_TILES.format("slower" if decoding.has_exact_tiles else "whose frames differ")
        demand = dataclasses.replace(plan.demand, notes=(*plan.demand.notes, note))
        memory = dataclasses.replace(plan, demand=demand)
        return dataclasses.replace(planned, description=dataclasses.replace(planned.description, memory=memory))

    def _with_tiling(self, choice: str) -> PreparedModel:
        config = dataclasses.replace(self.description.config, vae_tiling=choice)
        return dataclasses.replace(self, description=dataclasses.replace(self.description, config=config))

    def for_these_alone(self, requests: Sequence[GenerationRequest]) -> PreparedModel:
        """Return the model without the expert that none of these requests uses, as Prepared.for_these_alone says."""
        components = self.model.weights.components
        if len(components) < 2 or self.rules.sampling.is_causal or not requests:
            return self
        experts = {expert for request in requests for expert in self._experts_of(request)}
        if len(experts) != 1:
            return self
        read, every = components[experts.pop()], self.model.modules
        model = dataclasses.replace(self.model, modules=lambda whole: {read: every(whole)[read]})
        _logger.info("%s alone is read: no step is by another expert", read)
        return dataclasses.replace(self, model=model, unread=tuple(each for each in components if each != read))

    def _experts_of(self, request: GenerationRequest) -> set[int]:
        """Return the experts of the steps that a resolved request runs from its first one."""
        settings = self.rules.settings(request)
        expert_at = expert_by_timestep(request, self.transformer.expert_at)
        stop = settings.num_steps if request.stop_after_step is None else request.stop_after_step
        return {
            expert_at(step.timestep)
            for stage in stages_of(settings)
            for step in stage.steps(torch.device("cpu"))
            if stage.first + step.index < stop and step.timestep is not None
        }

    def check_files(self) -> None:
        """Check that the weight files are there, as Prepared.check_files says."""
        config, opened = self.description.config, self.model
        unread = (*opened.family.unread_components(config.vae_decoder), *self.unread)
        elsewhere = [*opened.weights.in_files, *unread]
        check_weights_are_there(config.model_path, opened.folder, elsewhere, offline=config.offline)

    def load(
        self,
        on_stage: OnStage | None = None,
        requests: Sequence[GenerationRequest] = (),
        *,
        transfers: Transfers | None = None,
    ) -> Pipeline:
        """Read the weights, as Prepared.load says. transfers: how offloaded weights come to the device, None for the
        device's own way.

        Raises besides ConfigError where several processes are asked for and none were joined."""
        if self.description.planned_on is not None:
            raise ConfigError(
                f"plan_for: {self.description.planned_on.hardware.device_name} is not here, and no weights are loaded "
                "for it: generate --dry-run and explain say what would run there"
            )
        began = time.perf_counter()
        say: OnStage = on_stage if on_stage is not None else lambda _: None
        world, config = self.world, self.description.config
        if world is None and self.mesh.size > 1:
            raise ConfigError(
                f"parallel: {self.mesh.size} processes are asked for, and this one has joined no others; start it with "
                "torchrun and give load_pipeline the world of `with join_processes() as world`"
            )
        bound_primitive_cache()
        use_expandable_segments(self.device)
        say("choosing attention")
        checked = self._check_attention()
        # What the plan's forward pass launches, a GPU compiles while the weights are read.
        with expecting_launches(is_on=is_useful_on(self.device)) as launches:
            checked = checked.planned_to_load(requests)
        description, opened, config = checked.description, self.model, checked.description.config
        offloading = checked._offloading(transfers)
        graphs = make_graphs(config, self.device, offloading is not None, None if world is None else world.group)
        elsewhere = opened.weights.in_files
        read_began = time.perf_counter()
        unread = (*opened.family.unread_components(config.vae_decoder), *self.unread)
        named = [*named_components(config), *elsewhere, *unread]
        fetch_weights(config.model_path, opened.folder, named, offline=config.offline, variant=config.variant)
        quantised = [each.name for each in opened.family.files.diffusers_components if each.reads_quantized]
        check_component_files(opened.folder, (*elsewhere, *unread), quantised)
        opened.weights.check(opened.modules(checked.transformer), changes=self.loras)
        advice = "A dtype of bfloat16 needs half of what float32 does; so does a smaller model"
        imports = first_imports(layer.decisions for layer in checked.layers)
        with (
            device_guard(self.device),
            explain_memory_shortage("loading", lambda: checked._shortage_advice(advice)),
            compiling_ahead(launches.values(), imports, self.device) as first_use,
        ):
            with ReadProgress(say, "text encoder"):
                changes = opened.text_changes(self.loras)
                loader = TextEncoderLoader(opened, self.device, self.dtype, self.text_attention, changes)
                encoder = loader.load(world, offloading)
            texts = () if offloading is not None else self._texts_ahead(encoder, requests)
            with encoding_ahead(encoder, texts, self.device) as text_encoder:
                with ReadProgress(say, "transformer", checked._transformer_bytes()):
                    transformer, rewrite = checked._load_transformer(offloading)
                with ReadProgress(say, "decoder"):
                    decoder = checked._load_decoder()
                upsampler = None
                if self.upsampler is not None:
                    with ReadProgress(say, "upsampler"):
                        upsampler = self.upsampler.load(opened.folder, self.device, self.dtype)
                interpolator = None if self.interpolation is None else self.interpolation.load(self.device)
        if world is not None:
            world.wait_for_all()
            world.enable_hang_detection(config.parallel.timeout)
        parts = PipelineParts(
            text_encoder=text_encoder,
            transformer=transformer,
            decoder=decoder,
            upsampler=upsampler,
            interpolator=interpolator,
            load_image_conditioner=self._load_image_conditioner,
            load_latent_encoder=lambda: self.model.load_latent_encoder(self.device, self.dtype),
            vocabulary=vocabulary_of(config.model_path),
            encodings=KeptResults(_MAX_KEPT_ENCODINGS if config.encoding_cache else 0),
            products=self.quantization.counter,
            graphs=graphs,
            # The others only take part in what the first process decodes; where weights are offloaded memory is short.
            decoder_graphs=make_decoder_graphs(config, self.device) if world is None and offloading is None else None,
            offloading=offloading,
            memory=checked._later_requests(offloading),
            rules_with_loras=functools.partial(rules_with_loras, opened, config, description.model_folder.digest),
            loras=LoraSwitch(
                rewrite,
                opened.lora_target(lora_names_of_families),
                self.loras,
                **({} if world is None else {"run_alike": world.run_alike}),
                rewrite_text=functools.partial(loader.rewrite, text_encoder),
            ),
        )
        pipeline = Pipeline(
            parts,
            checked.rules,
            device=self.device,
            dtype=self.dtype,
            recipe=description.to_dict(),
            mesh=self.mesh,
            remarks=(*remarks_on(description.self_checks), *checked._remarks_on_weights(transformer), *first_use),
        )
        pipeline.note_load({"prepare": read_began - began, "read": time.perf_counter() - read_began})
        return pipeline

    def _texts_ahead(self, encoder: TextEncoder, requests: Sequence[GenerationRequest]) -> list[str]:
        """Return what the first of the requests to come asks a text encoder on the device for; nothing where several
        processes ask it together, or where it reads pictures."""
        if not requests or self.world is not None:
            return []
        first = requests[0]
        about = encoder.of_request(first)
        if about is not encoder or encoder.of_negative() is not encoder:
            return []
        return texts_of([first], reads_negative=self.rules.settings(first).guidance.reads_negative)

    def _transformer_bytes(self) -> int | None:
        """Return the bytes of the files that this process reads for its transformers; None where it reads a part of
        them."""
        if self.description.degrees.tensor > 1:
            return None
        return transformer_bytes(self.model, list(self.model.modules(self.transformer)))

    def _load_transformer(self, offloading: Offloading | None) -> tuple[DiffusionTransformer, Rewrite]:
        """The transformer, and what gives it other LoRA files."""
        opened, transformer = self.model, self.transformer
        modules = opened.modules(transformer)
        if offloading is None or not offloading.plan.waits_in_files:
            load_transformer(opened, transformer, self.device, self.dtype, self.loras, offloading, self.quantization)
            in_place = functools.partial(opened.weights.rewrite, modules, dtype=self.dtype)
            return transformer, in_place if offloading is None else keeping_bytes(modules, in_place)
        homes = opened.weights.keep_in_files(modules, self.device, self.dtype, self.loras, self.quantization)
        for component, home in homes.items():
            offloading.add_transformer(component, modules[component], home)

        def rewrite(changed: object, changes: Sequence[WeightChange], kept: object) -> None:
            del changed, kept
            # Nothing is on the device while LoRA files are switched (Pipeline.set_loras).
            for home in homes.values():
                home.change(changes)

        return transformer, keeping_bytes(modules, rewrite)

    def _remarks_on_weights(self, transformer: DiffusionTransformer) -> list[str]:
        """Return remarks on quantised layers of the files, unknown to a dry run, and on what the plan chose."""
        described, plan = self.quantization.describe(self.model.modules(transformer)), self.description.memory
        notes, begin = () if plan is None else plan.demand.notes, _IN_TILES.partition("{")[0]
        remarks = [note for note in notes if note.startswith(begin)]
        for component in filter(self.model.weights.dequantizes, self.model.modules(transformer)):
            remarks.append(f"{component}: 8-bit weights, dequantised at load, as its config.json asks")
        return remarks + ([] if described in (None, self.description.quantization) else [f"quantisation: {described}"])

    def _check_attention(self) -> PreparedModel:
        """The same with every due self-check made; a failed one makes layers decide again."""
        from_first = None if self.world is None else self.world.from_first
        checker = self_checker_of(self.description.config, self.rules, self.description.degrees)
        checker = dataclasses.replace(checker, may_run=True, from_first=from_first)
        # Loading fills the transformer, so a second `load` needs another one.
        is_empty = all(parameter.is_meta for parameter in self.transformer.parameters())
        built, self_checks = checker.build_checked(
            lambda: build_attending(self.model, self.policy, self.quantization, decodes=self.tiny is None),
            lambda built: built.layers,
            Attending(self.transformer, self.decoder_attention) if is_empty else None,
        )
        layers = tuple(built.transformer.attention_layers())
        description = dataclasses.replace(
            self.description,
            rules=dataclasses.replace(self.rules, attention_layers=layers),
            attention=planned_attention(built.layers),
            self_checks=self_checks,
        )
        return dataclasses.replace(
            self, description=description, transformer=built.transformer, decoder_attention=built.decoder
        )

    def planned_to_load(self, requests: Sequence[GenerationRequest]) -> PreparedModel:
        if self.description.memory is not None:
            return self
        is_of_machine = self.device.type in ("cpu", "mps")
        if not is_planned(self.description.config, self.device) and not (
            is_of_machine and self._may_exceed_the_machine()
        ):
            return self
        if self.world is None:
            return self.planned_for(requests)
        planned: list[PreparedModel] = []

        def plan() -> str:
            planned.append(self.planned_for(requests))
            return planned[0].description.config.vae_tiling

        # All processes decode alike, whatever is free on each device.
        choice = self.world.from_first(plan)
        return planned[0] if planned else self._with_tiling(choice).planned_for(requests)

    def _may_exceed_the_machine(self) -> bool:
        """Return the answer of the first process on all of them: what is free changes while they start, and processes
        that plan apart may decode differently, each waiting for the other."""
        if self.world is None:
            return may_exceed_the_machine(self.model)
        return self.world.from_first(lambda: "yes" if may_exceed_the_machine(self.model) else "no") == "yes"

    def _later_requests(self, offloading: Offloading | None) -> LaterRequests:
        config, plan, device = self.description.config, self.description.memory, self.device
        fitting = self._fitting
        return LaterRequests(config, device, self.rules, self._demand_of, plan, self.planned, offloading, fitting)

    def _demand_of(self, planned: PlannedRequest) -> PlannedDemand | None:
        given = Alternative(self.description.config, self.dtype, planned)
        return self._with_remedies(self._alternative(given, {}))

    def _alternative(self, each: Alternative, empty: dict[str, DiffusionTransformer]) -> PlannedDemand | None:
        """Return the demand of another config, dtype and request. empty: transformers without weights that were built,
        by their quantisation; it gets the missing one. Raises what building such a transformer raises."""
        quantization = self.quantization
        if each.config.quantization != self.description.config.quantization:
            ignored = each.config.quantization_ignored_layers
            quantization = Quantization.of(self.model.family.name, each.config.quantization, ignored)
        if each.config.quantization not in empty:
            empty[each.config.quantization] = build_transformer(self.model, self.policy, quantization)
        transformer, degrees = empty[each.config.quantization], self.description.degrees
        found = demand_of(
            each.config,
            self.model,
            transformer,
            each.planned,
            each.dtype,
            degrees,
            self.device,
            quantization=quantization,
            changes=self.loras,
        )
        return self._of_processes(found)

    def _with_remedies(self, planned: PlannedDemand | None) -> PlannedDemand | None:
        if planned is None or planned.request is None:
            return planned

        # A transformer takes 0.5 s to build, and a refusal tries up to ten sizes of it.
        empty: dict[str, DiffusionTransformer] = {}

        def demand(each: Alternative) -> MemoryDemand | None:
            found = self._alternative(each, empty)
            return None if found is None else found.demand

        given = Alternative(self.description.config, self.dtype, planned.request)
        return dataclasses.replace(planned, remedies=remedies_of(given, self.model, demand))

    def _largest_demand(
        self, transformer: DiffusionTransformer, requests: Sequence[GenerationRequest]
    ) -> PlannedDemand | None:
        config, degrees = self.description.config, self.description.degrees
        found = largest_demand(
            config,
            self.model,
            transformer,
            self.rules,
            requests,
            self.dtype,
            degrees,
            self.device,
            quantization=self.quantization,
            changes=self.loras,
        )
        return self._with_remedies(self._of_processes(found))

    def _of_processes(self, planned: PlannedDemand | None) -> PlannedDemand | None:
        """With the processes of this machine, and the upsampler of a second stage and frame interpolation, which stay
        on the device as the decoder does and are counted with it."""
        if planned is None:
            return None
        demand, further = planned.demand, 0
        if self.upsampler is not None:
            further += self.upsampler.num_bytes(self.dtype)
        if self.interpolation is not None:
            further += self.interpolation.num_bytes
            if planned.request is not None and planned.request.request.interpolate is not None:
                size = planned.request.size
                # While the decoder keeps what its next frames read.
                held = demand.decode_activations + self.interpolation.activation_bytes(size.height, size.width)
                demand = dataclasses.replace(demand, decode_activations=held)
        decoder = dataclasses.replace(demand.decoder, total=demand.decoder.total + further)
        num_local = self.mesh.size if self.world is None else self.world.place.local_world_size
        demand = dataclasses.replace(demand, decoder=decoder, num_local=num_local)
        return dataclasses.replace(planned, demand=demand)

    def _fitting(self, request: GenerationRequest) -> str:
        """Return the kinds of offloading that would fit a request that ran out of memory."""
        return fitting_offloads(self._demand_of(planned_batch(self.rules, [request])), self.description, self.device)

    def _offloading(self, transfers: Transfers | None) -> Offloading | None:
        plan = self.description.memory
        if plan is None or plan.offload == "none":
            return None
        return Offloading(plan, transfers_of(self.device) if transfers is None else transfers)

    def _shortage_advice(self, advice: str) -> str:
        """Return advice for loading that ran out of memory. The plan may have counted on memory that another program
        took."""
        plan, share = self.description.memory, share_of_device(self.device)
        # What was loaded so far is counted as free: it is this process's.
        if plan is None or plan.limit is None or share is None or share >= plan.limit:
            return advice
        again = "try again" if self.description.config.offload == "auto" else "try again with --offload auto"
        return (
            f"The plan counted on {size_text(plan.limit)} of {self.device}, and other programs have left "
            f"{size_text(share)} of it since: end them, or {again}, which plans with what is free then. {advice}"
        )

    def _load_image_conditioner(self) -> ImageConditioner:
        conditioner = self.model.load_image_conditioner(self.device, self.dtype)
        conditioner = conditioner.fast() if self.description.config.vae_decode == "fast" else conditioner
        return conditioner.in_tiles(self.description.config.vae_tiling)

    def _load_decoder(self) -> LatentDecoder:
        config = self.description.config

        def load() -> LatentDecoder:
            if self.tiny is not None:
                return self.tiny.load(self.device, self.dtype)
            decoder = self.model.load_decoder(self.device, self.dtype).in_mode(config.vae_decode)
            if self.decoder_attention:
                decoder = decoder.attending(self.decoder_attention)
            return decoder.in_tiles(config.vae_tiling)

        if self.world is None:
            return load()
        decoding = self.model.family.decoding
        is_shared = decoding.is_shared or (config.vae_tiling not in ("auto", "off") and not decoding.has_exact_tiles)
        is_needed = self.world.is_first or (self.tiny is None and is_shared)
        return SharedDecoder(load() if is_needed else None, self.world)


def self_checker_of(config: RuntimeConfig, rules: RequestRules, degrees: Degrees) -> SelfChecker:
    """One that makes no check: what was kept of earlier ones is all it knows."""
    tokens = rules.num_default_tokens
    # Of one call of self-attention: a ring's part of the grid.
    num_keys = () if tokens is None else (-(-tokens // degrees.ring),)
    return SelfChecker(enabled=config.self_check, may_run=False, num_keys=num_keys)


def load_transformer(
    model: Model[Any, Any],
    transformer: DiffusionTransformer,
    device: torch.device,
    dtype: torch.dtype,
    loras: Sequence[Lora],
    offloading: Offloading | None,
    quantization: Quantization | None = None,
) -> DiffusionTransformer:
    """Read the weights, on the device or into the arenas of what is offloaded."""

    def load(room_for: RoomFor) -> None:
        model.load_transformer(transformer, device, dtype, loras, quantization, room_for)

    fill_transformer(model, transformer, offloading, load)
    return transformer


def keeping_bytes(modules: Mapping[str, nn.Module], rewrite: Rewrite) -> Rewrite:
    """`rewrite` of offloaded modules, whose weights keep the bytes that they were given room for: it raises ConfigError
    where rows that stay as they are stored would become numbers, or the other way round. modules: by component."""

    def checked(
        changed: Mapping[str, Collection[str]],
        changes: Sequence[WeightChange],
        kept: Mapping[str, dict[str, torch.Tensor]],
    ) -> None:
        for component, module in modules.items():
            if changed[component] and any(isinstance(layer, StoredLinear) for layer in module.modules()):
                raise ConfigError(
                    "lora: weights that stay as their file has them are offloaded, and rows that a LoRA changes take "
                    "other bytes: give the LoRA files when the model is loaded, or load it with --offload none"
                )
        rewrite(changed, changes, kept)

    return checked


def fill_transformer(
    model: Model[Any, Any],
    transformer: DiffusionTransformer,
    offloading: Offloading | None,
    load: Callable[[RoomFor], object],
    *,
    takes_pages: bool = False,
) -> None:
    """load: fills the weights where it is told to. takes_pages: whether one thread does (HostArena.take_pages); files
    are read by several."""
    if offloading is None:
        load(no_room)
        return
    arenas: dict[str, HostArena] = {}

    def room_for(component: str, module: nn.Module) -> MakeEmpty:
        arenas[component] = arena_for(module)
        if takes_pages:
            arenas[component].take_pages()
        return arenas[component].empty

    load(room_for)
    for component, module in model.modules(transformer).items():
        offloading.add_transformer(component, module, arenas[component])


@dataclass(frozen=True)
class Attending:
    """Parts of a model that attend by layers of ours. decoder: the layers of one that does, none of others."""

    transformer: DiffusionTransformer
    decoder: Sequence[AttentionLayer]

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """The layers in the order in which they run."""
        return (*self.transformer.attention_layers(), *self.decoder)


def build_attending(
    model: Model[Any, Any], policy: AttentionPolicy, quantization: Quantization, *, decodes: bool
) -> Attending:
    """Build the transformer without weights, and the attention of the model's own decoder if that `decodes`. Raises
    what build_transformer raises."""
    make = model.family.decoding.attention if decodes else None
    transformer = build_transformer(model, policy, quantization)
    return Attending(transformer, () if make is None else make(model.folder, policy))


def build_transformer(
    model: Model[Any, Any], policy: AttentionPolicy, quantization: Quantization
) -> DiffusionTransformer:
    try:
        transformer = model.build_transformer(policy)
        quantization.apply(model.modules(transformer))
        return transformer
    except (RuntimeError, OverflowError) as error:
        # Sizes that are valid one by one and not together: their products exceed torch's integers.
        raise ModelLoadError(
            f"{model.folder / 'transformer' / 'config.json'}: no transformer can have these sizes: {first_line(error)}"
        ) from error
