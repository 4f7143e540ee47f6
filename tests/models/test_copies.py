"""Native transformers can be copied and pickled, as an average of weights, torch.save and a spawned process need."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import WRITERS, given_to

from diffusion_runtime import Pipeline, load_pipeline
from diffusion_runtime.attention import AttentionContext, AttentionRecorder, StepInfo
from diffusion_runtime.models.interface import DiffusionTransformer

# What importing diffusers' pipelines says about packages that are not here, and about guiders.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_familys_transformer_is_copied_and_pickled_after_use(tmp_path: Path) -> None:
    attention = {"default": "reference", "schedule": [{"steps": "1", "backend": "torch_sdpa"}]}
    different = []
    for family, write in WRITERS.items():
        pipeline = load_pipeline(str(write(tmp_path / family)), device="cpu", dtype="float32", attention=attention)
        assert isinstance(pipeline, Pipeline)
        given, found = given_to(pipeline), []

        def run(transformer: DiffusionTransformer, given: Any = given, found: list[Any] = found) -> None:
            recorder = AttentionRecorder()
            with torch.inference_mode():
                out = [transformer(*given, AttentionContext(step=StepInfo(at, 2), recorder=recorder)) for at in (0, 1)]
            found.append((out, recorder.report()))

        run(pipeline.transformer)
        run(pickle.loads(pickle.dumps(copy.deepcopy(pipeline.transformer))))
        (made, report), (again, report_again) = found
        if not all(map(torch.equal, made, again)) or report != report_again:
            different.append(family)
    assert different == []
