"""One request out of what a workflow shows: its stages of samplers, their models, sizes, guidance and files."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.denoising.flow_schedule import shifted
from diffusion_runtime.denoising.named_schedules import NoiseTable
from diffusion_runtime.models.published import PublishedModel, published_models
from diffusion_runtime.models.published_folders import packaged_folder
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.request.generation_request import REQUEST_FIELDS, SECOND_STAGE_SAMPLERS
from diffusion_runtime.request.samplers import SAMPLERS
from diffusion_runtime.workflows.evaluation import Evaluation, NotSupportedError, Verdict
from diffusion_runtime.workflows.graph import Node
from diffusion_runtime.workflows.input_files import found_input
from diffusion_runtime.workflows.known_models import EMBEDDED, OFFSET, KnownModel, known_model
from diffusion_runtime.workflows.values import (
    ClipValue,
    LatentValue,
    Lora,
    MovieValue,
    PictureValue,
    SoundValue,
    SparseValue,
    StageValue,
    Unknown,
    VaeValue,
    Weights,
)

# ComfyUI's samplers whose steps are those of one here, at the same noise levels.
_SAMPLERS = {
    "euler": "flow_match_euler",
    "ddim": "flow_match_euler",
    "lcm": "dmd",
    "euler_ancestral": "euler_ancestral",
    "dpmpp_2m": "dpmpp_2m_sigma",
    "res_multistep": "res_multistep",
    "uni_pc": "unipc_sigma",
    "er_sde": "er_sde",
    "dpmpp_sde": "dpmpp_sde",
}
# Those whose next step depends on no earlier one: a schedule in two parts is the same as one.
_OF_ONE_STEP = ("euler", "ddim", "lcm", "euler_ancestral")
# Those that add noise between steps.
_ADD_NOISE = ("lcm", "euler_ancestral", "er_sde", "dpmpp_sde")
# Those that compute in the signal-to-noise ratio, which is 0 at a noise level of 1.
_OF_RATIO = ("er_sde", "dpmpp_sde")
_MAX_STAGES = 4
# Of FLUX where no node says it.
_EMBEDDED_GUIDANCE = 3.5
# How far apart two noise levels may be that are one, in float32.
_SAME_LEVEL = 1e-6


@dataclass
class RequestParts:
    """A request while it is made: fields, files and LoRAs so far, and what was replaced (evaluation)."""

    evaluation: Evaluation
    model: KnownModel
    published: PublishedModel
    request: dict[str, Any]
    runtime: dict[str, Any]
    files: dict[str, Weights]
    loras: list[tuple[Lora, str]]
    inputs: list[tuple[Node, str]]

    def replaced(self, node: Node, remark: str) -> None:
        self.evaluation.note(node, Verdict.REPLACED, remark)

    def file(self, picture: PictureValue | SoundValue) -> str:
        """Return the path of an input file, or its name where it is not here, and note what changed the picture."""
        if picture.file is None:
            raise NotSupportedError(
                "an image that another part of the workflow makes: run that part first, and give its file by "
                "--set NODE.image=FILE",
                picture.node,
            )
        if isinstance(picture, PictureValue):
            for node in picture.changed_by:
                if node.kind == "LTXVPreprocess" and isinstance(node.inputs.get("img_compression"), int):
                    self.request["image_crf"] = node.inputs["img_compression"]
                else:
                    self.replaced(node, "the resizing of the model's own pipeline")
        path = found_input(picture.file, self.evaluation.places)
        self.inputs.append((picture.node, picture.file))
        return picture.file if path is None else str(path)

    def one_file(self, picture: PictureValue) -> str:
        if picture.parts:
            raise NotSupportedError(f"{len(picture.parts)} pictures where one is taken", picture.node)
        return self.file(picture)


def request_of_outputs(
    evaluation: Evaluation, found: Sequence[tuple[Node, PictureValue | MovieValue]]
) -> RequestParts | None:
    """Return the request that makes what the output nodes show, None where nothing is made. found: each with its
    value. Raises NotSupportedError, with the node, for what no request stands for."""
    made = []
    for node, value in found:
        pictures = value.pictures if isinstance(value, MovieValue) else value
        if pictures.decoded is not None and pictures.decoded.stage is not None:
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


def _stages_of(latent: LatentValue) -> tuple[list[StageValue], list[Weights | None]]:
    """Return the stages in their order, and the upsampler in front of each."""
    stages: list[StageValue] = []
    upsamplers: list[Weights | None] = []
    current: LatentValue | None = latent
    while current is not None:
        stage = current.stage
        if stage is None:
            break
        if len(stages) >= _MAX_STAGES:
            raise NotSupportedError(f"more than {_MAX_STAGES} stages of samplers", stage.node)
        before = stage.latent.upscaled
        stages.insert(0, stage)
        upsamplers.insert(0, None if before is None else before[1])
        current = stage.latent if before is None else before[0]
    return stages, upsamplers


def _request_of(evaluation: Evaluation, latent: LatentValue, output: PictureValue | MovieValue) -> RequestParts:
    stages, upsamplers = _stages_of(latent)
    stages, upsamplers = _joined(stages, upsamplers)
    first = stages[0]
    known = known_model(first.guider.model.weights.file)
    if known is None:
        node = first.guider.model.weights.node
        raise NotSupportedError(
            f"{first.guider.model.weights.file}: no model that runs here has files of this name", node
        )
    published = next(each for each in published_models() if each.name == known.name)
    parts = RequestParts(evaluation, known, published, {}, {}, {}, [], [])
    _files(parts, stages, latent)
    _first_stage(parts, first, known)
    _sizes(parts, stages, output)
    _given(parts, stages)
    if len(stages) == 2 and upsamplers[1] is not None:
        _second_stage(parts, stages[0], stages[1], upsamplers[1])
    elif len(stages) == 2:
        _second_expert(parts, stages[0], stages[1])
    elif len(stages) > 2:
        raise NotSupportedError(f"{len(stages)} stages of samplers; two are supported", stages[2].node)
    _noise(parts, stages)
    if isinstance(output, MovieValue) and output.sound is not None:
        _sound(parts, output, latent)
    return parts


def _joined(
    stages: list[StageValue], upsamplers: list[Weights | None]
) -> tuple[list[StageValue], list[Weights | None]]:
    """Return stages where two of the same model, one going on where the other ends, are one."""
    kept, kept_upsamplers = stages[:1], upsamplers[:1]
    for stage, upsampler in zip(stages[1:], upsamplers[1:], strict=True):
        before = kept[-1]
        same = stage.guider.model == before.guider.model and stage.guider.scale == before.guider.scale
        if upsampler is None and same and _goes_on(before, stage) and stage.sampler.name in _OF_ONE_STEP:
            levels = (*before.sigmas.levels[:-1], *stage.sigmas.levels)
            sigmas = dataclasses.replace(before.sigmas, levels=levels)
            kept[-1] = dataclasses.replace(before, sigmas=sigmas)
        else:
            kept.append(stage)
            kept_upsamplers.append(upsampler)
    return kept, kept_upsamplers


def _goes_on(before: StageValue, after: StageValue) -> bool:
    """Return whether a stage starts at the noise level where the one before it ends, without noise of its own."""
    if not before.sigmas.levels or not after.sigmas.levels or after.noise.seed is not None:
        return False
    return abs(before.sigmas.levels[-1] - after.sigmas.levels[0]) <= _SAME_LEVEL


def _files(parts: RequestParts, stages: Sequence[StageValue], latent: LatentValue) -> None:
    model = stages[0].guider.model
    parts.files["model_path"] = model.weights
    parts.runtime["like"] = parts.model.name
    is_two = len(stages) == 2 and stages[1].guider.model.weights.file != model.weights.file
    parts.loras += [(lora, "transformer" if is_two else "auto") for lora in model.loras]
    if is_two:
        parts.files["transformer_2_path"] = stages[1].guider.model.weights
        parts.loras += [(lora, "transformer_2") for lora in stages[1].guider.model.loras]
    elif len(stages) == 2 and _named(stages[1].guider.model.loras) != _named(model.loras):
        lora = next(iter((*stages[1].guider.model.loras, *model.loras)))
        raise NotSupportedError("a LoRA of one stage alone: the model has the same weights in both", lora.node)
    if any(stage.guider.model.sparse != model.sparse for stage in stages):
        raise NotSupportedError("sparse attention of one stage alone; expected the same in both", stages[-1].node)
    if model.sparse is not None:
        parts.runtime["attention"] = _attention(model.sparse, stages[0])
    _text_encoders(parts, stages[0].guider.positive.clip)
    vae = latent.given.get("vae")
    if isinstance(vae, VaeValue) and vae.weights.folder == "vae":
        parts.files["vae_path"] = vae.weights


def _attention(sparse: SparseValue, stage: StageValue) -> dict[str, Any]:
    """Return the attention of a config. ComfyUI's start is a share of the schedule before its shift."""
    table = stage.guider.model.table
    if sparse.start > 0 and table is None:
        raise NotSupportedError("start_percent: the model's noise schedule depends on the size", sparse.node)
    level = 1.0 if table is None else shifted(1 - sparse.start, table.flow_shift)
    num_dense = sum(each > level + _SAME_LEVEL for each in stage.sigmas.levels[:-1])
    extra: dict[str, Any] = {"sparsity": round(1 - sparse.keep, 6), "min_tokens": sparse.min_tokens}
    if num_dense:
        extra["dense_first_steps"] = num_dense
    return {"per_role": {"self": {"backend": "video_sparse_attn", "extra": extra}}}


def _named(loras: Sequence[Lora]) -> list[tuple[str, float]]:
    return [(lora.file, lora.scale) for lora in loras]


def _text_encoders(parts: RequestParts, clip: ClipValue) -> None:
    weights = [each for each in clip.weights if each.folder == "text_encoders"]
    if clip.weights[0].node.kind == "LTXAVTextEncoderLoader":
        # The other one is the checkpoint with the connectors.
        weights = weights[:1]
    second = parts.model.second_text
    for each in weights:
        is_second = second is not None and second in each.file.lower()
        key = "text_encoder_2_path" if is_second else "text_encoder_path"
        if key in parts.files:
            raise NotSupportedError(f"two files of one text encoder: {parts.files[key].file}, {each.file}", each.node)
        parts.files[key] = each


def _first_stage(parts: RequestParts, stage: StageValue, known: KnownModel) -> None:
    if stage.noise.seed is None:
        raise NotSupportedError("no noise is drawn: latents that are made elsewhere are no input", stage.noise.node)
    parts.request["prompt"] = stage.guider.positive.text
    parts.request["seed"] = stage.noise.seed
    parts.request["sampler"] = _sampler_of(stage)
    if stage.guider.positive.zeroed is not None:
        raise NotSupportedError("zeros in place of the prompt", stage.guider.positive.zeroed)
    if stage.sigmas.own is not None:
        parts.request["num_inference_steps"] = stage.sigmas.own
    elif stage.sigmas.levels[0] < 1 - _SAME_LEVEL:
        _initial(parts, stage, known)
    if known.audio_shift is not None and isinstance(known.sampling, NoiseTable):
        # The sound's noise levels follow from it.
        parts.request["flow_shift"] = (stage.guider.model.table or known.sampling).flow_shift
        if stage.guider.model.audio_shift not in (None, known.audio_shift):
            raise NotSupportedError(
                f"shift_audio: expected {known.audio_shift:g}, as in the model's folder, got "
                f"{stage.guider.model.audio_shift:g}",
                stage.guider.model.shift_of,
            )
    _guidance(parts, stage, known)


def _sampler_of(stage: StageValue) -> str:
    name = _SAMPLERS.get(stage.sampler.name)
    if name is None or name not in SAMPLERS:
        supported = ", ".join(each for each, ours in _SAMPLERS.items() if ours in SAMPLERS)
        raise NotSupportedError(f"sampler {stage.sampler.name}: expected {supported}", stage.sampler.node)
    plain = {"eta": 1.0, "s_noise": 1.0, "s_noise_end": 1.0, "noise_clip_std": 0.0, "max_stage": 3.0}
    for option, value in stage.sampler.options.items():
        if value != plain[option]:
            raise NotSupportedError(f"{option}: expected {plain[option]:g}, got {value:g}", stage.sampler.node)
    return name


def _levels(stage: StageValue) -> list[float]:
    """Return the noise levels of the steps. Raises NotSupportedError for a schedule that does not end at 0."""
    if len(stage.sigmas.levels) < 2 or stage.sigmas.levels[-1] > _SAME_LEVEL:
        last = stage.sigmas.levels[-1] if stage.sigmas.levels else 1.0
        raise NotSupportedError(f"ends at a noise level of {last:.4g}; expected 0", stage.node)
    levels = stage.sigmas.levels[:-1]
    if any(after >= before for before, after in pairwise(levels)) or levels[-1] <= 0:
        raise NotSupportedError("sigmas: expected noise levels that fall from step to step", stage.sigmas.node)
    return [_first_level(stage), *levels[1:]]


def _first_level(stage: StageValue) -> float:
    """Return the noise level of the first step: of samplers in the signal-to-noise ratio ComfyUI takes one just below
    1, which has one."""
    first, model = stage.sigmas.levels[0], stage.guider.model
    known = known_model(model.weights.file)
    table = model.table or (None if known is None else known.sampling)
    if first < 1 or stage.sampler.name not in _OF_RATIO or not isinstance(table, NoiseTable):
        return first
    return shifted(1 - 1e-4, table.flow_shift)


def _initial(parts: RequestParts, stage: StageValue, known: KnownModel) -> None:
    """Add the picture that is noised to the first level (denoise below 1)."""
    if stage.latent.start is None or known.sound:
        raise NotSupportedError(
            f"starts at a noise level of {stage.sigmas.levels[0]:.4g} (denoise below 1) from no picture; expected 1, "
            "or a picture of VAEEncode, in a model without sound",
            stage.node,
        )
    parts.request["init_path"] = parts.one_file(stage.latent.start)


def _guidance(parts: RequestParts, stage: StageValue, known: KnownModel) -> None:
    guider, positive = stage.guider, stage.guider.positive
    scale = guider.scale
    if known.guidance == EMBEDDED:
        parts.request["guidance_scale"] = _EMBEDDED_GUIDANCE if positive.guidance is None else positive.guidance
        if scale != 1:
            parts.request["true_cfg_scale"] = scale
    else:
        parts.request["guidance_scale"] = scale - 1 if known.guidance == OFFSET else scale
    if guider.audio_scale is not None or parts.published.request.get("audio_guidance_scale") is not None:
        parts.request["audio_guidance_scale"] = scale if guider.audio_scale is None else guider.audio_scale
    _turn_off_terms(parts)
    is_guided = scale != 1 or (guider.audio_scale or 1) != 1
    norm = guider.model.norm_of
    if norm is not None and not is_guided:
        parts.evaluation.note(norm, Verdict.WITHOUT_EFFECT, "the scale of guidance is 1")
    elif norm is not None and not known.norm:
        raise NotSupportedError("this model's guidance has no such norm here", norm)
    if not is_guided:
        return
    if known.norm and norm is None:
        parts.replaced(guider.node, "guidance with the norm of the conditional prediction, as its authors compute it")
    if guider.negative is None:
        return
    if guider.negative.zeroed is not None:
        raise NotSupportedError(
            f"zeros in place of an encoded negative prompt, with a scale of {scale:g}: guidance here encodes a text",
            guider.negative.zeroed,
        )
    parts.request["negative_prompt"] = guider.negative.text


def _turn_off_terms(parts: RequestParts) -> None:
    """Turn off what the model's authors add to guidance, and no node of the workflow does."""
    documented = parts.published.request
    for name, declared in REQUEST_FIELDS.items():
        value = documented.get(name)
        if isinstance(value, int | float) and value != declared.off is not None and name not in parts.request:
            parts.request[name] = declared.off
    if documented.get("skip_layers"):
        parts.request["skip_layer_stop"] = 0.0


def _sizes(parts: RequestParts, stages: Sequence[StageValue], output: PictureValue | MovieValue) -> None:
    stage, last = stages[0], stages[-1]
    if stage.sigmas.own is None and len(stages) == 1:
        parts.request["sigmas"] = _levels(stage)
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


def _given(parts: RequestParts, stages: Sequence[StageValue]) -> None:
    """Add the pictures, videos and sounds that the request names."""
    stage = stages[0]
    given = dict(stage.latent.given)
    references = stage.guider.positive.references
    if references:
        if "image_path" not in parts.published.images:
            raise NotSupportedError(f"pictures that {parts.model.name} does not take", stage.guider.positive.node)
        paths = tuple(parts.file(each) for each in references)
        parts.request["image_path"] = paths[0] if len(paths) == 1 else list(paths)
    for field in ("image_path", "last_image_path", "video_path", "image_mask_path", "mask_path"):
        picture = given.get(field)
        if isinstance(picture, PictureValue):
            parts.request[field] = parts.one_file(picture)
        elif isinstance(picture, tuple):
            parts.request[field] = [parts.file(each) for each in picture]
    for field in ("conditioning_scale", "character_mode"):
        if field in given:
            parts.request[field] = given[field]
    vision = given.get("vision")
    if vision is not None and parts.model.sees:
        parts.files["image_encoder_path"] = vision.weights
    named = given.get("references")
    if named is not None:
        if not named:
            raise NotSupportedError("expected at least one reference: none is linked", stage.latent.node)
        parts.request["references"] = [parts.file(each) for each in named]
    frames, last = given.get("frames", ()), stages[-1].latent
    if last.upscaled is not None:
        _strength_after(parts, frames, last)
    if frames:
        _frames(parts, stage, frames)
    if frames and parts.published.request.get("image_crf"):
        # Images are compressed by a node alone.
        parts.request.setdefault("image_crf", 0)
    sound = stage.latent.sound
    if sound is not None and isinstance(sound.given.get("audio_path"), SoundValue):
        if not sound.given.get("kept"):
            raise NotSupportedError(
                "a sound that is denoised: expected one that is kept, by a mask of 0 (SolidMask, SetLatentNoiseMask)",
                sound.node,
            )
        parts.request["audio_path"] = parts.file(sound.given["audio_path"])


def _frames(parts: RequestParts, stage: StageValue, frames: Sequence[tuple[int, PictureValue, float]]) -> None:
    last = None if isinstance(stage.latent.frames, Unknown) else stage.latent.frames - 1
    places = {0: "image_path", last: "last_image_path"}
    in_full = all(strength == 1 for _, _, strength in frames) and "second_stage_strength" not in parts.request
    if in_full and 0 in {at for at, _, _ in frames} and all(at in places for at, _, _ in frames):
        for at, picture, _ in frames:
            parts.request[places[at]] = parts.one_file(picture)
        return
    # A length is rounded down to whole latents, and a picture for the last frame goes with it.
    end = parts.request.get("num_frames")
    conditions = []
    for at, picture, strength in frames:
        place = at if end is None else min(at, end - 1)
        if place != at:
            parts.replaced(picture.node, f"frame {place}, the last one, for frame {at}: the video has {end} frames")
        conditions.append(f"{place}:{parts.one_file(picture)}@{strength:g}")
        if strength < 1:
            parts.replaced(picture.node, f"{strength:g} of it in what the model sees, as in diffusers' pipeline")
    parts.request["frame_conditions"] = conditions


def _strength_after(parts: RequestParts, frames: Sequence[tuple[int, PictureValue, float]], after: LatentValue) -> None:
    """Set how strongly the images count in a second stage. frames: of the first; after: latents of the second."""
    others = after.given.get("frames", ())
    if [(at, each.file) for at, each, _ in frames] != [(at, each.file) for at, each, _ in others]:
        raise NotSupportedError("an image of one stage alone; expected the same images in both", after.node)
    strengths = [strength for _, _, strength in others]
    if strengths == [strength for _, _, strength in frames]:
        return
    if len(set(strengths)) > 1:
        raise NotSupportedError("images of several strengths in the second stage; expected one", after.node)
    parts.request["second_stage_strength"] = strengths[0]


def _second_stage(parts: RequestParts, first: StageValue, second: StageValue, upsampler: Weights) -> None:
    """Add a second stage on upsampled latents."""
    if second.noise.seed is None:
        raise NotSupportedError("no noise is drawn for the second stage", second.noise.node)
    sampler = _SAMPLERS.get(second.sampler.name)
    if sampler not in SECOND_STAGE_SAMPLERS:
        raise NotSupportedError(
            f"sampler {second.sampler.name} of a second stage: expected euler or euler_ancestral", second.sampler.node
        )
    parts.files["upsampler_path"] = upsampler
    parts.request["sigmas"] = _levels(first)
    parts.request["second_stage_sigmas"] = _levels(second)
    parts.request["second_stage_sampler"] = sampler
    if second.guider.scale != first.guider.scale:
        raise NotSupportedError(
            f"a scale of guidance of {second.guider.scale:g} in the second stage, where the first has "
            f"{first.guider.scale:g}",
            second.guider.node,
        )
    parts.request["second_stage_seed"] = second.noise.seed


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
    adding = [stage for stage in stages if stage.sampler.name in _ADD_NOISE]
    if adding:
        parts.replaced(
            adding[0].sampler.node, "noise between steps as ComfyUI draws it on a CPU; on a GPU it draws other numbers"
        )


@functools.cache
def _in_comfyui_order(hub_id: str) -> bool:
    """Return whether the latents of a published model have the order of ComfyUI's."""
    folder = packaged_folder(hub_id)
    return folder is not None and family_for_folder(ModelFolder(folder)).requests.in_comfyui_order


def _second_expert(parts: RequestParts, first: StageValue, second: StageValue) -> None:
    """Add an expert for low noise that goes on where the first one ends."""
    if not _goes_on(first, second):
        raise NotSupportedError("a second sampler that does not go on where the first one ends", second.node)
    if "transformer_2_path" not in parts.files or not parts.model.experts:
        raise NotSupportedError("a second sampler with another model", second.node)
    if second.sampler.name != first.sampler.name:
        raise NotSupportedError("another sampler for the second expert; expected the same", second.sampler.node)
    if second.sampler.name not in _OF_ONE_STEP:
        parts.replaced(second.node, "one run of the sampler over both experts: its history is kept over the change")
    levels = [*first.sigmas.levels[:-1], *_levels(second)]
    parts.request["sigmas"] = levels
    count = len(first.sigmas.levels) - 1
    parts.request["boundary_ratio"] = (levels[count - 1] + levels[count]) / 2
    if second.guider.scale != first.guider.scale:
        parts.request["guidance_scale_2"] = second.guider.scale
    text, negative = second.guider.positive.text, second.guider.negative
    if text != first.guider.positive.text:
        raise NotSupportedError("another prompt for the second expert; expected the same", second.guider.positive.node)
    if second.guider.scale == 1 or negative is None:
        return
    if negative.zeroed is not None or negative.text != parts.request.setdefault("negative_prompt", negative.text):
        raise NotSupportedError("another negative prompt for the second expert", negative.node)


def _sound(parts: RequestParts, output: MovieValue, latent: LatentValue) -> None:
    sound = output.sound
    assert sound is not None
    if sound.decoded is None:
        if parts.request.get("audio_path") is None and not parts.model.sound:
            parts.replaced(sound.node, "a file without sound: join them with ffmpeg -i VIDEO -i SOUND -c copy OUT")
        return
    del latent
    vae = sound.decoded.given.get("audio_vae")
    if isinstance(vae, VaeValue) and vae.weights.folder == "vae":
        parts.files["audio_vae_path"] = vae.weights
