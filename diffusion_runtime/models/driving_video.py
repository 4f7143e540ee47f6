"""Driving video: the image of a character and a video whose motion it takes over, of models that animate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from diffusion_runtime.core.latent_geometry import ClipSize, LatentGeometry
from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.clips import ClipFacts, inspect_clip
from diffusion_runtime.media.images import MAX_STRETCH, inspect_picture
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths

# The file fields of requests that such models take, and whether they need them.
FILES = {"image_path": True, "video_path": True}


@dataclass(frozen=True)
class DrivingVideo:
    """Animation by a driving video. The image is a latent frame before the clip's."""

    geometry: LatentGeometry

    most: ClassVar[int] = 1
    takes_scale: ClassVar[bool] = False

    def num_references(self, request: GenerationRequest) -> int:  # noqa: ARG002 - see VideoControl
        """Return 1, the image's frame."""
        return 1

    def check(self, request: GenerationRequest, size: ClipSize) -> None:
        """Check that a request's inputs can make a clip of this size. Raises RequestError."""
        assert request.video_path is not None, "the rules require it"
        self.check_frames(size)
        for path in image_paths(request, "image_path"):
            width, height = inspect_picture(path).size
            stretch = (width / height) / (size.width / size.height)
            if not 1 - MAX_STRETCH <= stretch <= 1 / (1 - MAX_STRETCH):
                raise RequestError(
                    f"image_path: {path} is {width} x {height} (width x height), the clip {size.width} x "
                    f"{size.height}: the ratio of the sides must agree within 10 %. Leave out --height and --width, "
                    "which follow from the image, or crop it"
                )
        self.check_length(request.video_path, "video_path", "the motion", size)

    def check_frames(self, size: ClipSize) -> None:
        """Check that a clip is a video. Raises RequestError."""
        factor = self.geometry.temporal_factor
        if size.num_frames <= factor:
            raise RequestError(f"num_frames: expected {factor + 1} or more for a video, got {size.num_frames}")

    def check_length(self, path: str, field: str, what: str, size: ClipSize) -> ClipFacts:
        """Return the facts of a video that is long enough for the clip. what: it shows, for messages. Raises
        RequestError for a shorter one."""
        video = inspect_clip(path, field, size.num_frames)
        if video.is_still:
            raise RequestError(f"{field}: {path} has one frame; give a video of {what}")
        if video.num_frames < size.num_frames:
            factor = self.geometry.temporal_factor
            fitting = (video.num_frames - 1) // factor * factor + 1
            raise RequestError(
                f"{field}: {path} has {video.num_frames} frames, the clip {size.num_frames}; give a longer one, or "
                f"--num-frames {fitting}"
            )
        return video

    def further_shapes(self, request: GenerationRequest, size: ClipSize) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002
        """Return the shapes of ImageCondition.further for a plan of memory, [channels, frames, height, width]."""
        return ()

    def remarks(self, request: GenerationRequest, size: ClipSize) -> Iterator[str]:
        """Yield sentences on the parts of the inputs that are not used as they are."""
        for path in image_paths(request, "image_path"):
            picture = inspect_picture(path)
            width, height = size_inside(picture.size, size.height, size.width)
            if (width, height) != (size.width, size.height):
                yield (
                    f"image_path: {path} is {picture.size[0]} x {picture.size[1]} (width x height) and fills {width} x "
                    f"{height} of the clip's {size.width} x {size.height}: the rest of every frame stays black; crop "
                    "the image to the clip's ratio, or the clip to that part"
                )
        yield from self.video_remarks(request.video_path, size)

    def video_remarks(self, video: str | None, size: ClipSize) -> Iterator[str]:
        """Yield sentences on the parts of the driving video that are not used as they are."""
        if video is None:
            return
        clip = inspect_clip(video, "video_path", size.num_frames)
        yield from (f"video_path: {video}: {remark}" for remark in clip.remarks)
        if clip.num_frames > size.num_frames:
            yield f"video_path: {video}: its first {size.num_frames} frames are used"
        if clip.fps is not None and abs(clip.fps - size.fps) > 0.5:
            yield (
                f"video_path: {video}: it has {clip.fps:.4g} frames per second, the clip {size.fps}: frame by frame, "
                f"what takes 1 s there takes {clip.fps / size.fps:.3g} s"
            )


def size_inside(sides: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """Return the (width, height) of a picture in a frame of height x width that it touches with two of its sides.
    sides: width and height."""
    if width / height < sides[0] / sides[1]:
        return width, max(1, sides[1] * width // sides[0])
    return max(1, sides[0] * height // sides[1]), height


def pasted(picture: Any, height: int, width: int, resample: Any) -> Any:
    """Return one of Pillow's RGB pictures in the middle of a black frame of height x width."""
    from PIL import Image

    inside = size_inside(picture.size, height, width)
    frame = Image.new("RGB", (width, height))
    frame.paste(picture.resize(inside, resample), ((width - inside[0]) // 2, (height - inside[1]) // 2))
    return frame
