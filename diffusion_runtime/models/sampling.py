"""Sampling: what the sizes, steps and guidance of a request mean to one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diffusion_runtime.attention.cache.history import CompressedHistory
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.denoising.flow_schedule import FlowSchedule
from diffusion_runtime.denoising.registry import check_settings
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.denoising.segments import SegmentKind
from diffusion_runtime.layers.riflex import TemporalFrequencies
from diffusion_runtime.models.driving_video import DrivingVideo
from diffusion_runtime.models.image_control import ImageControl
from diffusion_runtime.models.video_control import VideoControl
from diffusion_runtime.models.video_restoration import VideoRestoration


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The sampling of a model, for the rules of its requests.

    geometry: the sizes it can make. scheduler: it came with; schedule: how noise levels are spaced.
    embeds_guidance: the transformer takes the guidance scale as an input; `guidance_scale` is then that, and
    `true_cfg_scale` is the scale of classifier-free guidance. takes_guidance: False for a model that was distilled to
    run without, and whose authors' pipeline leaves the scale unread. guidance_offset: what is added to guidance_scale
    to make it the factor of uncond + factor * (cond - uncond). guides_parts: pictures and sound are guided apart.
    control: what a model with control blocks takes, or one that animates by or restores a video. is_causal: it makes
    videos chunk by chunk, and its transformer reads the keys of earlier ones (attention/cache); history: of those whose
    older frames are in larger patches. caches_prefix: the transformer computes keys and values of tokens that every
    step attends to once a request (PrefixCache, ReferenceFrames). decodes_with_noise: the decoder takes noise and its
    level (decode_noise_scale, decode_timestep). segments: kind of those in which a video of more than segment_frames is
    made; None for a model that makes a video at once. continues_images: whether a request may ask for segments of one,
    each of which begins with the last frame of the one before as its image; text_sees_images: whether the text encoder
    reads it with the prompt. temporal: rotary frequencies of positions
    that count latent frames; None for other positions.
    """

    geometry: LatentGeometry
    scheduler: SchedulerConfig
    schedule: FlowSchedule = field(default_factory=FlowSchedule)
    embeds_guidance: bool = False
    takes_guidance: bool = True
    guidance_offset: float = 0.0
    guides_parts: bool = False
    control: VideoControl | ImageControl | DrivingVideo | VideoRestoration | None = None
    is_causal: bool = False
    history: CompressedHistory | None = None
    caches_prefix: bool = False
    decodes_with_noise: bool = False
    segments: SegmentKind | None = None
    continues_images: bool = False
    text_sees_images: bool = False
    temporal: TemporalFrequencies | None = None

    @property
    def switches_prompts(self) -> bool:
        """True where parts of a video may have prompts of their own: chunks, context windows, segments."""
        return self.is_causal or self.takes_windows or self.continues_images or self.segments == "continued"

    @property
    def has_phases(self) -> bool:
        """True where forward passes are of two kinds: denoising, and those that write keys for later ones."""
        return self.is_causal or self.caches_prefix

    @property
    def makes_clip_at_once(self) -> bool:
        """True where every latent frame of a video is in each forward pass."""
        return self.geometry.temporal_factor > 1 and not self.is_causal and self.segments is None

    @property
    def takes_riflex(self) -> bool:
        """True where RIFLEx can lower a frequency of the positions in time."""
        return self.makes_clip_at_once and self.temporal is not None

    @property
    def takes_windows(self) -> bool:
        """True where a clip can be predicted in context windows: each latent frame is one of the pictures, and nothing
        is given for frames beside the text."""
        geometry = self.geometry
        is_plain = not geometry.makes_sound and geometry.patch[0] == 1 and geometry.num_latents_before == 0
        return self.makes_clip_at_once and is_plain and self.control is None

    @property
    def restoration(self) -> VideoRestoration | None:
        """Restoration of videos, in a model that is made for it; None for any other."""
        return self.control if isinstance(self.control, VideoRestoration) else None

    @property
    def product(self) -> str:
        """The noun for what the model makes, in messages."""
        return "images" if self.geometry.temporal_factor == 1 else "videos"

    def is_guided_by(self, defaults: Mapping[str, Any]) -> bool:
        """Return whether a request of these values runs two branches."""
        scale = defaults.get("true_cfg_scale" if self.embeds_guidance else "guidance_scale")
        offset = 0.0 if self.embeds_guidance else self.guidance_offset
        return scale is not None and float(scale) + offset > 1

    def check_scheduler(self, defaults: Mapping[str, Any]) -> None:
        """Raises ModelLoadError for scheduler settings of the folder that its sampler does not compute. Nothing is
        checked where requests begin with another sampler. defaults: request values."""
        sampler = defaults.get("sampler")
        if sampler is not None and sampler == self.scheduler.sampler:
            check_settings(sampler, self.scheduler.options_for(sampler), self.scheduler.path)
