"""One request out of what a workflow shows: its stages of samplers, their sizes, and their noise."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.denoising.named_schedules import NoiseTable
from diffusion_runtime.models.published import published_models
from diffusion_runtime.models.published_folders import packaged_folder
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.request.generation_request import SECOND_STAGE_SAMPLERS
from diffusion_runtime.workflows.evaluation import Evaluation, NotSupportedError
from diffusion_runtime.workflows.graph import Node
from diffusion_runtime.workflows.known_models import KnownModel, known_model
from diffusion_runtime.workflows.request_files import add_files, add_sound
from diffusion_runtime.workflows.request_guidance import add_guidance, add_negative
from diffusion_runtime.workflows.request_inputs import add_initial, add_inputs
from diffusion_runtime.workflows.request_parts import RequestParts
from diffusion_runtime.workflows.sampler_stages import (
    ADD_NOISE,
    OF_ONE_STEP,
    SAME_LEVEL,
    facts_of,
    goes_on,
    guidance_of_both,
    guided_steps,
    is_guided,
    joined,
    levels_of,
    sampler_of,
    stages_of,
)
from diffusion_runtime.workflows.values import (
    LatentValue,
    MovieValue,
    PictureValue,
    StageValue,
    Unknown,
    Weights,
)


def request_of_outputs(
    evaluation: Evaluation, found: Sequence[tuple[Node, PictureValue | MovieValue]]
) -> RequestParts | None:
    """Return the request that makes what the output nodes show, None where nothing is made. found: each with its
    value. Raises NotSupportedError, with the node, for what no request stands for."""
    made = []
    for node, value in found:
        pictures = value.pictures if isinstance(value, MovieValue) else value
        if pictures.decoded is not None and pictures.decoded.stage is not None:
            _check_as_made(pictures)
            made.append((node, value, pictures.decoded))
        elif pictures.decoded is not None or len(found) == 1:
            raise NotSupportedError("what it writes is of no sampler: nothing is generated", node)
    if not made:
        return None
    stages = {latent.stage.node.id for _, _, latent in made if latent.stage is not None}
    if len(stages) > 1:
        nodes = ", ".join(node.id for node, _, _ in made)
        raise NotSupportedError(
            f"{len(made)} outputs of different samplers (nodes {nodes}), and one is made at a time: leave others out, "
            f"--set {made[-1][0].id}.mode=2",
            made[0][0],
        )
    _, value, latent = made[0]
    return _request_of(evaluation, latent, value)


def _check_as_made(pictures: PictureValue) -> None:
    """Raises NotSupportedError for pictures that are changed between decoding and writing."""
    if pictures.parts:
        raise NotSupportedError(
            f"{len(pictures.parts)} results in one file, and one is made at a time: link one of them", pictures.node
        )
    for node in pictures.changed_by:
        raise NotSupportedError(
            f"what was made is resized: leave that out, --set {node.id}.mode=4, and resize the file", node
        )


def _request_of(evaluation: Evaluation, latent: LatentValue, output: PictureValue | MovieValue) -> RequestParts:
    all_stages, upsamplers = stages_of(latent)
    stages, upsamplers = joined(all_stages, upsamplers)
    first = stages[0]
    if len(stages) == 2 and upsamplers[1] is not None:
        first = stages[0] = dataclasses.replace(first, guider=guidance_of_both(*stages))
    known = known_model(first.guider.model.weights.file)
    if known is None:
        node = first.guider.model.weights.node
        raise NotSupportedError(
            f"{first.guider.model.weights.file}: no model that runs here has files of this name", node
        )
    published = next(each for each in published_models() if each.name == known.name)
    zero_star = first.guider.model.zero_star
    if len(all_stages) > 1 and zero_star is not None and zero_star.num_zero_steps:
        raise NotSupportedError(
            "use_zero_init: the first steps of each sampler would change nothing; expected false, or one sampler",
            zero_star.node,
        )
    parts = RequestParts(evaluation, known, published, {}, {}, {}, [], [])
    add_files(parts, stages, latent)
    _first_stage(parts, first, known)
    add_guidance(parts, stages, known)
    _sizes(parts, stages, output)
    add_inputs(parts, stages)
    if len(stages) == 2 and upsamplers[1] is not None:
        _second_stage(parts, stages[0], stages[1], upsamplers[1])
    elif len(stages) == 2:
        _second_expert(parts, stages[0], stages[1])
    elif len(stages) > 2:
        raise NotSupportedError(f"{len(stages)} stages of samplers; two are supported", stages[2].node)
    _noise(parts, stages)
    if len(all_stages) > len(stages) and first.sampler.name in ADD_NOISE:
        parts.replaced(all_stages[1].node, "noise between steps of one sampler, which goes on where ComfyUI draws anew")
    if isinstance(output, MovieValue) and output.sound is not None:
        add_sound(parts, output)
    return parts


def _first_stage(parts: RequestParts, stage: StageValue, known: KnownModel) -> None:
    if stage.noise.seed is None:
        raise NotSupportedError("no noise is drawn: latents that are made elsewhere are no input", stage.noise.node)
    parts.request["prompt"] = stage.guider.positive.text
    parts.request["seed"] = stage.noise.seed
    parts.request["sampler"] = sampler_of(stage)
    if stage.guider.positive.zeroed is not None:
        raise NotSupportedError("zeros in place of the prompt", stage.guider.positive.zeroed)
    if stage.sigmas.own is not None:
        parts.request["num_inference_steps"] = stage.sigmas.own
    elif stage.sigmas.levels[0] < 1 - SAME_LEVEL:
        add_initial(parts, stage, known)
    if known.audio_shift is not None and isinstance(known.sampling, NoiseTable):
        # The sound's noise levels follow from it.
        parts.request["flow_shift"] = (stage.guider.model.table or known.sampling).flow_shift
        if stage.guider.model.audio_shift not in (None, known.audio_shift):
            raise NotSupportedError(
                f"shift_audio: expected {known.audio_shift:g}, as in the model's folder, got "
                f"{stage.guider.model.audio_shift:g}",
                stage.guider.model.shift_of,
            )


def _sizes(parts: RequestParts, stages: Sequence[StageValue], output: PictureValue | MovieValue) -> None:
    stage, last = stages[0], stages[-1]
    if stage.sigmas.own is None and len(stages) == 1:
        parts.request["sigmas"] = levels_of(stage)
    latent, final = stage.latent, last.latent
    if latent.batch != 1:
        raise NotSupportedError(
            f"batch_size: expected 1, got {latent.batch}: a batch draws its noise at once; make others with --seed, "
            f"and --set {latent.node.id}.batch_size=1",
            latent.node,
        )
    for name, value in (("width", final.width), ("height", final.height)):
        if not isinstance(value, Unknown) and value > 0:
            parts.request[name] = value
    if isinstance(final.width, Unknown) or isinstance(final.height, Unknown):
        for name in ("width", "height"):
            parts.request.pop(name, None)
        parts.replaced(latent.node, "the size that the model's own pipeline gives a picture of these proportions")
    if isinstance(output, MovieValue) or latent.frames != 1:
        if isinstance(latent.frames, Unknown):
            raise NotSupportedError(f"length: {latent.frames.reason}", latent.node)
        step = parts.model.frames
        parts.request["num_frames"] = (latent.frames - 1) // step * step + 1
    if isinstance(output, MovieValue) and output.fps:
        parts.request["fps"] = _rate(output, stage)


def _rate(output: MovieValue, stage: StageValue) -> int:
    if output.fps != round(output.fps):
        raise NotSupportedError(f"fps: expected a whole number, got {output.fps:g}", output.node)
    of_model = stage.guider.positive.fps
    if of_model is not None and of_model != output.fps:
        raise NotSupportedError(
            f"fps: the model is given {of_model:g} and the file has {output.fps:g}; expected the same", output.node
        )
    return round(output.fps)


def _second_stage(parts: RequestParts, first: StageValue, second: StageValue, upsampler: Weights) -> None:
    """Add a second stage on upsampled latents."""
    if second.noise.seed is None:
        raise NotSupportedError("no noise is drawn for the second stage", second.noise.node)
    sampler = sampler_of(second)
    if sampler not in SECOND_STAGE_SAMPLERS:
        raise NotSupportedError(
            f"sampler {second.sampler.name} of a second stage: expected euler or euler_ancestral", second.sampler.node
        )
    parts.files["upsampler_path"] = upsampler
    parts.request["sigmas"] = levels_of(first)
    parts.request["second_stage_sigmas"] = levels_of(second)
    parts.request["second_stage_sampler"] = sampler
    parts.request["second_stage_seed"] = second.noise.seed


def _second_expert(parts: RequestParts, first: StageValue, second: StageValue) -> None:
    """Add an expert for low noise that goes on where the first one ends."""
    if not goes_on(first, second):
        raise NotSupportedError("a second sampler that does not go on where the first one ends", second.node)
    if "transformer_2_path" not in parts.files or not parts.model.experts:
        raise NotSupportedError("a second sampler with another model", second.node)
    if (second.sampler.name, second.sampler.options) != (first.sampler.name, first.sampler.options):
        raise NotSupportedError("another sampler for the second expert; expected the same", second.sampler.node)
    if second.sampler.name not in OF_ONE_STEP:
        parts.replaced(second.node, "one run of the sampler over both experts: its history is kept over the change")
    levels = [*first.sigmas.levels[:-1], *levels_of(second)]
    parts.request["sigmas"] = levels
    count = len(first.sigmas.levels) - 1
    parts.request["boundary_ratio"] = (levels[count - 1] + levels[count]) / 2
    if second.guider.scale != first.guider.scale:
        parts.request["guidance_scale_2"] = second.guider.scale
    positive, negative = second.guider.positive, second.guider.negative
    if facts_of(positive) != facts_of(first.guider.positive):
        raise NotSupportedError("another prompt for the second expert; expected the same", positive.node)
    for stage in (first, second):
        if is_guided(stage.guider) and not all(guided_steps(stage)):
            raise NotSupportedError("guidance of some steps beside two experts; expected all", stage.guider.node)
    if not is_guided(second.guider) or negative is None:
        return
    if not is_guided(first.guider):
        add_negative(parts, negative, parts.model)
    elif facts_of(negative) != facts_of(first.guider.negative):
        raise NotSupportedError("another negative prompt for the second expert", negative.node)


def _noise(parts: RequestParts, stages: Sequence[StageValue]) -> None:
    """Set that noise is drawn as by ComfyUI, where the model's latents have its order of numbers."""
    first, request = stages[0], parts.request
    behind = any(not text.startswith("0:") for text in request.get("frame_conditions", ()))
    reason = None
    if not _in_comfyui_order(parts.published.model_path):
        reason = "the order of ComfyUI's latents of this model is not known here"
    elif behind or (parts.model.sound and "last_image_path" in request):
        reason = "ComfyUI's latents hold the images at other frames as well"
    elif request["sampler"] == "dpmpp_sde":
        reason = "its Brownian path is drawn in order"
    if reason is not None:
        parts.replaced(first.noise.node, f"numbers of the same seed that differ from ComfyUI's: {reason}")
        return
    request["noise"] = "comfyui"
    adding = [stage for stage in stages if stage.sampler.name in ADD_NOISE]
    if adding:
        parts.replaced(
            adding[0].sampler.node, "noise between steps as ComfyUI draws it on a CPU; on a GPU it draws other numbers"
        )


@functools.cache
def _in_comfyui_order(hub_id: str) -> bool:
    """Return whether the latents of a published model have the order of ComfyUI's."""
    folder = packaged_folder(hub_id)
    return folder is not None and family_for_folder(ModelFolder(folder)).requests.in_comfyui_order
