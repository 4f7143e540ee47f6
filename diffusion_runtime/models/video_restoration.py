"""Video restoration: a video or an image that is made anew at another size, and its frame rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.clips import MAX_FRAMES, inspect_clip
from diffusion_runtime.media.images import MAX_STRETCH, inspect_picture
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths

# The file fields of requests that such models take: one of them.
FILES = {"image_path": False, "video_path": False}
# The request fields of such models, in addition to the files.
FIELDS = ("video_first_frame", "color_correction")
# Height and width of what is made, in those of the file, where a request says neither.
DEFAULT_SCALE = 2
MAX_SCALE = 16
# By suffix: images, and what may be an animation.
_IMAGES, _EITHER = (".jpg", ".jpeg"), (".png", ".apng", ".webp", ".gif")
_WHAT = "this model restores a video or an image; give one: --video-path FILE or --image-path FILE"


@dataclass(frozen=True)
class Source:
    """The file of a request. height, width: in pixels; num_frames: from the request's first one on; fps: None for an
    image."""

    path: str
    field: str
    height: int
    width: int
    num_frames: int
    fps: float | None
    remarks: tuple[str, ...] = ()


def source_of(image_path: str | None, video_path: str | None, first_frame: int | None) -> Source:
    """Return the file that is restored. Raises RequestError without one, for both, for one that cannot be read, and for
    a first frame that it does not have."""
    if (image_path is None) == (video_path is None):
        both = "" if image_path is None else "image_path, video_path: expected one of them, got both; "
        raise RequestError(f"{both}{_WHAT}" if both else f"video_path: {_WHAT}")
    if image_path is not None:
        width, height = inspect_picture(image_path).size
        _check_first(first_frame, 1, image_path)
        return Source(image_path, "image_path", height, width, 1, None)
    assert video_path is not None
    facts = inspect_clip(video_path, "video_path", MAX_FRAMES)
    _check_first(first_frame, facts.num_frames, video_path)
    fps = None if facts.is_still else facts.fps
    left = facts.num_frames - (first_frame or 0)
    return Source(video_path, "video_path", facts.height, facts.width, left, fps, facts.remarks)


def _check_first(first_frame: int | None, num_frames: int, path: str) -> None:
    if first_frame is not None and first_frame >= num_frames:
        raise RequestError(
            f"video_first_frame: {path} has {num_frames} frame{'s' * (num_frames != 1)}, counted from 0: expected at "
            f"most {num_frames - 1}, got {first_frame}"
        )


@dataclass(frozen=True)
class VideoRestoration:
    """Restoration of videos and images, one in a request."""

    most: ClassVar[int] = 1
    takes_scale: ClassVar[bool] = False

    def num_references(self, request: GenerationRequest) -> int:  # noqa: ARG002 - see VideoControl
        """Return 0: the latents hold no reference frames."""
        return 0

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request values that follow from the file: its frames and frames per second, and the size. given:
        what a request says. Raises what source_of raises."""
        image = given.get("image_path")
        source = source_of(
            image[0] if isinstance(image, tuple) else image, given.get("video_path"), given.get("video_first_frame")
        )
        values: dict[str, Any] = {}
        if "num_frames" not in given and "seconds" not in given:
            values["num_frames"] = source.num_frames
        if source.fps is not None:
            values["fps"] = max(1, round(source.fps))
        height, width = given.get("height"), given.get("width")
        if height is None and width is None:
            values |= {"height": source.height * DEFAULT_SCALE, "width": source.width * DEFAULT_SCALE}
        elif height is None or width is None:
            # The other side in proportion, even as videos need it.
            scale = height / source.height if height is not None else width / source.width  # type: ignore[operator]
            name, side = ("width", source.width) if width is None else ("height", source.height)
            values[name] = max(2, round(side * scale / 2) * 2)
        return values

    def check(self, request: GenerationRequest, size: ClipSize) -> None:
        """Check that a request's file has the frames and the ratio of sides of what is made. Raises RequestError."""
        source = self.source(request)
        if size.num_frames > source.num_frames:
            first = request.video_first_frame or 0
            behind = f" from frame {first} on" if first else ""
            raise RequestError(
                f"num_frames: {source.path} has {source.num_frames} frame{'s' * (source.num_frames != 1)}{behind}; "
                f"expected at most that, got {size.num_frames}; leave it out for all of them"
            )
        stretch = (source.width / source.height) / (size.width / size.height)
        if not 1 - MAX_STRETCH <= stretch <= 1 / (1 - MAX_STRETCH):
            fitting = round(size.height * source.width / source.height / 2) * 2
            raise RequestError(
                f"width: {source.path} is {source.width} x {source.height} (width x height), what is made of it "
                f"{size.width} x {size.height}: the ratio of the sides must agree within 10 %; with height "
                f"{size.height} the width is {fitting}"
            )

    def source(self, request: GenerationRequest) -> Source:
        """Return the file of a request. Raises what source_of raises."""
        image = next(iter(image_paths(request, "image_path")), None)
        return source_of(image, request.video_path, request.video_first_frame)

    def remarks(self, request: GenerationRequest, size: ClipSize) -> Iterator[str]:
        """Yield sentences on what of the file and of the request is not used."""
        source = self.source(request)
        yield from (f"{source.field}: {source.path}: {remark}" for remark in source.remarks)
        if request.prompt != Path(source.path).stem:
            yield "prompt: is not read: the model was trained with one text, and knows no other"
        if source.num_frames > size.num_frames:
            yield f"{source.field}: {source.path}: {size.num_frames} of its {source.num_frames} frames are restored"

    def frame_rate(self, request: GenerationRequest, fps: int) -> float:
        """Return the frames per second of the file that is written: those of the video where a request says no others.
        fps: of the request."""
        found = self.source(request).fps
        return fps if found is None or max(1, round(found)) != fps else found


def upscale_request(
    path: str | Path,
    *,
    scale: float | None = None,
    size: tuple[int, int] | None = None,
    **values: Any,
) -> GenerationRequest:
    """Return the request that restores a video or an image at another size, for a model such as SeedVR2.

    scale: of height and width, None for twice; size: width and height in pixels, in place of it. values: further fields
    of GenerationRequest, such as seed or color_correction.

    Raises RequestError for a file that cannot be read, for both scale and size, and for a size that is none.
    """
    place = str(path)
    source = source_of(**{"image_path": None, "video_path": None, _field_of(place): place}, first_frame=None)
    if scale is not None and size is not None:
        raise RequestError("scale, size: expected one of them, got both; each says how large the result is")
    if size is not None:
        width, height = size
    else:
        factor = DEFAULT_SCALE if scale is None else scale
        if not 0 < factor <= MAX_SCALE:
            raise RequestError(f"scale: expected a number above 0 and up to {MAX_SCALE}, got {factor:g}")
        # Even, as videos need it.
        height, width = (max(2, round(side * factor / 2) * 2) for side in (source.height, source.width))
    named = {source.field: place, "height": height, "width": width}
    return GenerationRequest(**{"prompt": Path(place).stem or "-", **named, **values})


def _field_of(path: str) -> str:
    """Return the request field for a file: of a video, of an animation, or of an image."""
    suffix = Path(path).suffix.lower()
    if suffix in _IMAGES or (suffix in _EITHER and inspect_clip(path, "video_path", 1).is_still):
        return "image_path"
    return "video_path"
