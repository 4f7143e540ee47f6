"""Step caches on the tiny model of every family: the same picture where nothing is reused, fewer blocks where it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from tiny_families import WRITERS, small_request

from diffusion_runtime import load_pipeline

NUM_STEPS = 4


@pytest.mark.parametrize("family", list(WRITERS))
def test_every_family_has_them(tiny_folder_of: Callable[[str], Path], family: str) -> None:
    pipeline = load_pipeline(str(tiny_folder_of(family)), device="cpu")
    plain = dataclasses.replace(small_request(pipeline, NUM_STEPS), guidance_mode="two_pass")

    def run(cache: str | None) -> Any:
        return pipeline(dataclasses.replace(plain, step_cache=cache))

    expected = run(None)
    for nothing in ("easycache:threshold=0,force=true", "dbcache:F=1,R=0,W=0,force=true"):
        media = run(nothing)
        assert numpy.array_equal(media.frames, expected.frames), nothing
        assert all(row.num_computed == NUM_STEPS for row in media.attention_report.steps)
    for cache, computed in (
        ("easycache:threshold=10,warmup=0,force=true", "0-1,3"),
        ("dbcache:F=1,R=10,W=2,MC=1,force=true", "0-1,3"),
    ):
        media = run(cache)
        assert {row.computed for row in media.attention_report.steps} == {computed}, cache
        assert media.attention_report.num_calls < expected.attention_report.num_calls
        assert numpy.isfinite(media.frames).all()
