"""A model's rules for requests: their order, from a request to what is run, and what is said of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.never_sparse import never_sparse
from diffusion_runtime.attention.unread_gates import unread_gates
from diffusion_runtime.denoising.interface import Sampler
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.sampling import Sampling
from diffusion_runtime.models.sampling_presets import names_of
from diffusion_runtime.request.generation_request import REQUEST_FIELDS, GenerationRequest
from diffusion_runtime.request.progressive_options import LatentSpectrum, ProgressiveSettings
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.chunk_rules import check_chunks, chunk_values, try_first_chunk
from diffusion_runtime.rules.combinations import check_combinations
from diffusion_runtime.rules.draft import Draft, filled
from diffusion_runtime.rules.features import ChosenRequest
from diffusion_runtime.rules.guidance import check_guidance
from diffusion_runtime.rules.images import ImageRules
from diffusion_runtime.rules.initial_picture import (
    check_given,
    check_initial,
    default_strength,
    initial_note,
    initial_remarks,
    size_of_picture,
)
from diffusion_runtime.rules.interpolation import check_interpolation, interpolation_note, unused_interpolation
from diffusion_runtime.rules.longer_clips import (
    check_segments_asked,
    longer_clip_remarks,
    riflex_values,
    segment_values,
    window_values,
)
from diffusion_runtime.rules.predicted_length import BOUNDS, LengthBounds
from diffusion_runtime.rules.presets import PresetRules
from diffusion_runtime.rules.sizes import (
    check_keyframes,
    check_second_stage,
    frame_rule_of,
    shift_of_size,
)
from diffusion_runtime.rules.step_cache_rules import StepCacheRules
from diffusion_runtime.rules.stop_rules import check_stop
from diffusion_runtime.rules.used_fields import refuse_unused, unused_values
from diffusion_runtime.weights.lora.binding import Lora


@dataclass(frozen=True, kw_only=True)
class RequestRules:
    """Rules of one model for requests. sampling, inputs: the model, as far as it is sampled and takes images.
    defaults: request values; presets: by name. model_fields: those of the fields that not every model uses which it
    does. attention_layers: with or without weights around them; their options may ask for a number of steps. loras: the
    LoRA files of its transformer. spectrum: of its autoencoder's latents, None where nobody measured it. num_blocks: of
    its transformer, None where that is not known. text_roles: as of DiffusionTransformer. interpolation: the version of
    RIFE that makes frames between those of the model, None without its weights."""

    sampling: Sampling
    inputs: ImageInputs = field(default_factory=ImageInputs)
    defaults: Mapping[str, Any]
    presets: Mapping[str, Mapping[str, Any]]
    preset_rules: PresetRules = field(default_factory=PresetRules)
    step_caches: StepCacheRules = field(default_factory=StepCacheRules)
    model_fields: frozenset[str] = frozenset()
    attention_layers: tuple[AttentionLayer, ...] = ()
    loras: tuple[Lora, ...] = ()
    spectrum: LatentSpectrum | None = None
    num_blocks: int | None = None
    text_roles: frozenset[str] = frozenset()
    interpolation: str | None = None

    def resolve(self, request: GenerationRequest, preset: str | None = None) -> GenerationRequest:
        """Return the request with every None filled, from the preset first, then from the defaults.

        Raises RequestError for an unknown preset, sizes that do not divide, noise levels that do not fit the number of
        steps or the sampler, a value that nothing gives, or one of a field that the model does not use; ConfigError for
        attention options made for other steps; ModelLoadError when nobody names a sampler there is.
        """
        settings = self.settings(self._filled(request, preset))
        self.sampling.geometry.sample_shape(settings.size)
        check_keyframes(settings.sizes)
        check_second_stage(settings.sizes)
        check_interpolation(settings)
        seeds = settings.shared.segment_seeds or ()
        check_segments_asked(settings)
        settings.segments.check(self.sampling.geometry.frame_rule, len(seeds))
        check_combinations("requests", self._chosen(settings))
        if self.sampling.is_causal:
            check_chunks(settings)
        values = chunk_values(settings) if self.sampling.is_causal else window_values(settings)
        values |= segment_values(settings)
        values |= riflex_values(settings, self.defaults)
        roles = {each.layer.role for each in self.attention_layers}
        check_guidance(settings.guidance, self.num_blocks, roles, self.text_roles)
        values |= settings.guidance.values
        # Building the samplers raises for what they cannot do.
        sampler = settings.build_sampler()
        if self.sampling.is_causal:
            try_first_chunk(settings)
        self._images.check(settings)
        check_initial(settings)
        for layer in self.attention_layers:
            layer.decisions.check_request(settings.num_steps)
        check_stop(settings, self.attention_layers)
        values |= progressive_values(settings, sampler, self.spectrum)
        values |= self.step_caches.values(settings.shared, self.num_blocks, is_distilled=self._is_distilled)
        return dataclasses.replace(settings.shared, **values)

    def _filled(self, request: GenerationRequest, preset: str | None) -> GenerationRequest:
        """Fill in the request, each step below what the steps before it set."""
        draft = Draft(request)
        if preset is not None:
            self.preset_rules.fill(draft, preset, self.presets)
        own = frozenset(draft.values)
        # An image says more of the size than the model does.
        self._images.fill(draft)
        if "init_path" in self.model_fields:
            draft.fill(size_of_picture(draft, self.defaults, self.sampling.geometry))
        draft.fill(default_strength(draft, own))
        draft.fill(self.defaults)
        draft.settle_length(frame_rule_of(draft, self.sampling))
        self.preset_rules.choose_shift(draft, own)
        if draft.sampler is None:
            raise self.sampling.scheduler.unknown_class_error()
        given = frozenset() if self.interpolation is None else frozenset(["interpolate"])
        refuse_unused(draft, self.model_fields | given, self.sampling.product)
        check_given(draft, self.inputs.takes_masks, takes_pictures="init_path" in self.model_fields)
        self._images.count(draft)
        draft.fill(shift_of_size(draft, self.sampling))
        return draft.request()

    def leaves_length_open(self, request: GenerationRequest) -> bool:
        """Return whether the length of a resolved request is chosen for its prompt; num_frames is the longest."""
        return request.max_seconds is not None

    def of_length(self, request: GenerationRequest, seconds: float) -> GenerationRequest:
        """Return a resolved request that leaves its length open with that for a prediction. What followed from the
        longest length follows from this one. Raises what `resolve` raises."""
        number = self._bounds(request).num_frames(seconds)
        of_longest = shift_of_size(request, self.sampling)
        again = [name for name, value in of_longest.items() if getattr(request, name) == value]
        changes: dict[str, Any] = {**dict.fromkeys((*BOUNDS, *again)), "num_frames": number}
        return self.resolve(dataclasses.replace(request, **changes))

    def _bounds(self, request: GenerationRequest) -> LengthBounds:
        least, most = filled(request.min_seconds), filled(request.max_seconds)
        return LengthBounds(least, most, filled(request.fps), frame_rule_of(request, self.sampling))

    def unused(self, request: GenerationRequest) -> tuple[str, ...]:
        """Return what was not applied of the LoRA files or of the images, what a resolved request sets beside the
        model's defaults and its generation does not use, a length that is left open, what a few-step
        model was not made for, and sparse attention that would leave out nothing, as sentences."""
        settings = self.settings(request)
        return (
            *self._lora_remarks(settings),
            *self.step_caches.remarks(settings, has_loras=bool(self.loras)),
            *self._images.remarks(settings),
            *unused_values(settings, self.defaults, self.model_fields),
            *self._open_values(request),
            *self.preset_rules.remarks(settings),
            *settings.segments.remarks,
            *initial_remarks(settings),
            *longer_clip_remarks(settings),
            *unused_interpolation(settings, self.interpolation),
            *self._attention_remarks(settings),
        )

    def settings(self, *batch: GenerationRequest) -> BatchSettings:
        """Return the values that resolved requests share. Raises what `BatchSettings.of` raises."""
        return BatchSettings.of(batch, self.sampling)

    @property
    def makes_sound(self) -> bool:
        """True where the model generates sound."""
        return self.sampling.geometry.makes_sound

    @property
    def wanted_images(self) -> frozenset[str]:
        """Request fields of images that the model does not do without, or is made for."""
        return self.inputs.wanted

    @property
    def num_default_tokens(self) -> int | None:
        """Grid tokens of a request without sizes; None when a request must set them."""
        sizes = [self.defaults.get(name) for name in ("height", "width", "num_frames")]
        height, width, num_frames = (size if isinstance(size, int) else 0 for size in sizes)
        try:
            return self.sampling.geometry.num_tokens(height, width, num_frames)
        except RequestError:
            return None

    def is_guided(self, request: GenerationRequest) -> bool:
        """Return whether a resolved request runs two branches of guidance."""
        return self.settings(request).guidance.is_guided

    def batch_key(self, request: GenerationRequest) -> tuple[tuple[str, Any], ...]:
        """Return what the requests of one batch have in common: those whose keys are equal may be given to one
        `generate`.

        request: a resolved one.
        """
        return tuple(
            (name, getattr(request, name)) for name, declared in REQUEST_FIELDS.items() if not declared.differs_in_batch
        )

    def sampling_preset(self, request: GenerationRequest) -> str | None:
        """Return the name of the sampling preset whose values a resolved request has, of several in a row; None for
        none."""
        return ", ".join(names_of(self.preset_rules.matching(request))) or None

    def sampling_note(self, request: GenerationRequest) -> str | None:
        """Return what `PresetRules.note` says of a resolved request, the steps that run from init_path, its segments,
        and how many frames its file has where these are not the model's; None for nothing."""
        settings = self.settings(request)
        notes = (
            self.preset_rules.note(request, self.sampling),
            initial_note(settings),
            settings.segments.note,
            interpolation_note(settings, self.interpolation),
        )
        return "; ".join(note for note in notes if note is not None) or None

    @property
    def _images(self) -> ImageRules:
        return ImageRules(self.inputs, self.sampling)

    @property
    def _is_distilled(self) -> bool:
        return self.preset_rules.few_steps is not None

    def _chosen(self, settings: BatchSettings) -> ChosenRequest:
        return ChosenRequest(
            settings,
            edits_images=self.inputs.references is not None,
            takes_masks=self.inputs.takes_masks,
            replays_passes=self.step_caches.needs_whole_passes,
            has_two_experts="guidance_scale_2" in self.model_fields,
        )

    def _attention_remarks(self, settings: BatchSettings) -> tuple[str, ...]:
        """Name gates that nothing reads, and sparse attention that leaves out nothing; none of that of a video that is
        made chunk by chunk, which has no grid of its own."""
        gates = unread_gates(self.attention_layers, settings.num_steps)
        if self.sampling.is_causal:
            return gates
        size, geometry = settings.size, self.sampling.geometry
        size = settings.of_window(size)
        grid = geometry.grid(geometry.latent_shape(size.height, size.width, size.num_frames))
        return (*gates, *never_sparse(self.attention_layers, grid, settings.num_steps))

    def _open_values(self, request: GenerationRequest) -> list[str]:
        if not self.leaves_length_open(request):
            return []
        return [
            f"num_frames: chosen for the prompt when it is encoded, for {request.min_seconds:g} to "
            f"{request.max_seconds:g} s; everything here is said of the longest, {request.num_frames}; --num-frames or "
            "--seconds sets it"
        ]

    def _lora_remarks(self, settings: BatchSettings) -> list[str]:
        remarks: list[str | None] = []
        for lora in self.loras:
            remarks += lora.remarks
            # Where a preset is known for it, that says what is wrong.
            if lora.few_step_hint is not None and not self._is_distilled:
                is_guided = settings.guidance.is_guided
                remarks.append(
                    lora.few_step_hint.remark(str(lora.path), settings.num_inference_steps, is_guided=is_guided)
                )
        return [remark for remark in remarks if remark is not None]


def progressive_values(settings: BatchSettings, sampler: Sampler, spectrum: LatentSpectrum | None) -> dict[str, Any]:
    """Return the request values with every option of progressive resolution spelled out. sampler: of the settings.
    spectrum: of the autoencoder's latents, None where nobody measured it.

    Raises RequestError where it cannot be run.
    """
    text = settings.shared.progressive_resolution
    progressive = None if text is None else ProgressiveSettings.parse(text)
    if progressive is None:
        return {}
    if progressive.options.spectrum is None:
        if spectrum is None:
            raise RequestError(
                "progressive_resolution: the spectrum of this model's latents is not known; say it, "
                f"{progressive.method}:A=...,beta=...; `diffusion-runtime calibrate` measures it"
            )
        progressive = progressive.with_spectrum(spectrum)
    size, geometry = settings.size, settings.sampling.geometry
    geometry.check_halving(size.height, size.width, progressive.options.levels)
    settings.sizes.stages_of(progressive, sampler)
    return {"progressive_resolution": progressive.text}
