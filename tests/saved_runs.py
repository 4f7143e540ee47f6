"""Generations whose latents are saved, and what goes on from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy

from diffusion_runtime import GeneratedMedia, GenerationRequest, Pipeline
from diffusion_runtime.generation.saved_latents import SavedLatents, read_latents, write_latents


def saving(pipeline: Pipeline, request: GenerationRequest, folder: Path) -> tuple[GeneratedMedia, list[Path]]:
    """Return what was made, and the files of the latents that were handed over, in their order."""
    files: list[Path] = []

    def keep(_: int, saved: SavedLatents) -> None:
        files.append(write_latents(saved, folder / "clip.mp4"))

    with pipeline.hooks.holding("keep", keep):
        media = pipeline(request)
    return media, files


def finished(pipeline: Pipeline, request: GenerationRequest, stop: int | None, folder: Path) -> GeneratedMedia:
    """Return a generation that was left after a step, None for the last, and gone on with from its file."""
    _, files = saving(pipeline, dataclasses.replace(request, stop_after_step=stop), folder)
    return pipeline.finish(read_latents(files[-1]))


def assert_same(found: GeneratedMedia, expected: GeneratedMedia) -> None:
    """Frames, sound and recipe."""
    assert numpy.array_equal(found.frames, expected.frames)
    assert (found.audio is None) == (expected.audio is None)
    assert found.audio is None or numpy.array_equal(found.audio.samples, expected.audio.samples)
    assert found.recipe == expected.recipe
