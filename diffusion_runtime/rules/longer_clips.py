"""Rules for clips longer than a model was trained on: context windows, their prompts, and RIFLEx."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from diffusion_runtime.core.latent_geometry import misfit
from diffusion_runtime.denoising.context_windows import DEFAULT_OVERLAP, WindowPlan, window_middle
from diffusion_runtime.denoising.prompt_times import resolve_switches
from diffusion_runtime.errors import RequestError, shown
from diffusion_runtime.layers.riflex import SHARE, lowered_index
from diffusion_runtime.request.prompt_switches import seconds_of
from diffusion_runtime.rules.batch_settings import BatchSettings, prompt_at


def window_values(settings: BatchSettings) -> dict[str, Any]:
    """Return the request values with the overlap and the noise of context windows, and with frames in place of the
    times of prompts. Raises RequestError for windows that the model cannot make, and for a prompt that none takes."""
    shared, values = settings.shared, dict[str, Any]()
    if shared.context_frames is None:
        return values
    step, remainder = settings.sampling.geometry.frame_rule
    if shared.context_frames % step != remainder % step:
        raise RequestError(misfit("context_frames", shared.context_frames, step, remainder))
    overlap = shared.context_overlap
    if overlap is None:
        latent_frames = (shared.context_frames - 1) // step + 1
        values["context_overlap"] = overlap = int(DEFAULT_OVERLAP * latent_frames) * step
    if overlap % step:
        raise RequestError(misfit("context_overlap", overlap, step, 0))
    if overlap >= shared.context_frames:
        raise RequestError(
            f"context_overlap: expected less than context_frames, {shared.context_frames}, got {overlap}"
        )
    if shared.context_noise is None:
        values["context_noise"] = "repeated"
    if shared.prompt_switches is not None:
        values["prompt_switches"] = tuple(sorted((_frame(settings, at), text) for at, text in shared.prompt_switches))
        _check_prompts(dataclasses.replace(settings, shared=dataclasses.replace(shared, **values)))
    return values


def window_prompts(settings: BatchSettings) -> tuple[str | None, ...]:
    """Return the prompt of each context window: the one that holds at its middle; None for the requests' own."""
    factor, found = settings.sampling.geometry.temporal_factor, list[str | None]()
    for window in settings.windows or ():
        middle = window_middle(window, factor)
        later = [text for at, text in settings.shared.prompt_switches or () if int(at) <= middle]
        found.append(later[-1] if later else None)
    return tuple(found)


def segment_prompts(settings: BatchSettings) -> tuple[str | None, ...]:
    """Return the prompt of each segment, None for the requests' own; none where all have that, and where it is encoded
    with the image that the segment begins with."""
    if settings.shared.prompt_switches is None or settings.sampling.text_sees_images:
        return ()
    found = (prompt_at(settings.shared, start) for start in settings.segments.starts)
    return tuple(None if prompt == settings.shared.prompt else prompt for prompt in found)


def _frame(settings: BatchSettings, at: int | str) -> int:
    size = settings.size
    frame = round(seconds_of(at, "--at") * size.fps) if isinstance(at, str) else at
    if not 1 <= frame < size.num_frames:
        raise RequestError(
            f"--at: expected a time behind the first frame of {size.num_frames} at {size.fps} frames per second, got "
            f"{shown(at)}"
        )
    return frame


def _check_prompts(settings: BatchSettings) -> None:
    """Raises RequestError for a prompt that no context window takes."""
    taken, factor = set(window_prompts(settings)), settings.sampling.geometry.temporal_factor
    places = ", ".join(f"{window_middle(window, factor):g}" for window in settings.windows or ())
    for at, text in ((0, None), *(settings.shared.prompt_switches or ())):
        if text not in taken:
            raise RequestError(
                f"--at: no context window takes the prompt from frame {at} on: a window takes the prompt that holds at "
                f"its middle, and the middles are the frames {places}; move a prompt, or use shorter windows "
                "(--context-frames)"
            )


def riflex_values(settings: BatchSettings, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request values with the index of the frequency that RIFLEx lowers. defaults: of the model, whose
    number of frames is what it was trained on. Raises RequestError for an index that there is not."""
    shared, temporal = settings.shared, settings.sampling.temporal
    if shared.riflex != "on" or temporal is None:
        return {}
    index = shared.riflex_index
    if index is None:
        trained = defaults.get("num_frames")
        if not isinstance(trained, int):
            raise RequestError(
                "riflex: the length that this model was trained on is not known, and so the frequency; give "
                f"--riflex-index, 1 to {len(temporal)}"
            )
        return {"riflex_index": temporal.intrinsic((trained - 1) // settings.sampling.geometry.temporal_factor + 1)}
    if index > len(temporal):
        raise RequestError(f"riflex_index: expected 1 to {len(temporal)}, the frequencies of this model, got {index}")
    return {}


def longer_clip_remarks(settings: BatchSettings) -> tuple[str, ...]:
    """Return sentences on how a clip that may be longer than trained is made."""
    shared, remarks = settings.shared, list[str]()
    if shared.context_frames is not None:
        plan = settings.windows
        if plan is None:
            remarks.append(
                f"context_frames: the clip of {settings.size.num_frames} frames lies in one window of "
                f"{shared.context_frames}, and is predicted at once"
            )
        else:
            remarks.append(_windows_text(settings, plan))
    else:
        remarks += [
            f"{name}: {value} is not used: the clip is predicted at once (--context-frames)"
            for name, value, off in (
                ("context_overlap", shared.context_overlap, None),
                ("context_noise", shared.context_noise, "random"),
            )
            if value not in (None, off)
        ]
    index, temporal = lowered_index(shared), settings.sampling.temporal
    if index is not None and temporal is not None:
        num_latents, period = settings.sizes.sample_shape(settings.size)[1], temporal.period(index)
        of_clip = f"the clip's {num_latents} latent frames"
        if num_latents > period:
            remarks.append(
                f"riflex: frequency {index} of {len(temporal)} in time is lowered, from a period of {period:.1f} "
                f"latent frames to {num_latents / SHARE:.1f}: {of_clip} lie within one"
            )
        else:
            remarks.append(
                f"riflex: nothing is lowered: {of_clip} lie within the period of frequency {index}, {period:.1f}"
            )
    elif shared.riflex_index is not None:
        remarks.append(f"riflex_index: {shared.riflex_index} is not used: riflex is not on (--riflex on)")
    return tuple(remarks)


def _windows_text(settings: BatchSettings, plan: WindowPlan) -> str:
    windows, shared = list(plan), settings.shared
    least = min(before.stop - after.start for before, after in itertools.pairwise(windows))
    noise = ", noise repeated in another order" if shared.context_noise == "repeated" else ""
    prompts = len(set(window_prompts(settings)))
    texts = f", of {prompts} prompts" if prompts > 1 else ""
    share = plan.length * len(plan) / plan.num_frames
    return (
        f"context windows: {len(plan)} of {shared.context_frames} frames ({plan.length} of {plan.num_frames} latent "
        f"frames), {least} or more latent frames shared{texts}{noise}: {len(plan)} evaluations per prediction, "
        f"{share:.1f} times the frames; positions are those within a window"
    )


def segment_values(settings: BatchSettings) -> dict[str, Any]:
    """Return the request values with the first frame of a segment in place of the times of prompts. Raises RequestError
    for a time past the end, and for two in one segment."""
    switches, size = settings.shared.prompt_switches, settings.size
    if switches is None or not settings.segments.is_apart:
        return {}
    starts, length = settings.segments.starts, (size.fps, size.num_frames)
    return {"prompt_switches": resolve_switches(switches, starts, length, field="--at", what="prompt", part="segment")}


def check_segments_asked(settings: BatchSettings) -> None:
    """Check what a request says of segments in a model that makes them of images where it is asked to. Raises
    RequestError for an overlap or seeds of a video that is made at once, and for more than the one frame that such a
    model begins with."""
    shared = settings.shared
    if not settings.sampling.continues_images:
        return
    if shared.segment_frames is None:
        for name in ("segment_overlap", "segment_seeds"):
            if getattr(shared, name) is not None:
                raise RequestError(f"{name}: the video is made at once; give --segment-frames as well, or leave it out")
    elif shared.segment_overlap not in (None, 1):
        raise RequestError(
            f"segment_overlap: expected 1, since this model begins with one frame, got {shared.segment_overlap}; leave "
            "it out"
        )
