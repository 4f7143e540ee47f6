"""What a request computed from its sizes is freed with it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from tiny_families import WRITERS, small_request

from diffusion_runtime import load_pipeline

# What importing diffusers' pipelines says about packages that are not here.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_rotary_positions_end_with_their_request(tmp_path: Path) -> None:
    left = {}
    for family in ("wan", "z_image"):
        pipeline = load_pipeline(str(WRITERS[family](tmp_path / family)), device="cpu", dtype="float32")
        before = {id(found) for found in _complex_tensors()}
        pipeline(small_request(pipeline))
        gc.collect()
        left[family] = [list(found.shape) for found in _complex_tensors() if id(found) not in before]
    assert not any(left.values()), left


def _complex_tensors() -> list[torch.Tensor]:
    # By type alone: isinstance would ask every object, and some import a library when they are asked.
    return [found for found in gc.get_objects() if type(found) is torch.Tensor and found.is_complex()]
