"""References of a MiniMax-H3 clip (its ref2va mode): images, videos with their sound, and sounds, in the order of the
request. They are latents of their own sizes before the clip's, and parts of the prompt.

A video is brought to the clip's frame rate, cut to the clip's length, and has the size that a clip of its own ratio
has. An image is larger. A sound is cut to the clip's length.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import torch

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.errors import ModelLoadError, RequestError
from diffusion_runtime.media.audio import read_sound_as_it_is, sound_seconds
from diffusion_runtime.media.clips import paced, read_paced
from diffusion_runtime.media.images import inspect_picture, read_image
from diffusion_runtime.media.media_files import IMAGE, SOUND, VIDEO, MediaFile, media_file
from diffusion_runtime.media.resampling import resampled
from diffusion_runtime.models.interface import GivenMedia, ImageCondition, ImageConditioner
from diffusion_runtime.models.minimax_h3.codec import MiniMaxH3Encoder
from diffusion_runtime.models.minimax_h3.geometry import FPS, MiniMaxH3Geometry
from diffusion_runtime.models.minimax_h3.keyframes import noised
from diffusion_runtime.models.reference_images import Size
from diffusion_runtime.models.reference_media import FIELD, ReferenceMedia, ReferenceShape
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths
from diffusion_runtime.text_encoders.picture_language_model import AROUND, PICTURE, read_preparation_of_pictures
from diffusion_runtime.text_encoders.picture_patches import PatchPreparation, PicturePatches, read_patch_preparation

# What the published model was made for.
_MOST = {IMAGE: 9, VIDEO: 3, SOUND: 3}
_MOST_TOGETHER = 12
# The language model sees two frames a second; the time of a group of frames is part of the text.
_SEEN_A_SECOND = 2
# Texts before what they name, numbered by kind; a sound is its text alone.
_NAMES = {IMAGE: "<Picture {}>", VIDEO: "<Video {}>", SOUND: "<Audio {}>"}
_LABELS = {kind: f"{name}: " for kind, name in _NAMES.items()}
_TIME = "<{:.1f} seconds>"
# Tokens of a label, or of a time, at most.
_NUM_LABEL_TOKENS = 8
# Of Qwen3-VL's video_preprocessor_config.json: pixels of all frames together.
_VIDEO_PIXELS = 4096, 25165824


@dataclasses.dataclass(frozen=True)
class Preparations:
    """Preparation of images and of videos for the language model's vision half."""

    images: PatchPreparation
    videos: PatchPreparation


def read_preparations(folder: AnyFolder) -> Preparations:
    """Read the preparation of images and of videos; a folder without one of videos has the published model's. Raises
    ModelLoadError that names the file and the key."""
    images = read_preparation_of_pictures(folder)
    own, whole = (folder / "processor" / f"{name}_config.json" for name in ("video_preprocessor", "processor"))
    if own.is_file():
        videos = read_patch_preparation(own)
    elif whole.is_file():
        videos = read_patch_preparation(whole, "video_processor")
    else:
        fewest, most = _VIDEO_PIXELS
        videos = dataclasses.replace(images, min_pixels=fewest, max_pixels=most)
    if (videos.patch, videos.frames, videos.merge) != (images.patch, images.frames, images.merge):
        raise ModelLoadError(f"{own}: expected the patches of images, {images}, got {videos}")
    return Preparations(images, videos)


def reference_media(geometry: MiniMaxH3Geometry, folder: AnyFolder) -> ReferenceMedia:
    """Return the rules of references. Raises ModelLoadError."""
    shape_of = partial(_shape_of, geometry, read_preparations(folder))
    return ReferenceMedia(most=_MOST, most_together=_MOST_TOGETHER, not_alone=SOUND, shape_of=shape_of, labels=_NAMES)


def _shape_of(
    geometry: MiniMaxH3Geometry, preparations: Preparations, file: MediaFile, size: ClipSize
) -> ReferenceShape:
    num_moments = 0
    if file.sound_rate is not None:
        seconds = sound_seconds(file.path, FIELD, size.num_frames / FPS)
        num_moments = math.ceil(seconds * geometry.audio_rate)
    of_sound = num_moments * geometry.num_audio_bins
    if file.kind == SOUND:
        return ReferenceShape(of_sound, None, num_moments, _NUM_LABEL_TOKENS)
    if file.kind == IMAGE:
        height, width = image_size(geometry, file.path)
        seen = preparations.images.whole_tokens(1, height, width)
        blocks, pictures = 1, (1, *_latents(geometry, (height, width)))
        remarks: tuple[str, ...] = ()
        preparation = preparations.images
    else:
        height, width = video_size(geometry, file.path, size.num_frames)
        facts, repeats = paced(file.path, FIELD, size.num_frames, FPS)
        count = _num_frames(repeats, size.num_frames)
        fewest = geometry.fewest_frames
        if count < fewest:
            raise RequestError(
                f"expected {fewest} frames or more at {FPS} a second ({fewest / FPS:.2f} s), got {count}; give a "
                "longer video, or a frame of it as an image"
            )
        seen_frames = len(frames_seen(count))
        preparation = preparations.videos
        seen = preparation.whole_tokens(seen_frames, height, width)
        blocks = -(-seen_frames // preparation.frames)
        kept = geometry.whole_frames(count)
        pictures = (geometry.num_latent_frames(kept), *_latents(geometry, (height, width)))
        is_longer = sum(repeats) > size.num_frames
        remarks = facts.remarks + (f"its first {size.num_frames / FPS:.1f} s are used",) * is_longer
        if facts.fps is not None and abs(facts.fps - FPS) > 0.5:
            verb = "dropped" if facts.fps > FPS else "repeated"
            remarks += (f"its {facts.fps:.4g} frames a second become {FPS}: frames are {verb}",)
    side = preparation.patch * preparation.merge
    num_text = blocks * (seen[0] // side * (seen[1] // side) + 2 + _NUM_LABEL_TOKENS) + _NUM_LABEL_TOKENS
    num_tokens = of_sound + math.prod(pictures) // math.prod(geometry.patch)
    return ReferenceShape(num_tokens, pictures, num_moments, num_text, remarks)


def _latents(geometry: MiniMaxH3Geometry, size: Size) -> Size:
    return size[0] // geometry.spatial_factor, size[1] // geometry.spatial_factor


def _num_frames(repeats: tuple[int, ...], most: int) -> int:
    return min(sum(repeats), most)


def image_size(geometry: MiniMaxH3Geometry, path: str) -> Size:
    """Return the height and width that an image is encoded at. Raises RequestError for one too wide or too high."""
    width, height = inspect_picture(path, FIELD).size
    return geometry.reference_size((height, width))


def video_size(geometry: MiniMaxH3Geometry, path: str, num_frames: int) -> Size:
    """Return the height and width that a video is encoded at. Raises RequestError for one too wide or too high."""
    facts, _ = paced(path, FIELD, num_frames, FPS)
    return geometry.size_of_image((facts.height, facts.width))


def frames_seen(num_frames: int) -> list[int]:
    """Return the frames of a video that the language model sees, two a second."""
    return list(range(0, num_frames, FPS // _SEEN_A_SECOND))


def times_seen(num_seen: int, group: int) -> list[float]:
    """Return the time of each group of frames that are seen, in seconds: the mean of its first and last one's, the last
    frame being repeated to whole groups."""
    times = [index / _SEEN_A_SECOND for index in range(num_seen)]
    times += times[-1:] * (-num_seen % group)
    return [(times[first] + times[first + group - 1]) / 2 for first in range(0, len(times), group)]


@dataclasses.dataclass(frozen=True)
class ReadReference:
    """A reference's contents. frames: uint8 [frames, height, width, 3], one of an image; None for a sound. samples:
    float32 [2, number] at the model's rate; None without sound."""

    kind: str
    frames: torch.Tensor | None = None
    samples: torch.Tensor | None = None


def read_references(
    geometry: MiniMaxH3Geometry, request: GenerationRequest, *, sample_rate: int | None
) -> list[ReadReference]:
    """Return the contents of a resolved request's references, in their order. sample_rate: of the sound; None leaves it
    out. Raises RequestError for a file that has changed since it was checked."""
    assert request.num_frames is not None
    return [
        _read(geometry, media_file(path, FIELD), request.num_frames, sample_rate)
        for path in image_paths(request, FIELD)
    ]


def _read(geometry: MiniMaxH3Geometry, file: MediaFile, num_frames: int, sample_rate: int | None) -> ReadReference:
    frames = samples = None
    if file.kind == IMAGE:
        frames = torch.from_numpy(read_image(file.path, *image_size(geometry, file.path)))[None]
    elif file.kind == VIDEO:
        size = video_size(geometry, file.path, num_frames)
        frames = torch.from_numpy(read_paced(file.path, FIELD, num_frames, FPS, *size))
    if file.sound_rate is not None and sample_rate is not None:
        own = read_sound_as_it_is(
            file.path, FIELD, num_frames / FPS, file.sound_rate, num_channels=1 if file.is_mono else 2
        )
        sides = torch.from_numpy(own.samples).expand(2, -1)
        samples = resampled(sides, file.sound_rate, sample_rate)
    return ReadReference(file.kind, frames, samples)


def presented(
    references: list[tuple[MediaFile, torch.Tensor | None]], preparations: Preparations
) -> tuple[list[str], list[PicturePatches]]:
    """Return what stands before a prompt about references: texts that are tokenized one by one, with the marks of
    pictures among them, and these pictures. references: with uint8 frames [frames, height, width, 3], None of a
    sound."""
    texts, pictures = list[str](), list[PicturePatches]()
    counts = dict.fromkeys(_LABELS, 0)

    def label(kind: str) -> None:
        counts[kind] += 1
        texts.append(_LABELS[kind].format(counts[kind]))

    def show(picture: PicturePatches) -> None:
        pictures.append(picture)
        texts.append(AROUND.format(PICTURE * picture.num_tokens))

    for file, frames in references:
        # The sound of a video is named before it, as its latents come first.
        if file.sound_rate is not None:
            label(SOUND)
        if file.kind == SOUND:
            continue
        assert frames is not None
        label(file.kind)
        if file.kind == IMAGE:
            show(preparations.images.prepare(frames[0]))
            continue
        seen = frames[frames_seen(len(frames))]
        groups = preparations.videos.prepare_clip(seen)
        for time, group in zip(times_seen(len(seen), preparations.videos.frames), groups, strict=True):
            texts.append(_TIME.format(time))
            show(group)
    return texts, pictures


class MediaConditioner(ImageConditioner):
    """Conditioner of references of several kinds. load_encoder: gives their encoder when the first request comes;
    sample_rate: of its sound."""

    def __init__(
        self, geometry: MiniMaxH3Geometry, sample_rate: int, load_encoder: Callable[[], MiniMaxH3Encoder]
    ) -> None:
        self._geometry = geometry
        self._sample_rate = sample_rate
        self._load_encoder = load_encoder
        self._encoder: MiniMaxH3Encoder | None = None

    @property
    def libraries(self) -> tuple[LibraryAttention, ...]:
        if self._encoder is None:
            return ()
        return (LibraryAttention("vae encoder", "diffusers", "encoders of pictures and of sound"),)

    def condition(self, request: GenerationRequest, size: ClipSize) -> ImageCondition:
        """Return the condition. Pictures have the trace of noise that an image to start from has, the same for every
        clip; sounds have none."""
        if self._encoder is None:
            self._encoder = self._load_encoder()
        encoder, found = self._encoder, list[GivenMedia]()
        noise = noised()
        for each in read_references(self._geometry, request, sample_rate=self._sample_rate):
            pictures = None
            if each.frames is not None:
                kept = (
                    each.frames
                    if len(each.frames) == 1
                    else each.frames[: self._geometry.whole_frames(len(each.frames))]
                )
                pictures = noise(encoder.encode_frames(kept))
            sound = None if each.samples is None else encoder.encode_sound(each.samples)
            found.append(GivenMedia(pictures, sound))
        none = torch.empty(1, self._geometry.num_channels, 0, size.height // 16, size.width // 16)
        return ImageCondition(none, media=tuple(found))
