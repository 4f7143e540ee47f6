"""Video control: reference images, a control video and its mask, of models with control blocks (VACE)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from diffusion_runtime.core.latent_geometry import ClipSize, LatentGeometry
from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.clips import ClipFacts, inspect_clip, is_black
from diffusion_runtime.media.images import MAX_STRETCH, inspect_picture
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths

# The file fields of requests that such models take, and whether they need them.
FILES = {"image_path": False, "video_path": False, "mask_path": False}
Sides: TypeAlias = tuple[int, int]
# Each is one latent frame more. Examples of VACE's authors have up to three; a folder with hundreds is a mistake.
MAX_REFERENCES = 16


@dataclass(frozen=True)
class VideoControl:
    """Control of videos. num_blocks: control blocks, each of which may have a conditioning scale of its own."""

    num_blocks: int
    geometry: LatentGeometry

    takes_scale: ClassVar[bool] = True

    @property
    def most(self) -> int:
        """Maximum number of reference images in a request."""
        return MAX_REFERENCES

    def num_references(self, request: GenerationRequest) -> int:
        """Return the number of reference images, each of which is a latent frame before the clip's."""
        return len(image_paths(request, "image_path"))

    def check(self, request: GenerationRequest, size: ClipSize) -> None:
        """Check that a request's inputs can control a clip of this size. Raises RequestError."""
        scales = request.conditioning_scale
        if isinstance(scales, tuple) and len(scales) != self.num_blocks:
            raise RequestError(
                f"conditioning_scale: expected one number, or {self.num_blocks}, one for each control block of this "
                f"model, got {len(scales)}"
            )
        for path in image_paths(request, "image_path"):
            self.scaled_sizes(inspect_picture(path).size, path, size)
        if request.video_path is None:
            if request.mask_path is not None:
                raise RequestError(
                    "mask_path: a mask says what of a control video is made anew; give the video: --video-path FILE"
                )
            return
        video = check_clip("video_path", request.video_path, size, self.geometry.frame_rule)
        if request.mask_path is not None:
            check_clip_mask(request.mask_path, video, "the control video", size, self.geometry.frame_rule)

    def scaled_sizes(self, sides: Sides, path: str, size: ClipSize) -> tuple[Sides, Sides]:
        """Return a reference image's (width, height) in whole latents, and (height, width) inside of the clip's. Raises
        RequestError for an image of which nothing would be left. sides: width and height."""
        factor = self.geometry.spatial_factor
        width, height = (side // factor * factor for side in sides)
        if min(width, height) > 0:
            scale = min(size.height / height, size.width / width)
            inside = int(height * scale), int(width * scale)
            if min(inside) > 0:
                return (width, height), inside
        raise RequestError(f"image_path: {path} is {sides[0]} x {sides[1]} (width x height): too narrow; crop it")

    def remarks(self, request: GenerationRequest, size: ClipSize) -> Iterator[str]:
        """Yield sentences on the parts of the control video and its mask that are not used."""
        for field, path in (("video_path", request.video_path), ("mask_path", request.mask_path)):
            if path is not None:
                yield from clip_remarks(field, path, size)


def check_clip(field: str, path: str, size: ClipSize, frame_rule: tuple[int, int]) -> ClipFacts:
    """Return the facts of a file that has the frames of a clip of this size: enough of them, or one for all; of its
    ratio. frame_rule: of LatentGeometry. Raises RequestError for one that has not, and what inspect_clip raises."""
    video = inspect_clip(path, field, size.num_frames)
    if not video.is_still:
        _check_length(field, path, video, size, frame_rule)
    stretch = (video.width / video.height) / (size.width / size.height)
    if not 1 - MAX_STRETCH <= stretch <= 1 / (1 - MAX_STRETCH):
        raise RequestError(
            f"{field}: {path} is {video.width} x {video.height} (width x height), the clip {size.width} x "
            f"{size.height}: the ratio of the sides must agree within 10 %. Crop it, or set --height and --width to "
            "fit it"
        )
    return video


def check_clip_mask(path: str, video: ClipFacts, named: str, size: ClipSize, frame_rule: tuple[int, int]) -> None:
    """Check that a file is a mask of a video or picture: of its size, with something to make anew. named: what it is a
    mask of. Raises RequestError, and what inspect_clip raises."""
    mask = inspect_clip(path, "mask_path", size.num_frames)
    if (mask.width, mask.height) != (video.width, video.height):
        raise RequestError(
            f"mask_path: {path} is {mask.width} x {mask.height} (width x height), {named} {video.width} x "
            f"{video.height}; a mask has the size of what it masks"
        )
    if not mask.is_still:
        _check_length("mask_path", path, mask, size, frame_rule)
    if is_black(path, "mask_path", size.num_frames):
        raise RequestError(
            f"mask_path: {path} is black, so that nothing would be made anew; white is what is made anew"
        )


def clip_remarks(field: str, path: str, size: ClipSize) -> Iterator[str]:
    """Yield sentences on what of a video or picture, or a mask of one, is not used as it is."""
    clip = inspect_clip(path, field, size.num_frames)
    yield from (f"{field}: {path}: {remark}" for remark in clip.remarks)
    if clip.is_still and field != "mask_path" and size.num_frames > 1:
        yield f"{field}: {path}: it has one frame, which stands for every frame of the clip"
    if clip.num_frames > size.num_frames:
        first = "first frame is" if size.num_frames == 1 else f"first {size.num_frames} frames are"
        yield f"{field}: {path}: its {first} used"
    if clip.fps is not None and abs(clip.fps - size.fps) > 0.5 and size.num_frames > 1:
        yield (
            f"{field}: {path}: it has {clip.fps:.4g} frames per second, the clip {size.fps}: frame by frame, what "
            f"takes 1 s there takes {clip.fps / size.fps:.3g} s"
        )


def _check_length(field: str, path: str, clip: ClipFacts, size: ClipSize, rule: tuple[int, int]) -> None:
    if clip.num_frames < size.num_frames:
        fitting = max(0, clip.num_frames - rule[1]) // rule[0] * rule[0] + rule[1]
        raise RequestError(
            f"{field}: {path} has {clip.num_frames} frame{'s' * (clip.num_frames != 1)}, the clip {size.num_frames}; "
            f"give a longer one, or --num-frames {fitting}"
        )
