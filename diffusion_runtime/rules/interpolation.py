"""Rules of frame interpolation: between which frames there are others, and what a plan says of them."""

from __future__ import annotations

from diffusion_runtime.errors import RequestError
from diffusion_runtime.rules.batch_settings import BatchSettings


def check_interpolation(settings: BatchSettings) -> None:
    """Raises RequestError for frames between those of a clip that has one alone."""
    if settings.shared.interpolate is not None and settings.size.num_frames == 1:
        raise RequestError(
            "interpolate: expected a clip of two frames or more, got one: nothing is between; leave it out"
        )


def interpolation_note(settings: BatchSettings, version: str | None) -> str | None:
    """Return how many frames the file of a request has, where these are not the model's. version: of RIFE."""
    multiple, rate, number = settings.shared.interpolate, settings.frame_rate, settings.size.num_frames
    if multiple is None:
        return None
    return (
        f"interpolate: {number} frames at {rate:g} a second become {number * multiple} at {rate * multiple:g}, by "
        f"RIFE {version}"
    )


def unused_interpolation(settings: BatchSettings, version: str | None) -> tuple[str, ...]:
    """Return a remark on weights that were given and that a request does not use. version: of RIFE, None without."""
    if version is None or settings.shared.interpolate is not None or settings.size.num_frames == 1:
        return ()
    return ("interpolation_path: its weights are not used; --interpolate 2 makes frames between those of the model",)
