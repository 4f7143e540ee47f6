"""Sliding tile attention on a real pipeline and from the command line."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
from tables import table

from diffusion_runtime import AttentionConfig, GenerationRequest, load_pipeline
from diffusion_runtime.cli.app import run as run_command
from diffusion_runtime.errors import ConfigError

NAME = "sliding_tile_attn"
NUM_STEPS, NUM_LAYERS, NUM_HEADS = 4, 2, 4
# 4 x 4 x 4 tokens: 4 x 2 x 2 tiles.
SMALL_TILE = (1, 2, 2)
WIDE = ((1, 2, 2), (4, 1, 1), (1, 1, 2))


def request(prompt: str = "a red circle moving left", **values: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"height": 64, "width": 64, "num_frames": 13, "num_inference_steps": NUM_STEPS, "seed": 1}
    return GenerationRequest(prompt, **{**fields, "guidance_scale": 4.0, **values})


def pipeline_with(folder: Path, **options: Any) -> Any:
    config = AttentionConfig(per_role={"self": {"backend": NAME, "extra": {"tile_size": SMALL_TILE, **options}}})
    return load_pipeline(str(folder), device="cpu", attention=config)


def rows_of(media: Any) -> list[tuple[str, int, str]]:
    """(implementation, calls, steps) of self-attention."""
    rows = [row for row in media.attention_report.rows if row.role == "self"]
    assert all(row.backend == NAME for row in rows)
    return [(row.implementation, row.count, row.steps) for row in rows]


@table("guidance", ["batched", "two_pass"])
def test_windows_by_step_layer_and_head_are_the_same_as_a_file_and_as_rules(
    tiny_wan_folder: Path, tmp_path: Path, guidance: str
) -> None:
    num_forwards = NUM_STEPS * NUM_LAYERS * (2 if guidance == "two_pass" else 1)
    asked = request(guidance_mode=guidance)
    draw = random.Random(5)
    moments = list(itertools.product(range(1, NUM_STEPS), range(NUM_LAYERS)))
    windows = {moment: [draw.choice(WIDE) for _ in range(NUM_HEADS)] for moment in moments}
    path = tmp_path / "strategy.json"
    path.write_text(
        json.dumps({f"{s}_{layer}_{head}": of[head] for (s, layer), of in windows.items() for head in range(NUM_HEADS)})
    )
    by_file = pipeline_with(tiny_wan_folder, mask_strategy_file_path=str(path), skip_time_steps=1)(asked)
    rules = [
        {
            **{"role": "self", "steps": str(step), "layers": str(layer), "backend": NAME},
            "extra": {"tile_size": SMALL_TILE, "head_windows": of},
        }
        for (step, layer), of in windows.items()
    ]
    by_rules = load_pipeline(str(tiny_wan_folder), device="cpu", attention={"schedule": rules})(asked)
    assert numpy.array_equal(by_file.frames, by_rules.frames)
    full = load_pipeline(str(tiny_wan_folder), device="cpu")(asked)
    assert not numpy.array_equal(by_file.frames, full.frames)
    dense, sparse = rows_of(by_file)
    assert "steps 0 (skip_time_steps 1)" in dense[0]
    assert dense[1:] == (num_forwards // NUM_STEPS, "0")
    assert sparse == ("block-sparse reference", num_forwards // NUM_STEPS * 3, "1-3")


def test_a_full_window_is_the_dense_pipeline(tiny_wan_folder: Path) -> None:
    full = load_pipeline(str(tiny_wan_folder), device="cpu")(request())
    assert numpy.array_equal(pipeline_with(tiny_wan_folder, window=(4, 2, 2))(request()).frames, full.frames)
    assert not numpy.array_equal(pipeline_with(tiny_wan_folder, window=(1, 2, 2))(request()).frames, full.frames)


def test_a_strategy_for_other_steps_stops_the_pipeline(tiny_wan_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(
        json.dumps({f"{s}_{layer}_{h}": [1, 1, 1] for s in range(3) for layer in range(2) for h in range(4)})
    )
    pipeline = pipeline_with(tiny_wan_folder, mask_strategy_file_path=str(path))
    with pytest.raises(ConfigError, match="is for 3 steps and this run has 2"):
        pipeline(request(num_inference_steps=2))
    pipeline(request(num_inference_steps=3))


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_strategy_file_from_the_command(
    tiny_wan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "134217728")
    sizes = ["--height", "64", "--width", "64", "--num-frames", "13", "--num-inference-steps", "2"]

    def generate(options: str) -> tuple[int, str, numpy.ndarray[Any, Any] | None]:
        arguments = ["generate", "a star", "--model-path", str(tiny_wan_folder), *sizes, "--format", "npy"]
        choice = ["--attention-backend", NAME, "--attention-backend-config", options]
        code = run_command([*arguments, *choice])
        captured = capsys.readouterr()
        frames = numpy.load(captured.out.strip()) if code == 0 else None
        return code, " ".join(captured.err.split()), frames

    windows = {f"{step}_{layer}_{head}": [1, 2, 2] for step in range(2) for layer in range(2) for head in range(4)}
    Path("windows.json").write_text(json.dumps(windows))
    code, said, by_file = generate("mask_strategy_file_path=windows.json,tile_size=[1,2,2],skip_time_steps=0")
    assert code == 0, said
    code, said, by_head = generate("head_windows=[[1,2,2],[1,2,2],[1,2,2],[1,2,2]],tile_size=[1,2,2]")
    assert code == 0, said
    code, said, dense = generate("sta_mode=none")
    assert code == 0, said
    assert "sta_mode is none" in said
    assert by_file is not None
    assert by_head is not None
    assert dense is not None
    assert numpy.array_equal(by_file, by_head)
    assert not numpy.array_equal(by_file, dense)
    for options, message in (
        ("tile_size=[1,2,2]", "needs to know its windows"),
        ("mask_strategy_file_path=missing.json", "mask_strategy_file_path: missing.json: no such file"),
        ("head_windows=[[1,2,2]],tile_size=[1,2,2]", "head_windows has 1 windows and this layer 4 query heads"),
    ):
        code, said, _ = generate(options)
        assert code == 2
        assert message in said
