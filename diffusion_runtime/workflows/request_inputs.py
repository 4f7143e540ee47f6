"""Pictures, videos and sounds that a workflow starts from, in a request."""

from __future__ import annotations

from collections.abc import Sequence

from diffusion_runtime.workflows.evaluation import NotSupportedError
from diffusion_runtime.workflows.known_models import KnownModel
from diffusion_runtime.workflows.request_parts import RequestParts
from diffusion_runtime.workflows.values import (
    LatentValue,
    PictureValue,
    SoundValue,
    StageValue,
    Unknown,
)

# Fields that take a video.
_FILMS = ("video_path", "mask_path")


def add_initial(parts: RequestParts, stage: StageValue, known: KnownModel) -> None:
    """Add the picture that is noised to the first level (denoise below 1)."""
    if stage.latent.start is None or known.sound:
        raise NotSupportedError(
            f"starts at a noise level of {stage.sigmas.levels[0]:.4g} (denoise below 1) from no picture; expected 1, "
            "or a picture of VAEEncode, in a model without sound",
            stage.node,
        )
    parts.request["init_path"] = parts.one_file(stage.latent.start)


def add_inputs(parts: RequestParts, stages: Sequence[StageValue]) -> None:
    """Add the pictures, videos and sounds that the request names."""
    stage = stages[0]
    given = dict(stage.latent.given)
    references = stage.guider.positive.references
    if references:
        if "image_path" not in parts.published.images:
            raise NotSupportedError(f"pictures that {parts.model.name} does not take", stage.guider.positive.node)
        paths = tuple(parts.picture_file(each) for each in references)
        parts.request["image_path"] = paths[0] if len(paths) == 1 else list(paths)
    for field in ("image_path", "last_image_path", "video_path", "image_mask_path", "mask_path"):
        picture = given.get(field)
        if isinstance(picture, PictureValue):
            _check_cut(parts, picture)
            parts.request[field] = (parts.one_file if field in _FILMS else parts.picture_file)(picture)
        elif isinstance(picture, tuple):
            parts.request[field] = [parts.picture_file(each) for each in picture]
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
        for each in named:
            if isinstance(each, PictureValue) and each.num_frames is not None:
                raise NotSupportedError("a video that is cut, as a reference: give a file of these frames", each.node)
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


def _check_cut(parts: RequestParts, picture: PictureValue) -> None:
    """Raise NotSupportedError for a video that is cut to less than the clip reads of it: no request cuts a file."""
    wanted = parts.request.get("num_frames")
    if picture.num_frames is not None and wanted is not None and picture.num_frames < wanted:
        raise NotSupportedError(
            f"a video that is cut to {picture.num_frames} frames where the clip has {wanted}: give a file of them",
            picture.node,
        )


def _frames(parts: RequestParts, stage: StageValue, frames: Sequence[tuple[int, PictureValue, float]]) -> None:
    last = None if isinstance(stage.latent.frames, Unknown) else stage.latent.frames - 1
    places = {0: "image_path", last: "last_image_path"}
    in_full = all(strength == 1 for _, _, strength in frames) and "second_stage_strength" not in parts.request
    if in_full and 0 in {at for at, _, _ in frames} and all(at in places for at, _, _ in frames):
        for at, picture, _ in frames:
            parts.request[places[at]] = parts.picture_file(picture)
        return
    # A length is rounded down to whole latents, and a picture for the last frame goes with it.
    end = parts.request.get("num_frames")
    conditions = []
    for at, picture, strength in frames:
        place = at if end is None else min(at, end - 1)
        if place != at:
            parts.replaced(picture.node, f"frame {place}, the last one, for frame {at}: the video has {end} frames")
        conditions.append(f"{place}:{parts.picture_file(picture)}@{strength:g}")
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
