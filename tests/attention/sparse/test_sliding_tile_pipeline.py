"""Searching, tuning and inference of sliding tile attention on a real pipeline and from the command line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from tables import table

from diffusion_runtime import AttentionConfig, GenerationRequest, load_pipeline
from diffusion_runtime.attention.sparse.sliding_tile_search import SearchSetup, read_search_logs
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


@table(
    ("guidance", "mode", "branches"),
    [
        ("batched", "STA_tuning", ["both", "both"]),
        ("two_pass", "STA_tuning_cfg", ["cond", "cond", "uncond", "uncond"]),
    ],
)
def test_search_tune_and_inference_on_a_pipeline(
    tiny_wan_folder: Path, tmp_path: Path, guidance: str, mode: str, branches: list[str]
) -> None:
    num_forwards = NUM_STEPS * NUM_LAYERS * (2 if guidance == "two_pass" else 1)
    asked = [request(prompt, guidance_mode=guidance) for prompt in ("a red circle", "a blue star moving up")]
    full = load_pipeline(str(tiny_wan_folder), device="cpu")(asked[0])

    search = pipeline_with(
        tiny_wan_folder, sta_mode="STA_searching", candidates=WIDE, search_log_folder=str(tmp_path / "logs")
    )
    found = [search(item) for item in asked]
    assert numpy.array_equal(found[0].frames, full.frames)
    ((implementation, count, steps),) = rows_of(found[0])
    assert "a search measures windows" in implementation
    assert (count, steps) == (num_forwards, "0-3")
    logs = read_search_logs(tmp_path / "logs")
    assert sorted(log.branch for log in logs) == branches
    assert {log.setup for log in logs} == {SearchSetup(WIDE, (4, 4, 4), SMALL_TILE, NUM_STEPS, NUM_LAYERS, NUM_HEADS)}

    tuned = pipeline_with(tiny_wan_folder, sta_mode=mode, skip_time_steps=1, search_log_folder=str(tmp_path / "logs"))(
        asked[0]
    )
    path = tmp_path / "logs" / "mask_strategy.json"
    content = json.loads(path.read_text())
    assert len(content) == NUM_STEPS * NUM_LAYERS * NUM_HEADS
    for step, layer, head in itertools.product(range(NUM_STEPS), range(NUM_LAYERS), range(NUM_HEADS)):
        means = [float(sum(log.l2[step, layer][index, head] for log in logs)) for index in range(len(WIDE))]
        best = (4, 2, 2) if step < 1 else WIDE[means.index(min(means))]
        assert content[f"{step}_{layer}_{head}"] == list(best)
    assert len({tuple(window) for window in content.values()}) > 2

    inference = pipeline_with(tiny_wan_folder, mask_strategy_file_path=str(path), skip_time_steps=1)(asked[0])
    assert numpy.array_equal(inference.frames, tuned.frames)
    assert not numpy.array_equal(inference.frames, full.frames)
    for media in (tuned, inference):
        dense, sparse = rows_of(media)
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


def test_prompts_of_one_batch_share_a_log(tiny_wan_folder: Path, tmp_path: Path) -> None:
    search = pipeline_with(tiny_wan_folder, sta_mode="STA_searching", search_log_folder=str(tmp_path))
    search.generate([request("a star", guidance_scale=1.0), request("a ring", guidance_scale=1.0, seed=2)])
    (log,) = read_search_logs(tmp_path)
    assert (log.branch, log.num_samples) == ("cond", 2)


# --- the command ------------------------------------------------------------------------------------------------------


def test_search_tune_and_inference_from_the_command(
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

    code, said, searched = generate(
        "sta_mode=STA_searching,tile_size=[1,2,2],search_log_folder=logs,candidates=[[1,2,2],[4,1,1]]"
    )
    assert code == 0, said
    assert len(list(Path("logs").iterdir())) == 1
    code, said, tuned = generate("sta_mode=STA_tuning,tile_size=[1,2,2],search_log_folder=logs,skip_time_steps=0")
    assert code == 0, said
    code, said, inferred = generate(
        "mask_strategy_file_path=logs/mask_strategy.json,tile_size=[1,2,2],skip_time_steps=0"
    )
    assert code == 0, said
    assert tuned is not None
    assert inferred is not None
    assert searched is not None
    assert numpy.array_equal(tuned, inferred)
    assert not numpy.array_equal(tuned, searched)
    code, said, dense = generate("sta_mode=none")
    assert code == 0, said
    assert dense is not None
    assert numpy.array_equal(dense, searched)
    assert "sta_mode is none" in said
    for options, message in (
        ("tile_size=[1,2,2]", "needs to know its windows"),
        ("mask_strategy_file_path=missing.json", "mask_strategy_file_path: missing.json: no such file"),
        ("sta_mode=STA_tuning,search_log_folder=empty", "holds no sta_search-*.json"),
    ):
        code, said, _ = generate(options)
        assert code == 2
        assert message in said
