"""Images of a request: how many the model takes, the size that follows from them, and whether they fit the clip."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.runtime_options import flag_name
from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.audio import check_sound
from diffusion_runtime.media.images import check_image, check_mask, inspect_picture, picture_remarks
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.sampling import Sampling
from diffusion_runtime.request.generation_request import (
    IMAGE_FIELDS,
    VIDEO_FIELDS,
    GenerationRequest,
    image_paths,
    paths_of,
    too_many_images,
)
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.draft import Draft
from diffusion_runtime.untrusted.files import named

# What a model says of a file that it needs and a request does not name, and what to do.
_MISSING = {
    "mask_path": "this model repaints a part of an image; give its mask, white where it is repainted",
    "video_path": "this model moves the image's character as in a video; give one",
}


@dataclass(frozen=True)
class ImageRules:
    """The rules of a model for images. Files are decoded once for all of them, by `inspect_picture`."""

    inputs: ImageInputs
    sampling: Sampling

    def fill(self, draft: Draft) -> None:
        """Set the size that the images say. Raises RequestError for an image that is missing or cannot be used."""
        if self.inputs.media is not None and draft.image_path is not None:
            raise RequestError(
                "image_path: this model takes images as references, in an order that counts: write --reference FILE"
            )
        restoration = self.sampling.restoration
        if restoration is not None:
            self.count(draft)
            draft.fill(restoration.values(draft.values))
            return
        if self.inputs.references is None and self.inputs.size_of_image is None:
            return
        # Before they are read.
        self.count(draft)
        paths = paths_of("image_path", draft.image_path)
        if self.inputs.references is not None:
            draft.fill(self.inputs.references.default_size(paths))
        elif self.inputs.size_of_image is not None and (
            paths := paths or paths_of("last_image_path", draft.last_image_path)
        ):
            if draft.height is not None and draft.width is not None:
                return
            width, height = inspect_picture(paths[0]).size
            try:
                size = self.inputs.size_of_image((height, width))
            except RequestError as error:
                field = "last_image_path" if draft.image_path is None else "image_path"
                raise RequestError(f"{named(field, paths[0])}: {error}, or give --height and --width") from error
            draft.fill(dict(zip(("height", "width"), size, strict=True)))

    def count(self, draft: Draft) -> None:
        """Raises RequestError for an image that is missing, and for more than the model takes."""
        needed, references = self.inputs.needed, self.inputs.references
        if draft.image_path is None and "image_path" in needed:
            does = f"makes {self.sampling.product} from" if references is None else "edits"
            raise RequestError(f"image_path: this model {does} an image; give one: --image-path FILE")
        if draft.last_image_path is None and "last_image_path" in needed:
            raise RequestError(
                "last_image_path: this model makes videos between two images; give the one to end with: "
                "--last-image-path FILE"
            )
        for name, says in {**_MISSING, **self.inputs.missing}.items():
            if name in needed and getattr(draft, name) is None:
                raise RequestError(f"{name}: {says}: {flag_name(name)} FILE")
        if draft.references is None and "references" in needed:
            raise RequestError(
                f"references: this model makes {self.sampling.product} from references; give one: --reference FILE"
            )
        if self.inputs.media is not None:
            self.inputs.media.files(paths_of("references", draft.references))
        takes_several = references or self.sampling.control
        paths, expected = paths_of("image_path", draft.image_path), 1 if takes_several is None else takes_several.most
        if len(paths) > expected:
            raise RequestError(too_many_images("image_path", paths, expected))

    def check(self, settings: BatchSettings) -> None:
        """Raises RequestError for an image that cannot be a frame of the clip, and a sound shorter than it."""
        request, size, control = settings.shared, settings.size, self.sampling.control
        if request.audio_path is not None:
            check_sound(request.audio_path, "audio_path", size.num_frames / size.fps)
        if request.last_image_path is not None and size.num_frames < 2:
            if "last_image_path" in self.inputs.needed:
                fewest = 1 + self.sampling.geometry.temporal_factor
                raise RequestError(
                    f"num_frames: expected {fewest} or more for a video between two images, got {size.num_frames}"
                )
            raise RequestError(
                "last_image_path: a clip of one frame has no other to end with; leave it out, or give more num_frames"
            )
        self._check_frame_conditions(request, size)
        if self.inputs.media is not None:
            self.inputs.media.shapes(request, size)
        if control is not None:
            control.check(request, size)
        if control is not None or self.inputs.references is not None:
            # Pictures of any ratio; those to edit, `fill` has inspected.
            return
        if request.mask_path is not None and isinstance(request.image_path, str):
            check_mask(request.mask_path, request.image_path)
        for name in self._fields_of_pictures:
            for path in image_paths(request, name):
                check_image(path, size.height, size.width, name, crf=request.image_crf or 0)

    @property
    def _fields_of_pictures(self) -> tuple[str, ...]:
        """The fields of images that are a condition of the model: a mask may be of what denoising starts from."""
        return tuple(name for name in IMAGE_FIELDS if name != "mask_path" or self.inputs.takes_masks)

    def _check_frame_conditions(self, request: GenerationRequest, size: ClipSize) -> None:
        """Raises RequestError for images at frames that the clip does not have or that other fields name."""
        name = "frame_conditions (--condition-at)"
        taken = {} if request.image_path is None else {0: "image_path"}
        if request.last_image_path is not None:
            # The first frame of the last latent.
            taken[size.num_frames - self.sampling.geometry.temporal_factor] = "last_image_path"
        for frame, _, _ in request.frame_conditions or ():
            if frame >= size.num_frames:
                raise RequestError(
                    f"{name}: expected frames from 0 to {size.num_frames - 1}, those of the video, got {frame}"
                )
            if frame in taken:
                raise RequestError(f"{name}: frame {frame} has an image already, {taken[frame]}; leave one of them out")

    def remarks(self, settings: BatchSettings) -> list[str]:
        """Return what of the images of a resolved request is not used as it is, as sentences."""
        control = self.sampling.control
        but = VIDEO_FIELDS if control is not None else set(IMAGE_FIELDS) - set(self._fields_of_pictures)
        remarks = image_remarks(settings.shared, but=but)
        if self.inputs.references is not None:
            paths = image_paths(settings.shared, "image_path")
            remarks += self.inputs.references.remarks(paths, settings.size.height, settings.size.width)
        if self.inputs.media is not None:
            remarks += self.inputs.media.remarks(settings.shared, settings.size)
        return remarks if control is None else [*remarks, *control.remarks(settings.shared, settings.size)]


def image_remarks(request: GenerationRequest, *, but: Iterable[str] = ()) -> list[str]:
    """Return what of its images a request does not use as it is there. but: fields that may name videos."""
    names = [name for name in IMAGE_FIELDS if name not in frozenset(but)]
    return [remark for name in names for path in image_paths(request, name) for remark in picture_remarks(path, name)]
