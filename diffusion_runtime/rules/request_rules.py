"""A model's rules for requests: defaults, presets, sizes, guidance, and the fields it uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.never_sparse import never_sparse
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.denoising.scheduler_trial import try_scheduler
from diffusion_runtime.errors import RequestError, shown
from diffusion_runtime.media.images import check_image, check_mask, open_picture, picture_remarks
from diffusion_runtime.media.sound_files import check_sound
from diffusion_runtime.models.reference_images import ReferenceImages, Size
from diffusion_runtime.models.sampling_presets import FewSteps, SamplingPreset, names_of, unknown_preset, with_preset
from diffusion_runtime.models.shift_choice import ShiftChoice
from diffusion_runtime.request.fields import ANY_GUIDANCE, GUIDANCE, GUIDED_CHUNKS, IMAGES, SHIFT, VIDEO
from diffusion_runtime.request.generation_request import (
    IMAGE_FIELDS,
    REQUEST_FIELDS,
    UNSET,
    VIDEO_FIELDS,
    GenerationRequest,
    image_paths,
    is_set,
    too_many_images,
)
from diffusion_runtime.request.progressive_options import LatentSpectrum, ProgressiveSettings
from diffusion_runtime.request.samplers import SAMPLERS
from diffusion_runtime.request.step_cache_options import MagCacheOptions, StepCacheSettings, TeaCachePolynomials
from diffusion_runtime.rules.batch_settings import BatchSettings, SamplingRules
from diffusion_runtime.rules.chunk_rules import check_chunks, with_guided_chunks, with_resolved_switches
from diffusion_runtime.rules.step_cache_rules import step_cache_remarks, with_fitting_step_cache
from diffusion_runtime.weights.lora.binding import Lora


@dataclass(frozen=True, kw_only=True)
class RequestRules(SamplingRules):
    """What a model says about requests: how it is sampled, its defaults and presets, whether guidance can be asked for
    at all (Model.takes_guidance), which of the fields that not every model uses it does (model_fields), which of those
    for images it needs, how it takes those to edit (references), what size follows from an image (size_of_image), and
    its attention layers, with or without weights around them, whose options may ask for a number of steps.
    sampling_presets: of its family; few_steps: what the model, or a LoRA of it, was distilled to, None for many steps.
    shift_choice: a default flow shift that is not the folder's scheduler's, None where there is no other.
    loras: the LoRA files of its transformer. spectrum: of its autoencoder's latents, None where nobody measured it.
    teacache: what TeaCache's authors published for it.
    identity: of `model_identity`, computed when a calibration is compared with it. num_blocks: of its transformer, None
    where that is not known. needs_whole_passes: whether every forward pass has to run all of its blocks, as a CUDA
    graph does.
    """

    defaults: Mapping[str, Any]
    presets: Mapping[str, Mapping[str, Any]]
    attention_layers: tuple[AttentionLayer, ...]
    takes_guidance: bool = True
    model_fields: frozenset[str] = frozenset()
    needed_images: frozenset[str] = frozenset()
    references: ReferenceImages | None = None
    size_of_image: Callable[[Size], Size] | None = None
    sampling_presets: tuple[SamplingPreset, ...] = ()
    few_steps: FewSteps | None = None
    shift_choice: ShiftChoice | None = None
    loras: tuple[Lora, ...] = ()
    spectrum: LatentSpectrum | None = None
    teacache: TeaCachePolynomials | None = None
    identity: Callable[[], Mapping[str, str]] = dict
    num_blocks: int | None = None
    needs_whole_passes: bool = False

    def resolve(self, request: GenerationRequest, preset: str | None = None) -> GenerationRequest:
        """The request with every None filled, from the preset first, then from the defaults.

        Raises RequestError for an unknown preset, sizes that do not divide, noise levels that do not fit the number of
        steps or the sampler, a value that nothing gives, or one of a field that the model does not use; ConfigError for
        attention options made for other steps; ModelLoadError when nobody names a sampler there is.
        """
        if preset is not None:
            if preset not in self.presets:
                raise RequestError(unknown_preset(preset, self.presets))
            self._refuse_without_lora(preset)
            request = with_preset(request, preset, self.presets[preset])
        own_shift = request.flow_shift
        # An image says more of the size than the model does.
        request = request.with_defaults(self._defaults_of_images(request)).with_defaults(self.defaults)
        request = request.without_seconds(self.geometry.temporal_factor)
        if request.sigmas is not None and own_shift is None:
            # They are not shifted, whatever the model's own schedule is.
            request = dataclasses.replace(request, flow_shift=1.0)
        elif own_shift is None and self.shift_choice is not None and not self.shift_choice.fits(request):
            request = dataclasses.replace(request, flow_shift=self.shift_choice.of_folder)
        if request.sampler is None:
            raise self.scheduler.unknown_class_error()
        self._refuse_unused(request)
        self._count_images(request)
        request = request.with_defaults(self._computed_defaults(request))
        settings = BatchSettings.of([request], self)
        self.geometry.sample_shape(settings.size)
        self._check_second_stage(settings)
        if self.is_causal:
            check_chunks(settings, has_two_experts="guidance_scale_2" in self.model_fields)
        request = with_resolved_switches(settings)
        if not self.takes_guidance and settings.is_guided:
            raise RequestError(
                "guidance_scale: this model was distilled to run without guidance; expected 1 or less, got "
                f"{settings.guidance_scale:g}; leave it out"
            )
        self._check_guidance_terms(settings)
        # Building the samplers raises for what they cannot do.
        settings.build_sampler()
        if self.is_causal:
            _try_first_chunk(settings)
        self._check_images(request, settings.size)
        for layer in self.attention_layers:
            layer.check_request(settings.num_steps)
        request = self._with_progressive_resolution(with_guided_chunks(request, settings))
        return with_fitting_step_cache(request, self)

    def _check_guidance_terms(self, settings: BatchSettings) -> None:
        """Raises RequestError for spatio-temporal guidance without blocks, or with some that the model does not have,
        and for a step cache that does not know the further branches."""
        terms = settings.guidance_terms
        if terms is None:
            return
        if terms.is_perturbed and not terms.stg_blocks:
            raise RequestError(
                "stg_blocks: stg_scale needs the blocks whose self-attention is skipped: --stg-blocks 28"
            )
        beyond = [block for block in terms.stg_blocks if self.num_blocks is not None and block >= self.num_blocks]
        if terms.is_perturbed and beyond:
            raise RequestError(
                f"stg_blocks: expected indices from 0 to {(self.num_blocks or 0) - 1}, the model's blocks, got "
                f"{beyond[0]}"
            )
        cache = None if settings.shared.step_cache is None else StepCacheSettings.parse(settings.shared.step_cache)
        if cache is not None and cache.decides_per_branch and terms.further_branches:
            raise RequestError(
                f"step_cache: {cache.method} is made for the two branches of classifier-free guidance, and stg_scale "
                "or modality_scale run others; use easycache, or leave one of them out"
            )

    def _check_second_stage(self, settings: BatchSettings) -> None:
        """Raises RequestError for a size that cannot be halved, and for what one schedule alone can have."""
        if not settings.second_levels:
            return
        size, field = settings.size, "--upsampler-path"
        self.geometry.check_halving(size.height, size.width, 1, field)
        self.geometry.sample_shape(settings.first_size)
        shared = settings.shared
        if settings.decides_per_sample:
            raise RequestError(f"step_cache: it goes with one stage; leave it out, or {field}")
        if shared.progressive_resolution and ProgressiveSettings.parse(shared.progressive_resolution) is not None:
            raise RequestError(f"progressive_resolution: it goes with one stage; leave it out, or {field}")

    def _count_images(self, request: GenerationRequest) -> None:
        """Raises RequestError for an image that is missing, and for more than the model takes."""
        if request.image_path is None and "image_path" in self.needed_images:
            does = f"makes {self._product} from" if self.references is None else "edits"
            raise RequestError(f"image_path: this model {does} an image; give one: --image-path FILE")
        if request.last_image_path is None and "last_image_path" in self.needed_images:
            raise RequestError(
                "last_image_path: this model makes videos between two images; give the one to end with: "
                "--last-image-path FILE"
            )
        if request.mask_path is None and "mask_path" in self.needed_images:
            raise RequestError(
                "mask_path: this model repaints a part of an image; give its mask, white where it is repainted: "
                "--mask-path FILE"
            )
        takes_several = self.references or self.control
        paths, expected = image_paths(request, "image_path"), 1 if takes_several is None else takes_several.most
        if len(paths) > expected:
            raise RequestError(too_many_images("image_path", paths, expected))

    def _check_images(self, request: GenerationRequest, size: ClipSize) -> None:
        """Raises RequestError for an image that cannot be a frame of the clip, and a sound shorter than it."""
        if request.audio_path is not None:
            check_sound(request.audio_path, "audio_path", size.num_frames / size.fps)
        if request.last_image_path is not None and size.num_frames < 2:
            if "last_image_path" in self.needed_images:
                fewest = 1 + self.geometry.temporal_factor
                raise RequestError(
                    f"num_frames: expected {fewest} or more for a video between two images, got {size.num_frames}"
                )
            raise RequestError(
                "last_image_path: a clip of one frame has no other to end with; leave it out, or give more num_frames"
            )
        self._check_frame_conditions(request, size)
        if self.control is not None:
            self.control.check(request, size)
        if self.control is not None or self.references is not None:
            # Pictures of any ratio; those to edit, `_defaults_of_images` has read.
            return
        if request.mask_path is not None and isinstance(request.image_path, str):
            check_mask(request.mask_path, request.image_path)
        for name in IMAGE_FIELDS:
            for path in image_paths(request, name):
                check_image(path, size.height, size.width, name, crf=request.image_crf or 0)

    def _check_frame_conditions(self, request: GenerationRequest, size: ClipSize) -> None:
        """Raises RequestError for images at frames that the clip does not have or that other fields name, and for what
        an image that does not count in full does not go with."""
        conditions = request.frame_conditions or ()
        name = "frame_conditions (--condition-at)"
        taken = {} if request.image_path is None else {0: "image_path"}
        if request.last_image_path is not None:
            # The first frame of the last latent.
            taken[size.num_frames - self.geometry.temporal_factor] = "last_image_path"
        for frame, _, _ in conditions:
            if frame >= size.num_frames:
                raise RequestError(
                    f"{name}: expected frames from 0 to {size.num_frames - 1}, those of the video, got {frame}"
                )
            if frame in taken:
                raise RequestError(f"{name}: frame {frame} has an image already, {taken[frame]}; leave one of them out")
        if all(strength == 1 for _, _, strength in conditions):
            return
        both = {"progressive_resolution": request.progressive_resolution, "upsampler_path": request.second_stage_sigmas}
        for field, value in both.items():
            if value is not None:
                raise RequestError(
                    f"{name}: an image with a strength below 1 is denoised with the clip, at one size; leave out "
                    f"--{field.replace('_', '-')}, or use strength 1"
                )

    def try_scheduler(self) -> None:
        """Raises ModelLoadError for scheduler settings of the folder that cannot be used. Nothing is tried for a folder
        whose scheduler class is not ours: a request may choose another one."""
        sampler = self.defaults.get("sampler")
        if sampler is None or sampler != self.scheduler.sampler:
            return
        num_steps = self.defaults.get("num_inference_steps", 2)
        flow_shift = self.defaults.get("flow_shift")
        if flow_shift is None:
            # The shift of an image of 1024 x 1024 pixels; the trial does not depend on the size.
            flow_shift = self.schedule.flow_shift(4096, num_steps) or 1.0
        try_scheduler(self.scheduler, sampler, num_steps, flow_shift, self.schedule.sigmas(num_steps))

    @property
    def takes_image(self) -> bool:
        """Whether requests may bring an image that the video starts from."""
        return "image_path" in self.model_fields

    @property
    def makes_sound(self) -> bool:
        """Whether the model generates sound."""
        return self.geometry.makes_sound

    @property
    def num_default_tokens(self) -> int | None:
        """Grid tokens of a request without sizes; None when a request must set them."""
        sizes = [self.defaults.get(name) for name in ("height", "width", "num_frames")]
        height, width, num_frames = (size if isinstance(size, int) else 0 for size in sizes)
        try:
            return self.geometry.num_tokens(height, width, num_frames)
        except RequestError:
            return None

    @property
    def is_guided_by_default(self) -> bool:
        """Whether a request without guidance values runs two branches."""
        scale = self.defaults.get("true_cfg_scale" if self.embeds_guidance else "guidance_scale")
        offset = 0.0 if self.embeds_guidance else self.guidance_offset
        return scale is not None and float(scale) + offset > 1

    def is_guided(self, request: GenerationRequest) -> bool:
        """Whether a resolved request runs two branches of guidance."""
        return BatchSettings.of([request], self).is_guided

    def batch_key(self, request: GenerationRequest) -> tuple[tuple[str, Any], ...]:
        """What the requests of one batch have in common: those whose keys are equal may be given to one `generate`.

        request: a resolved one.
        """
        return tuple(
            (name, getattr(request, name)) for name, declared in REQUEST_FIELDS.items() if not declared.differs_in_batch
        )

    @property
    def _product(self) -> str:
        return "images" if self.geometry.temporal_factor == 1 else "videos"

    def _computed_defaults(self, request: GenerationRequest) -> dict[str, Any]:
        """Values that follow from the request's other values: a flow shift that grows with the size."""
        height, width, num_frames, num_steps = (
            request.height,
            request.width,
            request.num_frames,
            request.num_inference_steps,
        )
        if height is None or width is None or num_frames is None or num_steps is None:
            return {}
        self.geometry.check(height, width, num_frames)
        if request.sigmas is not None:
            return {"flow_shift": 1.0}
        if request.second_stage_sigmas is not None:
            # Those of the first stage, whose steps it shifts.
            self.geometry.check_halving(height, width, 1, "--upsampler-path")
            try:
                self.geometry.check(height // 2, width // 2, num_frames)
            except RequestError as error:
                raise RequestError(f"{error} (the first stage halves {height} x {width}, height x width)") from error
            height, width = height // 2, width // 2
        num_tokens = self.geometry.num_tokens(height, width, num_frames)
        if request.last_image_path is not None and self.geometry.appends_last_image:
            num_tokens += self.geometry.num_tokens(height, width, 1)
        if keyframes := sum(frame > 0 for frame, _, _ in request.frame_conditions or ()):
            # One frame is no whole token where a token holds several latent frames: such models take no keyframes.
            num_tokens += keyframes * self.geometry.num_tokens(height, width, 1)
        flow_shift = self.schedule.flow_shift(num_tokens, num_steps)
        return {} if flow_shift is None else {"flow_shift": flow_shift}

    def _defaults_of_images(self, request: GenerationRequest) -> dict[str, Any]:
        """The size that the images say. Raises RequestError for an image that is missing or cannot be used."""
        paths = image_paths(request, "image_path")
        if self.references is not None:
            # Before they are read.
            self._count_images(request)
            return self.references.default_size(paths)
        if self.size_of_image is not None:
            self._count_images(request)
            width, height = open_picture(paths[0]).size
            return dict(zip(("height", "width"), self.size_of_image((height, width)), strict=True))
        return {}

    def _refuse_unused(self, request: GenerationRequest) -> None:
        """Raises RequestError for a value of a field that this model does not use."""
        for name, declared in REQUEST_FIELDS.items():
            asks = is_set(request, name) and getattr(request, name) != declared.off
            if declared.refusal is not None and name not in self.model_fields and asks:
                raise RequestError(
                    f"{name}: {declared.refusal.format(product=self._product, value=shown(getattr(request, name)))}"
                )

    def unused(self, request: GenerationRequest) -> tuple[str, ...]:
        """What was not applied of the LoRA files or of the images, what a resolved request sets beside the model's
        defaults and its generation does not use, what a few-step model was not made for, and sparse attention that
        would leave out nothing, as sentences."""
        reasons: dict[str | None, str] = {}
        if not self.is_guided(request):
            reasons[GUIDANCE] = "no second branch of guidance runs (a scale of 1 or less)"
            if BatchSettings.of([request], self).guidance_terms is None:
                reasons[ANY_GUIDANCE] = reasons[GUIDANCE]
        if GUIDANCE in reasons:
            reasons[GUIDED_CHUNKS] = reasons[GUIDANCE]
        elif request.guided_chunks is None:
            reasons[GUIDED_CHUNKS] = "every chunk is guided; give guided_chunks (--guided-chunks 1)"
        if self.geometry.temporal_factor == 1:
            reasons[VIDEO] = "this model makes images"
        if request.image_path is None and request.last_image_path is None and not request.frame_conditions:
            reasons[IMAGES] = "the request has no image"
        if request.sigmas is not None:
            reasons[SHIFT] = "sigmas are the noise levels as they run"
        computed = self._computed_defaults(request)
        of_video = () if self.control is None else VIDEO_FIELDS
        remarks = [
            *self._lora_remarks(request),
            *step_cache_remarks(request, self),
            *image_remarks(request, but=of_video),
        ]
        if self.control is not None:
            remarks += self.control.remarks(request, BatchSettings.of([request], self).size)
        for name, declared in REQUEST_FIELDS.items():
            value = getattr(request, name)
            # An empty text asks for nothing, and a value that turns a term off.
            usual = (UNSET[name], self.defaults.get(name), computed.get(name), declared.off, "")
            if declared.used_with in reasons and value not in usual:
                remarks.append(f"{name}: {shown(value)} is not used: {reasons[declared.used_with]}")
        if self.few_steps is not None:
            remark = self.few_steps.remark(request, self.is_guided(request))
            remarks += [] if remark is None else [remark]
        return (*remarks, *self._attention_remarks(request))

    def _attention_remarks(self, request: GenerationRequest) -> tuple[str, ...]:
        """Of sparse attention that a resolved request chooses and that leaves out nothing; none of a video that is made
        chunk by chunk, which has no grid of its own."""
        if self.is_causal:
            return ()
        settings = BatchSettings.of([request], self)
        size = settings.size
        grid = self.geometry.grid(self.geometry.latent_shape(size.height, size.width, size.num_frames))
        return never_sparse(self.attention_layers, grid, settings.num_steps)

    def _lora_remarks(self, request: GenerationRequest) -> list[str]:
        remarks: list[str | None] = []
        for lora in self.loras:
            remarks += lora.remarks
            # Where a preset is known for it, that says what is wrong.
            if lora.few_step_hint is not None and self.few_steps is None:
                settings = BatchSettings.of([request], self)
                remarks.append(
                    lora.few_step_hint.remark(
                        str(lora.path), settings.num_inference_steps, is_guided=settings.is_guided
                    )
                )
        return [remark for remark in remarks if remark is not None]

    def _with_progressive_resolution(self, request: GenerationRequest) -> GenerationRequest:
        """A resolved request with every option of its progressive resolution spelled out, as a recipe has it.

        Raises RequestError where it cannot be run.
        """
        text = request.progressive_resolution
        progressive = None if text is None else ProgressiveSettings.parse(text)
        if progressive is None:
            return request
        field, step_cache = "progressive_resolution", request.step_cache
        if self.references is not None and request.image_path is not None:
            raise RequestError(
                f"{field}: an image to edit has one size, which the smaller latents do not; leave it out"
            )
        if self.geometry.makes_sound:
            raise RequestError(f"{field}: latents that hold sound as well cannot be halved; leave it out")
        if request.sampler is not None and not _changes_size(request.sampler):
            others = " or ".join(filter(_changes_size, SAMPLERS))
            raise RequestError(f"{field}: {request.sampler} cannot change the size; leave it out, or use {others}")
        cache = None if step_cache is None else StepCacheSettings.parse(step_cache)
        if cache is not None and isinstance(cache.options, MagCacheOptions):
            raise RequestError(f"{field}: magcache is calibrated at one size; use another step_cache, or leave one out")
        if progressive.options.spectrum is None:
            if self.spectrum is None:
                raise RequestError(
                    f"{field}: the spectrum of this model's latents is not known; say it, "
                    f"{progressive.method}:A=...,beta=...; `diffusion-runtime calibrate` measures it"
                )
            progressive = progressive.with_spectrum(self.spectrum)
        request = dataclasses.replace(request, progressive_resolution=progressive.text)
        settings = BatchSettings.of([request], self)
        self.geometry.check_halving(settings.size.height, settings.size.width, progressive.options.levels)
        settings.stages()
        return request

    def _refuse_without_lora(self, name: str) -> None:
        preset = next((each for each in self.sampling_presets if each.name == name), None)
        if preset is None or preset.needs_lora is None or self.presets[name] != preset.request:
            return
        if self.few_steps is None or preset not in self.few_steps.presets:
            raise RequestError(
                f"preset: {name} needs the LoRA {preset.needs_lora}, which is not loaded: "
                f"load_pipeline({preset.model!r}, lora=[{preset.needs_lora!r}]), or --lora {preset.needs_lora}"
            )

    def sampling_preset(self, request: GenerationRequest) -> str | None:
        """The name of the sampling preset whose values a resolved request has, of several in a row; None for none."""
        return ", ".join(names_of(self._matching_presets(request))) or None

    def sampling_note(self, request: GenerationRequest) -> str | None:
        """Names the sampling preset that a resolved request has, what recognised it, and whose flow shift runs; None
        where the folder alone says how it is sampled."""
        notes: list[str] = []
        found, distilled = self._matching_presets(request), self.few_steps
        if found:
            is_recognised = distilled is not None and not set(names_of(found)).isdisjoint(names_of(distilled.presets))
            because = f" ({distilled.because})" if distilled is not None and is_recognised else ""
            notes.append(f"sampling preset: {' = '.join(names_of(found))}{because}")
        if self.shift_choice is not None:
            computed = self._computed_defaults(request).get("flow_shift")
            notes += filter(None, [self.shift_choice.note(request, computed)])
        return "; ".join(notes) or None

    def _matching_presets(self, request: GenerationRequest) -> tuple[SamplingPreset, ...]:
        return tuple(preset for preset in self.sampling_presets if preset.matches(request))


def image_remarks(request: GenerationRequest, *, but: Iterable[str] = ()) -> list[str]:
    """What of its images a request does not use as it stands there. but: fields that may name videos."""
    names = [name for name in IMAGE_FIELDS if name not in frozenset(but)]
    return [remark for name in names for path in image_paths(request, name) for remark in picture_remarks(path, name)]


def _try_first_chunk(settings: BatchSettings) -> None:
    """Raises what building the first chunk's sampler does, and names the field where that chunk has one of its own."""
    own = settings.shared.first_chunk_sampler
    try:
        settings.build_sampler(chunk=0)
    except RequestError as error:
        if own in (None, settings.sampler):
            raise
        raise RequestError(
            f"first_chunk_sampler: {error}; or use --first-chunk-sampler {settings.sampler}, as of the other chunks"
        ) from None


def _changes_size(sampler: str) -> bool:
    """Whether a sampler goes on at another size between two steps: one that is a schedule of single predictions."""
    declared = SAMPLERS[sampler]
    return not declared.adds_noise and declared.num_predictions_per_step == 1
