"""`--compile regional` of diffusers' own pipelines: frames, counts and graphs, and what is refused before weights."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from diffusion_runtime import GenerationRequest, RuntimeConfig, load_pipeline
from diffusion_runtime.diffusers_bridge import compilation
from diffusion_runtime.diffusers_bridge.compiled_blocks import CompiledBlocks
from diffusion_runtime.diffusers_bridge.compiled_denoisers import check_compilable
from diffusion_runtime.diffusers_bridge.passthrough import DiffusersPipeline
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.loading import passthrough

pytestmark = pytest.mark.filterwarnings("ignore:.*requires torchvision")
VIDEO = GenerationRequest("a red circle", seed=3, num_frames=9, height=16, width=16, num_inference_steps=2)
OTHER = dataclasses.replace(VIDEO, prompt="two blue squares and many words", seed=4, num_inference_steps=3, width=32)


@pytest.mark.parametrize("choice", [None, "torch_sdpa"])
@pytest.mark.slow
def test_blocks_of_diffusers_own_model(video_folder: Path, choice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [load_pipeline(str(video_folder), attention=choice)(each) for each in (VIDEO, OTHER)]
    monkeypatch.setattr(passthrough, "CompiledBlocks", functools.partial(CompiledBlocks, "eager"))
    monkeypatch.setenv(compilation.ARTEFACTS_VARIABLE, "of the user")
    pipeline = load_pipeline(str(video_folder), attention=choice, compile="regional")
    assert isinstance(pipeline, DiffusersPipeline)
    assert pipeline.recipe["runtime"]["compile"] == "regional"
    found = [pipeline(each) for each in (VIDEO, OTHER)]
    for ours, theirs in zip(found, expected, strict=True):
        assert numpy.abs(ours.frames.astype(int) - theirs.frames.astype(int)).max() <= 1
        rows = [[(row.backend, row.count, row.layers) for row in made.attention_report.rows] for made in (ours, theirs)]
        assert rows[0] == rows[1]
    notes = [made.attention_report.notes[-1] for made in found]
    assert notes[0].startswith("compile: 2 blocks, 1 graph compiled in ")
    assert notes[1] == "compile: 2 blocks, nothing compiled anew"
    assert found[0].timings["compile"] > found[1].timings["compile"] == 0


def test_models_whose_blocks_cannot_be_compiled() -> None:
    from diffusers import CogVideoXTransformer3DModel
    from diffusers.models.attention_processor import AttnProcessor

    with torch.device("meta"):
        model = CogVideoXTransformer3DModel(2, 8, num_layers=1, text_embed_dim=8, time_embed_dim=4)
    check_compilable({"transformer": model, "text_encoder": torch.nn.Linear(1, 1)})
    model.set_attn_processor(AttnProcessor())
    with pytest.raises(ConfigError, match="no graph can hold the attention of AttnProcessor, which calls neither"):
        check_compilable({"transformer": model})
    with pytest.raises(ConfigError, match="it has no blocks with attention in a list; leave out --compile"):
        check_compilable({"transformer": torch.nn.Linear(1, 1)})


def test_a_cpu_without_a_compiler_is_refused(video_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="cannot be started"):
        passthrough.prepare_passthrough(
            RuntimeConfig(str(video_folder), compile="regional"), passthrough.ModelFolder(video_folder)
        )
