"""A sparse choice for one role at some steps, on every family that makes videos: it changes what is made, only there,
and the report counts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
from tiny_families import WRITERS

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.media import GeneratedMedia

# What importing diffusers' pipelines says about packages that are not here, and about guiders.
pytestmark = pytest.mark.filterwarnings("ignore")
NUM_STEPS = 3


@pytest.fixture(scope="module", params=["wan", "hunyuan_video", "hunyuan_video_15", "ltx2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return WRITERS[request.param](tmp_path_factory.mktemp("sparse") / request.param)


def generate(folder: Path, attention: Any) -> tuple[Pipeline, GeneratedMedia]:
    """A grid of 5 x 8 x 8 tokens: eight tiles of 4 x 4 x 4, ragged in time."""
    pipeline = load_pipeline(str(folder), device="cpu", dtype="float32", attention=attention)
    geometry = pipeline.rules.sampling.geometry
    step, remainder = geometry.frame_rule
    request = GenerationRequest(
        prompt="a red circle",
        height=8 * geometry.spatial_factor * geometry.patch[1],
        width=8 * geometry.spatial_factor * geometry.patch[2],
        num_frames=4 * step + remainder,
        num_inference_steps=NUM_STEPS,
        seed=3,
    )
    return pipeline, pipeline(request)


def last_steps(sparsity: float) -> dict[str, Any]:
    rule = {"steps": "1-2", "role": "self", "backend": "video_sparse_attn", "extra": {"sparsity": sparsity}}
    return {"schedule": [rule]}


def test_by_role_and_step(folder: Path) -> None:
    _, dense = generate(folder, None)
    pipeline, sparse = generate(folder, last_steps(0.75))
    _, nothing_dropped = generate(folder, last_steps(0.0))
    num_layers = sum(layer.layer.role == "self" for layer in pipeline.transformer.attention_layers())
    rows = {(row.role, row.backend, row.steps): row for row in sparse.attention_report.rows}
    assert rows["self", "video_sparse_attn", "1-2"].count == 2 * num_layers
    assert rows["self", "video_sparse_attn", "1-2"].implementation.startswith("block-sparse")
    assert rows["self", "torch_sdpa", "0"].count == num_layers
    others = [row for row in sparse.attention_report.rows if row.role != "self"]
    assert others
    assert all((row.backend, row.steps) == ("torch_sdpa", "0-2") for row in others)
    assert (sparse.frames != dense.frames).any()
    assert numpy.abs(nothing_dropped.frames.astype(int) - dense.frames).max() <= 1
