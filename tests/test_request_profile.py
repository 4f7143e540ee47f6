"""The profile of one generation: which ranges the trace has, that it changes nothing, and that it leaves nothing."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy
import pytest

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.core.progress import Progress
from diffusion_runtime.errors import DiskFullError, OutputError
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.profiling.request_profile import RequestProfile


@pytest.fixture
def pipeline(tiny_wan_folder: Path) -> Pipeline:
    loaded = load_pipeline(str(tiny_wan_folder), device="cpu", dtype="float32")
    assert isinstance(loaded, Pipeline)
    return loaded


def request(num_steps: int, **values: Any) -> GenerationRequest:
    size = {"height": 32, "width": 32, "num_frames": 5, "guidance_mode": "two_pass", "guidance_scale": 3.0}
    return GenerationRequest("a star", num_inference_steps=num_steps, **{**size, **values})


def profile_of(pipeline: Any, request: GenerationRequest, path: Path) -> dict[str, Any]:
    with RequestProfile(pipeline) as profile:
        pipeline(request, on_progress=profile.watching())
    trace: dict[str, Any] = json.loads(profile.save(path).read_text())
    return trace


def ranges(trace: dict[str, Any], **like: Any) -> list[dict[str, Any]]:
    """Ranges of a kind, by their begin."""
    found = [event for event in trace["traceEvents"] if event["ph"] == "X" and like.items() <= event.items()]
    return sorted(found, key=lambda event: float(event["ts"]))


def hooks_of(pipeline: Pipeline) -> list[object]:
    modules = list(pipeline.transformer.modules())
    return [hook for module in modules for hook in (*module._forward_pre_hooks, *module._forward_hooks)]


def test_ranges_of_stages_steps_branches_and_attention(pipeline: Pipeline, tmp_path: Path) -> None:
    trace = profile_of(pipeline, request(5), tmp_path / "trace.json")
    assert [each["name"] for each in ranges(trace, cat="stages")] == ["text", "denoise", "decode"]
    steps = ranges(trace, cat="steps")
    assert [each["name"] for each in steps] == [f"step {index}" for index in range(5)]
    assert trace["diffusion_runtime"]["recorded_steps"] == [1, 2]
    named = ranges(trace, cat="user_annotation")
    names = [each["name"] for each in named]
    forward = [name for name in names if name.startswith("forward")]
    assert forward == ["forward cond", "forward uncond"] * 2
    layers = list(pipeline.transformer.attention_layers())
    calls = [name for name in names if name.startswith("attention")]
    assert calls == [f"attention {each.layer.role}, layer {each.layer.index}, torch_sdpa" for each in layers] * 4
    # The tracks of our own and torch's have one clock. A millisecond: its counter is compared with the time of day.
    for step, begin in zip(steps[1:3], (0, len(named) // 2), strict=True):
        inside = named[begin : begin + len(named) // 2]
        assert step["ts"] - 1000 < inside[0]["ts"]
        assert inside[-1]["ts"] + inside[-1]["dur"] < step["ts"] + step["dur"] + 1000
    assert any(each["name"].startswith("aten::") for each in ranges(trace, cat="cpu_op"))


def test_a_profile_is_written_once(pipeline: Pipeline, tmp_path: Path) -> None:
    with RequestProfile(pipeline) as profile:
        pipeline(request(3), on_progress=profile.watching())
    written = profile.save(tmp_path / "trace.json")
    with pytest.raises(OutputError, match=f"written already, to {written}"):
        profile.save(tmp_path / "again.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_profile_changes_nothing_and_leaves_nothing(pipeline: Pipeline, tmp_path: Path) -> None:
    plain = pipeline(request(3))
    with RequestProfile(pipeline) as profile:
        media = pipeline(request(3), on_progress=profile.watching())
    assert numpy.array_equal(media.frames, plain.frames)
    assert hooks_of(pipeline) == []
    # A name that is taken is left alone, and nothing else is in the folder.
    (tmp_path / "trace.json").write_text("mine")
    assert profile.save(tmp_path / "trace.json") == tmp_path / "trace-2.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace-2.json", "trace.json"]
    assert (tmp_path / "trace.json").read_text() == "mine"
    # torch says nothing where it cannot write, and leaves a file of its own.
    with RequestProfile(pipeline) as profile:
        pipeline(request(3), on_progress=profile.watching())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(DiskFullError, match="nothing was left behind"):
            profile.save(tmp_path / "full.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace-2.json", "trace.json"]


@pytest.mark.parametrize(("num_steps", "recorded"), [(1, [0]), (2, [1])])
def test_short_generations_record_what_there_is(
    num_steps: int, recorded: list[int], pipeline: Pipeline, tmp_path: Path
) -> None:
    trace = profile_of(pipeline, request(num_steps, guidance_scale=1.0), tmp_path / "trace.json")
    assert trace["diffusion_runtime"]["recorded_steps"] == recorded
    assert [each["name"] for each in ranges(trace, name="forward cond")] == ["forward cond"] * len(recorded)


def test_a_generation_that_fails_while_it_is_recorded_leaves_no_file(pipeline: Pipeline, tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.stage == "denoise" and progress.step == 2:
            assert hooks_of(pipeline)
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"), RequestProfile(pipeline) as profile:
        pipeline(request(4), on_progress=profile.watching(stop))
    assert not profile.is_complete
    assert hooks_of(pipeline) == []
    with pytest.raises(OutputError, match="the generation ended before the steps to be recorded had"):
        profile.save(tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []
