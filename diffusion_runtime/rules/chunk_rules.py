"""Rules for requests of models that make a video chunk by chunk: window, first chunk, guidance, prompts on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from diffusion_runtime.attention.cache.history import CompressedHistory
from diffusion_runtime.attention.cache.pages import check_page_size
from diffusion_runtime.denoising.chunks import frames_needed, is_rolling
from diffusion_runtime.denoising.prompt_times import T, resolve_switches
from diffusion_runtime.errors import RequestError
from diffusion_runtime.request.generation_request import GenerationRequest, is_set
from diffusion_runtime.rules.batch_settings import BatchSettings


def check_chunks(settings: BatchSettings, *, has_two_experts: bool) -> None:
    """Raises RequestError where a chunk and the sink have no room in the window, for pages that a frame does not fill,
    and for what goes with a clip that is made at once."""
    shared, history = settings.shared, settings.rules.history
    if history is not None:
        _check_history(settings, history)
    window, sink = shared.kv_window or None, shared.kv_sink or 0
    needed = frames_needed(shared, settings.chunks, history)
    if window is not None and window < needed:
        of_chunk = f"a chunk of {needed - sink}"
        if history is not None:
            of_chunk = f"{history.full_chunks + 1} chunks token by token, and one in large patches"
        elif is_rolling(shared):
            of_chunk = f"{settings.num_steps} chunks of {settings.chunks.largest} at once"
        raise RequestError(
            f"kv_window: expected {needed} latent frames or more, a sink of {sink} and {of_chunk}, got "
            f"{window}; use --kv-window {needed}, or fewer by --kv-sink and --chunk-frames (0 is all frames)"
        )
    if shared.page_size is not None:
        _, height, width = settings.rules.geometry.grid(settings.sample_shape(settings.size))
        check_page_size(shared.page_size, height * width)
    if is_rolling(shared):
        if shared.sampler != "dmd":
            raise RequestError(
                f"chunk_schedule: rolling adds noise between the steps; expected sampler dmd, got {shared.sampler}"
            )
        if has_two_experts:
            raise RequestError(
                "chunk_schedule: rolling has several noise levels in one pass, and this model an expert for each; "
                "use sequential"
            )
        _check_alike(settings)
    listed = next((name for name in ("sigmas", "sigmas_before_shift") if is_set(shared, name)), None)
    if shared.first_chunk_steps not in (None, shared.num_inference_steps) and listed is not None:
        raise RequestError(
            f"first_chunk_steps: {listed} has one noise level for each of {shared.num_inference_steps} steps of any "
            f"chunk; expected {shared.num_inference_steps}, got {shared.first_chunk_steps}; leave out {listed}, or "
            f"use --first-chunk-steps {shared.num_inference_steps}"
        )
    for name in ("step_cache", "progressive_resolution", "cfg_gate"):
        if is_set(shared, name):
            raise RequestError(
                f"{name}: this model makes a video chunk by chunk, and this is for clips made at once; leave it out"
            )


def _check_history(settings: BatchSettings, history: CompressedHistory) -> None:
    """Raises RequestError for what goes with a cache whose frames are all of one size."""
    shared = settings.shared
    why = "the older frames of this model's history are in larger patches"
    if is_rolling(shared):
        raise RequestError(f"chunk_schedule: {why}, and each chunk needs a clean past; use sequential")
    if shared.positions not in (None, "absolute"):
        raise RequestError(f"positions: {why}, at their places in the video; expected absolute, got {shared.positions}")
    if shared.page_size is not None:
        raise RequestError(f"page_size: {why}, which fill no pages of one size; leave it out")
    if shared.switch_mode == "recache_at_once":
        raise RequestError(f"switch_mode: {why}, and are encoded chunk by chunk; use recache or keep")
    shape = settings.sample_shape(settings.size)
    if 0 in history.grid(shape):
        factor = settings.rules.geometry.spatial_factor
        smallest = (history.patch[1] * factor, history.patch[2] * factor)
        raise RequestError(
            f"height, width: {why}, of {smallest[0]} x {smallest[1]} pixels; expected a video of that size or more, "
            f"got {settings.size.height} x {settings.size.width}"
        )


def _check_alike(settings: BatchSettings) -> None:
    """Raises RequestError where a rolling window's first chunks differ from the others. What the model's defaults fill
    in cannot be left out, so a value that changes nothing passes."""
    shared, num_chunks = settings.shared, settings.chunks.num_chunks or 1
    alike: dict[str, float | int | str | None] = {
        "first_chunk_steps": shared.num_inference_steps,
        "first_chunk_flow_shift": shared.flow_shift,
        "first_chunk_sampler": shared.sampler,
        # All of them, or any number where none is guided.
        "guided_chunks": max(num_chunks, shared.guided_chunks or 0) if settings.is_guided else shared.guided_chunks,
    }
    for name, expected in alike.items():
        value = getattr(shared, name)
        if value not in (None, expected):
            raise RequestError(
                f"{name}: rolling denoises several chunks in one pass, all of them alike; expected {expected}, got "
                f"{value}; use --{name.replace('_', '-')} {expected}, or --chunk-schedule sequential"
            )


def with_resolved_switches(settings: BatchSettings) -> GenerationRequest:
    """The request with the first frame of a chunk in place of the times of its prompts and seeds. Raises RequestError
    for one past the end, and for two in one chunk."""
    request = settings.shared
    if request.prompt_switches is not None:
        prompts = _resolved(settings, request.prompt_switches, "--at", "prompt")
        request = dataclasses.replace(request, prompt_switches=prompts)
    if request.seed_switches is not None:
        seeds = _resolved(settings, request.seed_switches, "--seed-at", "seed")
        request = dataclasses.replace(request, seed_switches=seeds)
    return request


def _resolved(
    settings: BatchSettings, switches: Iterable[tuple[int | str, T]], name: str, what: str
) -> tuple[tuple[int, T], ...]:
    size = settings.size
    return resolve_switches(
        switches,
        settings.chunks,
        fps=size.fps,
        num_frames=size.num_frames,
        temporal_factor=settings.rules.geometry.temporal_factor,
        name=name,
        what=what,
    )


def with_guided_chunks(request: GenerationRequest, settings: BatchSettings) -> GenerationRequest:
    """A resolved request with the guidance mode that guided_chunks needs: later chunks go on from the keys of the
    conditional branch alone, which a pass of both branches does not keep apart."""
    if request.guided_chunks is None or not settings.is_guided:
        return request
    return dataclasses.replace(request, guidance_mode="two_pass")
