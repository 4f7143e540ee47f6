"""Diffusers pipelines for long video that keep no keys: their own methods, for reports and for refusals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LongVideoWay:
    """A pipeline's method for long video. note: sentence in the report of every generation. instead_of_streaming: why
    frames do not come one by one, and what to do."""

    note: str
    instead_of_streaming: str


_LINEAR = LongVideoWay(
    "SANA-Video: its self-attention is linear (ReLU), with no softmax and no keys to cache; an attention choice is for "
    "its cross-attention alone (arXiv:2509.24695)",
    "SANA-Video's linear attention has a state of fixed size in place of a key-value cache, and diffusers runs it over "
    "a whole clip at once; leave --stream out, or take a causal model, such as --model-path shapes-causal",
)
_DIFFUSION_FORCING = LongVideoWay(
    "SkyReels-V2: every latent frame has a noise level of its own, and no keys are kept: each step computes a whole "
    "window anew; a longer video is windows of base_num_frames that overlap by overlap_history frames, which are "
    "encoded again (arXiv:2504.13074)",
    "SkyReels-V2 keeps no keys: its frames have noise levels that rise along a window, which diffusers denoises to its "
    "end before it decodes; leave --stream out, or take a causal model, such as --model-path shapes-causal",
)
_WAYS = {"SanaVideo": _LINEAR, "SkyReelsV2DiffusionForcing": _DIFFUSION_FORCING}


def long_video_way(pipeline_class: str) -> LongVideoWay | None:
    """Return the method of a pipeline's class, by name; None for a class without one."""
    return next((way for name, way in _WAYS.items() if pipeline_class.startswith(name)), None)
