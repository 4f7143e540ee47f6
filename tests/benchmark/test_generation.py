"""A published model's generation with random weights, at tiny sizes; what diffusers cannot run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tables import table
from tiny_flux1 import write_tiny_flux1

from diffusion_runtime.benchmark import generation
from diffusion_runtime.benchmark.generation import GenerationChoice, benchmark_generation
from diffusion_runtime.benchmark.generation_result import GenerationBenchmark, GenerationRow
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.generation.interface import GenerationPipeline
from diffusion_runtime.models.flux1 import editing

# A transformer of two blocks and a decoder of 32 channels.
NARROW = {
    "transformer/config.json": {
        "n_layers": 1,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "dim": 256,
        "cap_feat_dim": 32,
    },
    "vae/config.json": {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1},
}
SMALL = {"height": 64, "width": 64, "num_inference_steps": 2}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is measured here is for no later plan."""
    monkeypatch.setenv("DIFFUSION_RUNTIME_CACHE", str(tmp_path_factory.mktemp("cache")))


def choice_of(model: str, **values: object) -> GenerationChoice:
    config = RuntimeConfig(model_path=model, device="cpu", dtype="float32")
    return GenerationChoice(config, SMALL, num_warm=1, **values)  # type: ignore[arg-type]


def test_a_published_model_without_weights() -> None:
    result = benchmark_generation(choice_of("z-image-turbo", changes=NARROW))
    (row,) = result.rows
    assert (row.name, row.state, row.reason) == ("ours", "measured", "")
    # There is no text encoder that could be timed, and no folder that diffusers could load.
    assert [sorted(run) for run in row.runs] == [["decode", "denoise", "write"]] * 2
    assert "pictures are noise" in result.remarks[0]
    assert result.model == "z-image-turbo, 1 frame of 64 x 64, 2 steps"


def test_what_diffusers_cannot_load_is_left_out_and_what_breaks_is_a_failed_row(
    tiny_wan_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(config: RuntimeConfig, **given: object) -> GenerationPipeline:
        if config.backend == "diffusers":
            raise ModelLoadError("no such class")
        return load_pipeline(config, **given)  # type: ignore[arg-type]

    load_pipeline = generation.load_pipeline
    monkeypatch.setattr(generation, "load_pipeline", load)
    result = benchmark_generation(choice_of(str(tiny_wan_folder)))
    assert [(row.name, row.state) for row in result.rows] == [("ours", "measured"), ("diffusers", "left out")]
    assert "no such class" in result.rows[1].reason
    assert result.exit_code == 0

    def break_down(*_: object) -> dict[str, float]:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(generation, "_seconds", break_down)
    failed = benchmark_generation(choice_of(str(tiny_wan_folder), with_diffusers=False))
    assert (failed.rows[0].state, failed.exit_code) == ("failed", 1)
    assert "no kernel image" in failed.rows[0].reason


def test_warm_is_the_median_of_all_but_the_first() -> None:
    runs = tuple({"denoise": seconds} for seconds in (9.0, 1.0, 3.0, 2.0))
    row = GenerationRow("ours", "measured", runs=runs, steps=(9.0, 1.0, None, 2.0))
    assert row.step_s == 1.5
    assert (row.cold, row.warm) == ({"denoise": 9.0}, {"denoise": 2.0})
    assert GenerationBenchmark("m", "d", {}, "float32", {}, (row,)).to_dict()["rows"][0]["warm_s"] == {"denoise": 2.0}


FLUX = {
    "transformer/config.json": {
        "num_layers": 1,
        "num_single_layers": 1,
        "num_attention_heads": 1,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
    },
    "vae/config.json": {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1},
}
WAN = {
    "transformer/config.json": {
        "num_layers": 1,
        "num_attention_heads": 1,
        "ffn_dim": 64,
        "text_dim": 32,
        "added_kv_proj_dim": 128,
    },
    "vae/config.json": {"base_dim": 8, "num_res_blocks": 1},
}


@table(
    ("model", "changes", "images"),
    [
        ("flux.1-kontext-dev", FLUX, "image_path"),
        ("flux.1-fill-dev", FLUX, "image_path, mask_path"),
        # Through its image encoder, too.
        ("wan2.1-flf2v-14b-720p", WAN, "image_path, last_image_path"),
    ],
)
def test_a_model_of_images_gets_generated_ones(
    model: str, changes: dict[str, dict[str, object]], images: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(editing, "TRAINED_SIZES", ((64, 64),))
    choice = choice_of(model, changes=changes)
    if model.startswith("wan"):
        choice = dataclasses.replace(choice, values={**SMALL, "num_frames": 5})
    result = benchmark_generation(choice)
    (row,) = result.rows
    assert (row.state, row.reason) == ("measured", "")
    assert f"{images}: generated, of the size of what is made" in result.remarks[1]
    assert result.request["image_path"] is None


def test_images_are_generated_for_both_sides(tmp_path: Path) -> None:
    folder = write_tiny_flux1(tmp_path / "fill", pipeline_class="FluxFillPipeline", condition_channels=8)
    result = benchmark_generation(choice_of(str(folder)))
    assert [(row.name, row.state, row.reason) for row in result.rows] == [
        ("ours", "measured", ""),
        ("diffusers", "measured", ""),
    ]
