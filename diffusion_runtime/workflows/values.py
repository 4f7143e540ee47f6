"""Values that travel along a workflow's links, as far as a request can say them: what they are of, never tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diffusion_runtime.denoising.named_schedules import NoiseTable
from diffusion_runtime.workflows.graph import Node


class Missing:
    """The output of a node that is not supported: whatever takes it is not looked at."""


@dataclass(frozen=True)
class Unknown:
    """A number that a file decides that is not here. reason: for messages."""

    reason: str


@dataclass(frozen=True)
class Weights:
    """A file of weights by the name that a node has. folder: of ComfyUI's; node: that names it."""

    node: Node
    file: str
    folder: str


@dataclass(frozen=True)
class Lora:
    node: Node
    file: str
    scale: float


@dataclass(frozen=True)
class SparseValue:
    """Sparse attention. keep: share of the blocks of keys that is kept; start: share of the schedule before it, which
    is dense; min_tokens: of videos with fewer, which are dense."""

    node: Node
    keep: float
    start: float
    min_tokens: int


@dataclass(frozen=True)
class SkipValue:
    """Skip-layer guidance. double, single: blocks, as ComfyUI counts those of two streams and of one; scale: of one
    more prediction, None for the negative one without the blocks; start, end: shares of the schedule before its
    shift."""

    node: Node
    double: tuple[int, ...]
    single: tuple[int, ...]
    scale: float | None
    start: float
    end: float


@dataclass(frozen=True)
class ZeroStarValue:
    """CFG-zero*. name: of the request's cfg_zero_star; num_zero_steps: first steps without velocity."""

    node: Node
    name: str
    num_zero_steps: int = 0


@dataclass(frozen=True)
class ModelValue:
    """A transformer. table: of noise levels that a node sets; shift_of: that node; sparse: its attention, where a node
    sets it; norm_of: a node that gives guided predictions the norm of conditional ones; zero_star, skip: of guidance;
    cast: of a node that casts the weights to 8-bit floats and multiplies in them."""

    weights: Weights
    loras: tuple[Lora, ...] = ()
    table: NoiseTable | None = None
    shift_of: Node | None = None
    sparse: SparseValue | None = None
    audio_shift: float | None = None
    norm_of: Node | None = None
    zero_star: ZeroStarValue | None = None
    skip: SkipValue | None = None
    cast: Node | None = None


@dataclass(frozen=True)
class ClipValue:
    """Text encoders. kind: of CLIPLoader, such as `wan`."""

    weights: tuple[Weights, ...]
    kind: str = ""
    loras: tuple[Lora, ...] = ()


@dataclass(frozen=True)
class VaeValue:
    weights: Weights


@dataclass(frozen=True)
class VisionValue:
    """A CLIP vision encoder, and the picture that it has encoded."""

    weights: Weights
    picture: PictureValue | None = None


@dataclass(frozen=True)
class PictureValue:
    """A picture or the frames of a video. file: as LoadImage and LoadVideo name it; decoded: of a latent instead; size:
    (width, height) where it is known; parts: pictures of a batch; num_frames: of a video that is cut, at most."""

    node: Node
    file: str | None = None
    decoded: LatentValue | None = None
    size: tuple[int, int] | None = None
    is_film: bool = False
    parts: tuple[PictureValue, ...] = ()
    changed_by: tuple[Node, ...] = ()
    num_frames: int | None = None


@dataclass(frozen=True)
class MaskValue:
    """A mask. value: of one that is the same everywhere; file: of one that is read."""

    node: Node
    file: str | None = None
    value: float | None = None


@dataclass(frozen=True)
class SoundValue:
    node: Node
    file: str | None = None
    decoded: LatentValue | None = None


@dataclass(frozen=True)
class ConditioningValue:
    """An encoded prompt. given: request fields that a node behind it set; references: pictures that the model sees."""

    node: Node
    text: str
    clip: ClipValue
    zeroed: Node | None = None
    guidance: float | None = None
    references: tuple[PictureValue, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    fps: float | None = None


@dataclass(frozen=True)
class LatentValue:
    """Latents. width, height: in pixels; frames: of the video, 1 for an image; given: request fields that a node set;
    stage: that sampled them; upscaled: by a latent upsampler; start: the picture that they are of."""

    node: Node
    width: int | Unknown
    height: int | Unknown
    frames: int | Unknown = 1
    batch: int = 1
    given: Mapping[str, Any] = field(default_factory=dict)
    stage: StageValue | None = None
    upscaled: tuple[LatentValue, Weights] | None = None
    start: PictureValue | None = None
    sound: LatentValue | None = None
    is_sound: bool = False


@dataclass(frozen=True)
class SamplerValue:
    node: Node
    name: str
    options: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SigmasValue:
    """Noise levels, the last one 0 or where another stage goes on. own: a number of steps of the model's own schedule
    in their place."""

    node: Node
    levels: tuple[float, ...] = ()
    own: int | None = None
    text: str = ""


@dataclass(frozen=True)
class NoiseValue:
    """seed: None for no noise."""

    node: Node
    seed: int | None


@dataclass(frozen=True)
class GuiderValue:
    """Guidance. share: of the steps that have it, both ends included; steps: whether each of them has it, where two
    samplers follow each other, None for those of `share`."""

    node: Node
    model: ModelValue
    positive: ConditioningValue
    negative: ConditioningValue | None
    scale: float
    audio_scale: float | None = None
    share: tuple[float, float] = (0.0, 1.0)
    steps: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class StageValue:
    """One run of a sampler. latent: that it starts from."""

    node: Node
    guider: GuiderValue
    sampler: SamplerValue
    sigmas: SigmasValue
    noise: NoiseValue
    latent: LatentValue


@dataclass(frozen=True)
class MovieValue:
    """Frames with their rate and sound."""

    node: Node
    pictures: PictureValue
    fps: float
    sound: SoundValue | None = None


@dataclass(frozen=True)
class UpsamplerValue:
    weights: Weights
