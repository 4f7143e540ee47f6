"""Memory that a model and a request take, by part: weights of tensors on the meta device, activations counted there.

Nothing is read but json and the heads of weight files: a folder whose weights are still to be downloaded has a demand.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.context import AttentionContext, RequestCache
from diffusion_runtime.attention.normalized_guidance import NormalizedGuidance
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import read_index
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.decoders.autoencoder import COMPONENT as AUTOENCODER
from diffusion_runtime.decoders.autoencoder import DiffusersComponent
from diffusion_runtime.decoders.decoder_memory import decoding_bytes
from diffusion_runtime.denoising.chunks import cache_passes, cached_tokens, chunks_of, longest_pass
from diffusion_runtime.denoising.context_windows import windows_of
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.layers.modulation_rows import plan_steps, table_bytes
from diffusion_runtime.memory.live_bytes import kept_bytes, peak_bytes
from diffusion_runtime.memory.plan import MemoryDemand, PartSize
from diffusion_runtime.memory.weight_unit import MIN_BLOCKS, blocks_of, largest_held_bytes, num_bytes_of, streamed_bytes
from diffusion_runtime.models.cache_memory import cache_bytes
from diffusion_runtime.models.declaration import TextShapes
from diffusion_runtime.models.driving_video import DrivingVideo
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.image_control import ImageControl
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer, GivenMedia, ImageCondition
from diffusion_runtime.models.reference_media import ReferenceShape
from diffusion_runtime.models.text_encoder_files import CONNECTORS, encoder_shapes, why_whole
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths
from diffusion_runtime.text_encoders.encoder_size import tensor_sizes_of
from diffusion_runtime.text_encoders.interface import Conditions, TextStream
from diffusion_runtime.weights.checkpoint import WeightChange
from diffusion_runtime.weights.quantization import Quantization

_META = torch.device("meta")
# Some transformers take the timestep that a step leads to.
_LAST_STEP = StepInfo(next_timestep=0.0)
# Copies that samplers with a history hold besides the latents, in float32: UniPC's three predictions, noise and sample.
SAMPLER_COPIES = 6
# Parts of a decoder that encode: they are loaded when a request brings an image.
_ENCODER_PARTS = ("encoder.", "quant_conv.")
# Numbers per unit of width in one layer of a language model, and in the states kept for the transformer.
_NUM_TEXT_HELD = 12


@dataclass(frozen=True)
class PlannedRequest:
    """The facts of a request that decide about memory. num_samples: in one forward pass; is_guided: whether it has two
    branches, is_batched: whether both go through one forward pass. request: resolved. further_branches: of guidance in
    addition, a forward pass each. attention_guidance: of every pass but the unconditional branch's, which then has two
    texts for each sample; None without."""

    size: ClipSize
    num_samples: int
    is_guided: bool
    is_batched: bool
    request: GenerationRequest
    guidance: float | None = None
    further_branches: tuple[str, ...] = ()
    attention_guidance: NormalizedGuidance | None = None

    def sizes_of(self, branch: str, *, text_is_keys: bool) -> PassSizes:
        """Return the sizes of a forward pass of a guidance branch. text_is_keys: as of DiffusionTransformer."""
        if branch == "both":
            return PassSizes(2 * self.num_samples, 2 * self.num_samples)
        if self.attention_guidance is None or branch == "uncond":
            return PassSizes(self.num_samples, self.num_samples)
        num_texts = 2 * self.num_samples
        return PassSizes(self.num_samples if text_is_keys else num_texts, num_texts, self.attention_guidance)


@dataclass(frozen=True)
class PassSizes:
    """Sizes of a forward pass. num_samples, num_texts: of its latents and of its text. guidance: as of
    AttentionContext."""

    num_samples: int
    num_texts: int
    guidance: NormalizedGuidance | None = None


def memory_demand(
    model: Model[Any, Any],
    transformer: DiffusionTransformer,
    dtype: torch.dtype,
    planned: PlannedRequest,
    *,
    changes: Sequence[WeightChange] = (),
    quantization: Quantization | None = None,
    num_sharers: int = 1,
    vae_tiling: str = "auto",
    copies_layout: bool = False,
) -> MemoryDemand:
    """Return the memory demand of a model and a request.

    transformer: on the meta device, with the layers that `quantization` quantises; it gets those that its files have
    quantised (TransformerWeights.expect_stored). changes: such as LoRA files. num_sharers: processes that share the
    tokens. vae_tiling: as of RuntimeConfig. copies_layout: as in LiveBytes, of a decoder of diffusers'.
    """
    modules = model.modules(transformer)
    model.weights.expect_stored(modules, dtype, changes, quantization)
    shapes = model.family.text.shapes(model.folder, model.config)
    notes: list[str] = []
    text, whole_text = _text_size(model, shapes, dtype, notes)
    decoder, decode_activations = _decoder_size(model, dtype, planned, vae_tiling, copies_layout=copies_layout)
    # An expert's tensors of the prompt are dropped when the next one takes over, unless every chunk has both.
    num_others = len(modules) - 1 if model.sampling.is_causal else 0
    widest = max((dim for _, dim in shapes.streams), default=0)
    tokens = sum(tokens for tokens, _ in shapes.streams)
    tokens += sum(each.num_text_tokens for each in _references(model, planned))
    steps = [
        step_demand(model, module, shapes, dtype, planned, num_sharers, num_others)
        for module in modules.values()
        if isinstance(module, DiffusionTransformer)
    ]
    # While rows are computed, weights that are held for them take the place of a step's activations.
    held = max(each.rows for each in steps) + max(map(largest_held_bytes, modules.values()))
    return MemoryDemand(
        text=text,
        transformers=tuple(part_size(component, module) for component, module in modules.items()),
        decoder=decoder,
        text_activations=_NUM_TEXT_HELD * tokens * widest * dtype.itemsize,
        step_activations=max(held, *(each.total for each in steps))
        + _cache_bytes(model, modules.values(), dtype, planned) // num_sharers,
        decode_activations=decode_activations,
        notes=tuple(notes),
        modulation_rows=max(each.rows for each in steps),
        whole_text=whole_text,
    )


def part_size(name: str, module: nn.Module) -> PartSize:
    """Return the size of a transformer, by its blocks."""
    blocks = [streamed_bytes(block) for block in blocks_of(module)]
    return PartSize(name, num_bytes_of(module), tuple(own for own, _ in blocks), sum(apart for _, apart in blocks))


@dataclass(frozen=True)
class StepDemand:
    """Bytes in addition to the weights. rows: the part of the total for the rows of modulation of all steps."""

    total: int
    rows: int


def step_demand(
    model: Model[Any, Any],
    transformer: DiffusionTransformer,
    shapes: TextShapes,
    dtype: torch.dtype,
    planned: PlannedRequest,
    num_sharers: int = 1,
    num_others: int = 0,
) -> StepDemand:
    """Return the bytes that the largest step has alive at once: one forward pass of every branch, with what the first
    ones keep for later steps, and the sampler's latents. num_others: further experts that keep as much."""
    first = ("cond",) if not planned.is_guided else ("both",) if planned.is_batched else ("cond", "uncond")
    branches = (*first, *planned.further_branches)
    sizes = {branch: planned.sizes_of(branch, text_is_keys=transformer.text_is_keys) for branch in branches}
    whole: tuple[int, ...] = model.geometry.sample_shape(_denoised_size(model, planned))
    sample = _forward_shape(model, planned)
    if model.sampling.is_causal:
        # A pass has a part of the frames; those that are done are held meanwhile.
        longest = longest_pass(planned.request, chunks_of(planned.request, whole[1]))
        sample = (whole[0], longest, *whole[2:])
    most = max(each.num_samples for each in sizes.values())
    latents = torch.empty(most, *sample, dtype=dtype, device=_META)
    inputs = {branch: _inputs(model, shapes, dtype, planned, each) for branch, each in sizes.items()}
    timestep = torch.empty(len(latents), device=_META)
    steps = [StepInfo(timestep=float(each), next_timestep=0.0) for each in range(_num_steps(planned))]
    rows = 0

    def step() -> RequestCache:
        nonlocal rows
        state = RequestCache()
        plan_steps(state, steps)
        for branch, each in sizes.items():
            now, count = dataclasses.replace(steps[0], branch=branch), each.num_samples
            context = AttentionContext(step=now, state=state, guidance=each.guidance, shapes_only=True)
            transformer(latents[:count], timestep[:count], inputs[branch], context)
        rows = table_bytes(state)
        return state

    counted = peak_bytes(step, _META)
    kept = num_others * kept_bytes(step, _META) if num_others else 0
    # What a sampler has of a chunk, or of the whole clip; and the clip, which chunks or windows are put together to.
    held = SAMPLER_COPIES * math.prod(sample if model.sampling.is_causal else whole)
    held += math.prod(whole) if sample != whole else 0
    # Every process that shares the tokens has all rows.
    total = (counted - rows) // num_sharers + rows + kept + held * planned.num_samples * 4
    return StepDemand(total, rows)


def _num_steps(planned: PlannedRequest) -> int:
    return planned.request.num_inference_steps or 1


def _cache_bytes(
    model: Model[Any, Any], modules: Iterable[nn.Module], dtype: torch.dtype, planned: PlannedRequest
) -> int:
    """Return the bytes of the key-value cache of all branches and experts; 0 for a clip that is made at once."""
    if not model.sampling.is_causal:
        return 0
    shape, request = model.geometry.sample_shape(planned.size), planned.request
    chunks = chunks_of(request, shape[1])
    passes = cache_passes(request, chunks, model.geometry.grid(shape), model.sampling.history, tuple(shape))
    num_tokens = cached_tokens(passes, request, chunks, is_guided=planned.is_guided)
    return cache_bytes(modules, request, num_tokens, planned.num_samples, dtype)


def forward_on_meta(
    model: Model[Any, Any],
    transformer: DiffusionTransformer,
    dtype: torch.dtype,
    planned: PlannedRequest,
    cache: FrameCache | None = None,
) -> Callable[[], None]:
    """Return a function that runs one forward pass of one guidance branch, or of both where they are batched, on the
    meta device; attention layers make outputs and compute nothing. The first call computes what depends on the text
    alone, too. cache: of a pass over some frames of a video that is made chunk by chunk, in the phase of its plan."""
    is_commit = cache is not None and cache.plan.phase == "commit"
    step = dataclasses.replace(_LAST_STEP, phase="commit") if is_commit else _LAST_STEP
    shapes, state = model.family.text.shapes(model.folder, model.config), RequestCache()
    branch = "both" if planned.is_guided and planned.is_batched else "cond"
    sizes = planned.sizes_of(branch, text_is_keys=transformer.text_is_keys)
    sample = _forward_shape(model, planned)
    if cache is not None:
        sample = (sample[0], cache.plan.num_frames, *sample[2:])
    latents = torch.empty(sizes.num_samples, *sample, dtype=dtype, device=_META)
    timestep = torch.empty(sizes.num_samples, device=_META)
    inputs = _inputs(model, shapes, dtype, planned, sizes)

    def run() -> None:
        context = AttentionContext(step=step, state=state, cache=cache, guidance=sizes.guidance, shapes_only=True)
        with torch.no_grad():
            transformer(latents, timestep, inputs, context)

    return run


def _inputs(
    model: Model[Any, Any], shapes: TextShapes, dtype: torch.dtype, planned: PlannedRequest, sizes: PassSizes
) -> DenoiserInputs:
    def empty(*shape: int, count: int = sizes.num_samples) -> torch.Tensor:
        return torch.empty(count, *shape, dtype=dtype, device=_META)

    def of_text(*shape: int) -> torch.Tensor:
        return empty(*shape, count=sizes.num_texts)

    (first, *others), more = shapes.streams, shapes.tokens_per_image * _num_references(model, planned)
    references = _references(model, planned)
    more += sum(each.num_text_tokens for each in references)
    shaped = ((first[0] + more, first[1]), *others)
    streams = [TextStream(of_text(*shape), (shape[0],) * sizes.num_texts) for shape in shaped]
    text = Conditions.of(
        streams[0].embeddings,
        streams[0].lengths,
        pooled=None if shapes.pooled_dim is None else of_text(shapes.pooled_dim),
        further=streams[1:],
        picture_places=(0,) * _num_references(model, planned),
    )
    image = None
    if _takes_image(model, planned) or planned.request.generated_keyframes:
        size = _denoised_size(model, planned)
        channels, frames, height, width = model.geometry.latent_shape(size.height, size.width, size.num_frames)
        embeddings = None if shapes.image is None else empty(*shapes.image)
        of_frames = (shapes.condition_channels, frames) if shapes.condition_channels else (channels, 1)
        # Further reference images, as large as the output.
        further = [empty(channels, 1, height, width)] * (_num_references(model, planned) - 1)
        keyframes: list[tuple[int, float]] = []
        if model.geometry.appends_last_image:
            request = planned.request
            num_given = len(request.frame_conditions or ()) + (request.last_image_path is not None)
            keyframes = [(1, 1.0)] * (num_given + len(request.generated_keyframes))
            further = [empty(channels, 1, height, width)] * len(keyframes)
        control = model.sampling.control
        if isinstance(control, DrivingVideo):
            further += [empty(*shape) for shape in control.further_shapes(planned.request, planned.size)]
        image = ImageCondition(empty(*of_frames, height, width), embeddings, tuple(further), places=tuple(keyframes))
    elif references:
        none = empty(model.geometry.num_channels, 0, 1, 1)
        image = ImageCondition(none, media=tuple(_given(model, each, empty) for each in references))
    request, prompt = planned.request, None
    if isinstance(model.sampling.control, ImageControl):
        # A step in which the ControlNet runs; of two branches in one pass, it runs for one.
        request = dataclasses.replace(request, control_guidance_start=None, control_guidance_end=None)
        prompt = Conditions.of(text.embeddings[: planned.num_samples], text.lengths[: planned.num_samples])
    return DenoiserInputs(text, planned.size, planned.guidance, image, request, prompt)


def _references(model: Model[Any, Any], planned: PlannedRequest) -> list[ReferenceShape]:
    """Return the sizes of a request's references of several kinds, of a model that takes them."""
    media = model.inputs.media
    return [] if media is None else media.shapes(planned.request, planned.size)


def _given(model: Model[Any, Any], shape: ReferenceShape, empty: Callable[..., torch.Tensor]) -> GivenMedia:
    geometry = model.geometry
    pictures = None if shape.pictures is None else empty(geometry.num_channels, *shape.pictures)
    if not shape.num_moments:
        return GivenMedia(pictures)
    return GivenMedia(pictures, empty(geometry.num_audio_channels, shape.num_moments, geometry.num_audio_bins))


def _denoised_size(model: Model[Any, Any], planned: PlannedRequest) -> ClipSize:
    """Return the clip's size, with the reference images of a model with control blocks before it."""
    control = model.sampling.control
    num_before = 0 if control is None else control.num_references(planned.request)
    num_frames = planned.size.num_frames + num_before * model.geometry.temporal_factor
    return dataclasses.replace(planned.size, num_frames=num_frames)


def _forward_shape(model: Model[Any, Any], planned: PlannedRequest) -> tuple[int, ...]:
    """Return the shape of the latents of one forward pass: of the clip, or of a context window."""
    shape: tuple[int, ...] = model.geometry.sample_shape(_denoised_size(model, planned))
    windows = windows_of(planned.request, model.geometry) if model.sampling.takes_windows else None
    return shape if windows is None else (shape[0], windows.length, *shape[2:])


def _num_references(model: Model[Any, Any], planned: PlannedRequest) -> int:
    """Return the number of images to edit, of a model that edits; those it requires where a request names none."""
    if model.inputs.references is None:
        return 0
    return max(len(image_paths(planned.request, "image_path")), int(_takes_image(model, planned)))


def _takes_image(model: Model[Any, Any], planned: PlannedRequest) -> bool:
    """Return whether the request starts from an image, given or needed, or the model has control blocks."""
    is_needed = model.sampling.control is not None or model.inputs.images.get("image_path", False)
    given = (planned.request.image_path, planned.request.frame_conditions)
    return is_needed or any(value is not None for value in given)


def _text_size(
    model: Model[Any, Any], shapes: TextShapes, dtype: torch.dtype, notes: list[str]
) -> tuple[PartSize, str]:
    """Return the size of the transformers encoders that a prompt goes through, and of diffusers' connectors to the
    transformer, with the layers of the largest as blocks; and MemoryDemand.whole_text."""
    total: int = 0
    # The largest one: (numbers of its layers together, of each, its component).
    largest: tuple[int, tuple[int, ...], str] = (0, (), "")
    whole_text = why_whole(dtype)
    for component, (library, class_name) in _components(model):
        if library != "transformers" or not component.startswith("text_encoder"):
            continue
        is_first = component == "text_encoder"
        try:
            sizes = _shapes_of(model, component, class_name)
        except ModelLoadError as error:
            notes.append(f"{component} is not counted: {error}")
            continue
        numbers, layers = tensor_sizes_of(sizes, shapes.num_layers if is_first else None, sees=is_first and shapes.sees)
        total += numbers
        largest = max(largest, (sum(layers), layers, component))
    _, layers, component = largest
    if len(layers) < MIN_BLOCKS:
        layers, whole_text = (), whole_text or f"{component or 'it'} has no layers that are known here"
    others = model.family.files.components_called(CONNECTORS)
    connectors = sum(tensor.num_bytes(dtype) for each in others for tensor in each.tensors(model.folder))
    itemsize = dtype.itemsize
    return (
        PartSize("text_encoder", total * itemsize + connectors, tuple(layer * itemsize for layer in layers)),
        whole_text,
    )


def _shapes_of(model: Model[Any, Any], component: str, class_name: str) -> Mapping[str, int]:
    """Return the numbers of each tensor: of the weight files where they are here, of the config where not."""
    shapes = encoder_shapes(model.folder / component, class_name)
    return {name: math.prod(shape) for name, shape in shapes.items()}


def _components(model: Model[Any, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    for component, entry in read_index(model.folder).items():
        if isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry):
            yield component, (entry[0], entry[1])


def _decoder_size(
    model: Model[Any, Any], dtype: torch.dtype, planned: PlannedRequest, vae_tiling: str, *, copies_layout: bool = False
) -> tuple[PartSize, int]:
    """Return the size of the decoder's weights, with the encoder of an image where the request brings one, and the
    activations of a decode. copies_layout: as in LiveBytes."""
    takes_image = _takes_image(model, planned) or any(
        given is not None for given in (planned.request.references, planned.request.init_path)
    )
    total, activations = 0, 0
    named, size = model.named_decoder, planned.size
    if named is not None:
        total += sum(each.num_bytes(dtype) for each in named.component.tensors(model.folder))
        activations = named.num_bytes(model.folder, dtype, size.height, size.width, size.num_frames)
    for component in model.family.files.diffusers_components:
        if component.name == CONNECTORS or (named is not None and component.name == AUTOENCODER and not takes_image):
            continue
        # Measuring a module of ours needs no import of diffusers.
        own = component.build_decoding_half(model.folder)

        def dtype_of(name: str, component: DiffusersComponent = component) -> torch.dtype:
            return torch.float32 if component.stays_float32(name) else dtype

        sizes = (
            {each.name: each.num_bytes(dtype_of(each.name)) for each in component.tensors(model.folder)}
            if own is None or takes_image
            else {name: tensor.numel() * dtype_of(name).itemsize for name, tensor in own.to(dtype).state_dict().items()}
        )
        for name, num_bytes in sizes.items():
            total += 0 if name.startswith(_ENCODER_PARTS) and not takes_image else num_bytes
        if component.name == AUTOENCODER and named is None:
            module = nn.Module.to(component.build(model.folder) if own is None else own, dtype)
            frames = model.geometry.latent_shape(size.height, size.width, size.num_frames)[1]
            of_family = model.family.decoding.tiling
            tiling = None if of_family is None else of_family(module).chosen(vae_tiling)
            activations = decoding_bytes(
                module, size.height, size.width, frames, tiling=tiling, copies_layout=copies_layout
            )
    for name, (library, class_name) in _components(model):
        if takes_image and library == "transformers" and name == "image_encoder":
            total += sum(_shapes_of(model, name, class_name).values()) * dtype.itemsize
    return PartSize("decoder", total), activations
