"""MiniMax-H3's latents: a video, 17 frames of which are 5 latent frames, and its sound on two sides; read from json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from diffusion_runtime.core.latent_geometry import ClipSize, read_num_channels
from diffusion_runtime.core.model_folder import INDEX_FILE, AnyFolder, ConfigFile, read_config, read_index
from diffusion_runtime.core.sound_geometry import SoundGeometry
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.generation import generation_settings
from diffusion_runtime.models.minimax_h3.config import AUDIO_VAE, PATCH, read_transformer_config

# The only frame rate of the training, of which the sound's 40 latents a second are five thirds.
FPS = 24
_CHUNK_FRAMES, _CHUNK_LATENTS = 17, 5
# A clip ends with a part of a chunk, behind one chunk or more.
_LAST_FRAMES, _LAST_LATENTS = 5, 2
# Of the published model, 5 to 15 seconds: its authors' pipeline refuses others.
FRAME_LIMITS = 124, 345
# Sides of an image or a video that is given are at most as unequal.
_MOST_UNEQUAL = 4
# Sizes of the published model: the shorter side, unless the area is more than this; the shorter side of an image that
# is referred to.
SHORT_EDGE, MOST_PIXELS, REFERENCE_EDGE = 768, 768 * 1344, 2048
# Of sides, and of the area of a clip.
_MULTIPLE, _MOST_AREA = 32, 2**26
# The sound is a left and a right side; latents a second of each, which the rotary positions count on.
_SIDES, _AUDIO_RATE = 2, 40
_ENCODER_RATES = (2, 4, 4, 5, 5)


@dataclass(frozen=True)
class MiniMaxH3Geometry(SoundGeometry):
    """Geometry of a clip. temporal_factor: of most latents; the first of five is a frame alone. frame_limits: fewest
    and most frames that the model was made for. short_edge, most_pixels: of a clip that takes its ratio from an image;
    reference_edge: the shorter side of an image that is referred to."""

    appends_last_image: ClassVar[bool] = True
    frame_limits: tuple[int, int] = FRAME_LIMITS
    short_edge: int = SHORT_EDGE
    most_pixels: int = MOST_PIXELS
    reference_edge: int = REFERENCE_EDGE

    @property
    def frame_rule(self) -> tuple[int, int]:
        return _CHUNK_FRAMES, _LAST_FRAMES

    def check(self, height: int, width: int, num_frames: int) -> None:
        """Check a size. Raises RequestError for a shorter or longer clip than the model was made for, too."""
        fewest, most = self.frame_limits
        if not fewest <= num_frames <= most:
            seconds = f"{num_frames / FPS:.1f} s; the model makes {fewest / FPS:.1f} to {most / FPS:.1f} s"
            nearest = fewest if num_frames < fewest else most
            raise RequestError(f"num_frames: expected {fewest} to {most}, got {num_frames}, {seconds}: use {nearest}")
        super().check(height, width, num_frames)

    def latent_shape(self, height: int, width: int, num_frames: int) -> tuple[int, int, int, int]:
        self.check(height, width, num_frames)
        return (
            self.num_channels,
            self.num_latent_frames(num_frames),
            height // self.spatial_factor,
            width // self.spatial_factor,
        )

    def num_latent_frames(self, num_frames: int) -> int:
        """Return the latent frames of a video of whole_frames."""
        return (num_frames - _LAST_FRAMES) // _CHUNK_FRAMES * _CHUNK_LATENTS + _LAST_LATENTS

    def frames_of_latents(self, num_frames: int) -> tuple[int, ...]:
        # A chunk, and the part of one at the end, begin with a frame alone.
        whole, part = ((1, *[self.temporal_factor] * (count - 1)) for count in (_CHUNK_LATENTS, _LAST_LATENTS))
        return whole * ((num_frames - _LAST_FRAMES) // _CHUNK_FRAMES) + part

    @property
    def fewest_frames(self) -> int:
        """Fewest frames of a video that can be encoded."""
        return _CHUNK_FRAMES + _LAST_FRAMES

    def whole_frames(self, num_frames: int) -> int:
        """Return the largest number of frames that can be encoded of so many."""
        return max(1, (num_frames - _LAST_FRAMES) // _CHUNK_FRAMES) * _CHUNK_FRAMES + _LAST_FRAMES

    def size_of_image(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width of the clip that is made of an image of another size. Raises RequestError for
        sides that are too unequal."""
        scale = self._scale_to(self.short_edge, size)
        scale *= min(1.0, math.sqrt(self.most_pixels / (size[0] * size[1] * scale * scale)))
        return self._whole(size, scale)

    def reference_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width that an image is encoded at as a reference. Raises RequestError for sides that
        are too unequal."""
        return self._whole(size, self._scale_to(self.reference_edge, size))

    def _scale_to(self, edge: int, size: tuple[int, int]) -> float:
        height, width = size
        if max(size) > _MOST_UNEQUAL * min(size):
            raise RequestError(
                f"expected sides of a ratio from 1:{_MOST_UNEQUAL} to {_MOST_UNEQUAL}:1, got {width} x {height} "
                f"(width x height), {width / height:.3g}:1; crop it"
            )
        return edge / min(size)

    def _whole(self, size: tuple[int, int], scale: float) -> tuple[int, int]:
        multiple = self.spatial_factor * self.patch[1]
        height, width = (max(1, round(side * scale / multiple)) * multiple for side in size)
        return height, width

    def audio_shape(self, size: ClipSize) -> tuple[int, int, int]:
        """Return (channels, length, sides). Raises RequestError for another frame rate than the model's."""
        if size.fps != FPS:
            raise RequestError(
                f"fps: this model makes {FPS} frames a second with their sound, got {size.fps}; leave it out"
            )
        return super().audio_shape(size)


def read_geometry(folder: AnyFolder) -> MiniMaxH3Geometry:
    """Read the configs of the transformer and both autoencoders. Raises ModelLoadError that names file and key."""
    transformer = read_transformer_config(folder)
    video, audio = read_config(folder, "vae"), read_config(folder, AUDIO_VAE)
    channels = read_num_channels(
        video, "latent_channels", transformer.num_channels, "the transformer's in_channels", 24
    )
    audio_channels = read_num_channels(
        audio, "latent_channels", transformer.num_audio_channels, "the transformer's audio_in_channels", 32
    )
    hops = audio.values.get("encoder_rates", _ENCODER_RATES)
    rate = audio.whole_number("sampling_rate", 32000)
    if not isinstance(hops, list | tuple) or not all(type(each) is int for each in hops):
        raise audio.error("encoder_rates", "a list of whole numbers", hops)
    if rate != _AUDIO_RATE * math.prod(hops):
        raise audio.error("sampling_rate", f"{_AUDIO_RATE * math.prod(hops)}, {_AUDIO_RATE} x encoder_rates", rate)
    index = ConfigFile(folder / INDEX_FILE, read_index(folder))
    return MiniMaxH3Geometry(
        num_channels=channels,
        spatial_factor=16,
        temporal_factor=4,
        patch=PATCH,
        num_audio_channels=audio_channels,
        num_audio_bins=_SIDES,
        audio_rate=float(_AUDIO_RATE),
        frame_limits=generation_settings(folder).num_frames or FRAME_LIMITS,
        short_edge=index.whole_number("canvas_short_edge", SHORT_EDGE, _MULTIPLE),
        most_pixels=index.whole_number("canvas_max_pixels", MOST_PIXELS, _MULTIPLE**2, _MOST_AREA),
        reference_edge=index.whole_number("reference_image_short_edge", REFERENCE_EDGE, _MULTIPLE),
    )
