"""Native transformers can be copied and pickled, as an average of weights, torch.save and a spawned process need."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import numpy
import pytest
from tiny_families import WRITERS, small_request

from diffusion_runtime import load_pipeline

# What importing diffusers' pipelines says about packages that are not here, and about guiders.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_familys_transformer_is_copied_and_pickled_after_use(tmp_path: Path) -> None:
    attention = {"default": "reference", "schedule": [{"steps": "1", "backend": "torch_sdpa"}]}
    different = []
    for family, write in WRITERS.items():
        pipeline = load_pipeline(str(write(tmp_path / family)), device="cpu", dtype="float32", attention=attention)
        request = small_request(pipeline)
        made = pipeline(request)
        copied = copy.deepcopy(pipeline.transformer)
        pipeline.parts = dataclasses.replace(pipeline.parts, transformer=pickle.loads(pickle.dumps(copied)))
        again = pipeline(request)
        if not numpy.array_equal(again.frames, made.frames) or again.attention_report != made.attention_report:
            different.append(family)
    assert different == []
