"""Rules for requests of models that make a video chunk by chunk: window, first chunk, guidance, prompts on the way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from diffusion_runtime.attention.cache.history import CompressedHistory
from diffusion_runtime.attention.cache.pages import check_page_size
from diffusion_runtime.denoising.chunks import frames_needed, is_rolling
from diffusion_runtime.denoising.prompt_times import T, first_frame, resolve_switches
from diffusion_runtime.errors import RequestError
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.features import LARGE_PATCHES


def check_chunks(settings: BatchSettings) -> None:
    """Raises RequestError where a chunk and the sink have no room in the window, for pages that a frame does not fill,
    and for a rolling window whose chunks differ."""
    shared, history = settings.shared, settings.sampling.history
    sizes, chunks = settings.sizes, settings.chunking.plan
    if history is not None:
        _check_history(settings, history)
    window, sink = shared.kv_window or None, shared.kv_sink or 0
    needed = frames_needed(shared, chunks, history)
    if window is not None and window < needed:
        of_chunk = f"a chunk of {needed - sink}"
        if history is not None:
            of_chunk = f"{history.full_chunks + 1} chunks token by token, and one in large patches"
        elif is_rolling(shared):
            of_chunk = f"{settings.num_steps} chunks of {chunks.largest} at once"
        raise RequestError(
            f"kv_window: expected {needed} latent frames or more, a sink of {sink} and {of_chunk}, got "
            f"{window}; use --kv-window {needed}, or fewer by --kv-sink and --chunk-frames (0 is all frames)"
        )
    if shared.page_size is not None:
        _, height, width = settings.sampling.geometry.grid(sizes.sample_shape(settings.size))
        check_page_size(shared.page_size, height * width)
    if is_rolling(shared):
        _check_alike(settings)


def _check_history(settings: BatchSettings, history: CompressedHistory) -> None:
    """Raises RequestError for a video smaller than the patches of a compressed history."""
    if 0 in history.grid(settings.sizes.sample_shape(settings.size)):
        factor = settings.sampling.geometry.spatial_factor
        smallest = (history.patch[1] * factor, history.patch[2] * factor)
        raise RequestError(
            f"height, width: {LARGE_PATCHES}, of {smallest[0]} x {smallest[1]} pixels; expected a video of that size "
            f"or more, got {settings.size.height} x {settings.size.width}"
        )


def _check_alike(settings: BatchSettings) -> None:
    """Raises RequestError where a rolling window's first chunks differ from the others. What the model's defaults fill
    in cannot be left out, so a value that changes nothing passes."""
    shared, num_chunks = settings.shared, settings.chunking.plan.num_chunks or 1
    alike: dict[str, float | int | str | None] = {
        "first_chunk_steps": shared.num_inference_steps,
        "first_chunk_flow_shift": shared.flow_shift,
        "first_chunk_sampler": shared.sampler,
        # All of them, or any number where none is guided.
        "guided_chunks": max(num_chunks, shared.guided_chunks or 0)
        if settings.guidance.is_guided
        else shared.guided_chunks,
    }
    for name, expected in alike.items():
        value = getattr(shared, name)
        if value not in (None, expected):
            raise RequestError(
                f"{name}: rolling denoises several chunks in one pass, all of them alike; expected {expected}, got "
                f"{value}; use --{name.replace('_', '-')} {expected}, or --chunk-schedule sequential"
            )


def chunk_values(settings: BatchSettings) -> dict[str, Any]:
    """Return the request values with the first frame of a chunk in place of the times of prompts and seeds, and with
    the guidance mode that guided_chunks needs: later chunks go on from the keys of the conditional branch alone, which
    a pass of both branches does not keep apart. Raises RequestError for a time past the end, and for two in one chunk.
    """
    request, values = settings.shared, dict[str, Any]()
    if request.prompt_switches is not None:
        values["prompt_switches"] = _resolved(settings, request.prompt_switches, "--at", "prompt")
    if request.seed_switches is not None:
        values["seed_switches"] = _resolved(settings, request.seed_switches, "--seed-at", "seed")
    if request.guided_chunks is not None and settings.guidance.is_guided:
        values["guidance_mode"] = "two_pass"
    return values


def _resolved(
    settings: BatchSettings, switches: Iterable[tuple[int | str, T]], field: str, what: str
) -> tuple[tuple[int, T], ...]:
    size, factor = settings.size, settings.sampling.geometry.temporal_factor
    starts = [first_frame(chunk, factor) for chunk in settings.chunking.plan]
    return resolve_switches(switches, starts, (size.fps, size.num_frames), field=field, what=what, part="chunk")


def try_first_chunk(settings: BatchSettings) -> None:
    """Raises what building the sampler of a first chunk with values of its own does, and names the field."""
    shared = settings.shared
    if settings.chunking.first_chunk() == shared:
        return
    try:
        settings.build_sampler(chunk=0)
    except RequestError as error:
        if shared.first_chunk_sampler in (None, shared.sampler):
            raise
        raise RequestError(
            f"first_chunk_sampler: {error}; or use --first-chunk-sampler {shared.sampler}, as of the other chunks"
        ) from None
