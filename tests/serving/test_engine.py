"""An engine alone: a batch that fails is made one by one, files name nothing of the machine, previews are spread."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sample_media import make_media
from tables import table

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import ConfigError, DeviceMemoryError, RequestError
from diffusion_runtime.loading import prepare
from diffusion_runtime.serving.engine import Engine
from diffusion_runtime.serving.engine_channel import BatchProgress
from diffusion_runtime.serving.engine_process import EngineProcess
from diffusion_runtime.serving.previews import Previews, preview_steps
from diffusion_runtime.serving.results import public_values, publish
from diffusion_runtime.serving.served_model import ServedModel, parse_attention


class RecordedChannel:
    """The server's side, as a list. Stands for a socket alone."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.cancelled: set[str] = set()
        self.questions: queue.Queue[dict[str, Any]] = queue.Queue()

    def send(self, kind: str, /, **values: Any) -> None:
        self.sent.append({"type": kind, **values})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.sent if message["type"] == kind]


def works(folder: Path, *jobs: str) -> list[dict[str, Any]]:
    return [{"job": job, "index": 0, "request": {"prompt": job}, "target": str(folder / f"{job}.png")} for job in jobs]


def test_a_job_that_runs_out_of_memory_fails_alone_and_the_next_one_runs(tmp_path: Path) -> None:
    channel: Any = RecordedChannel()
    engine = Engine(channel, None, {}, tmp_path)  # type: ignore[arg-type]
    sizes = []

    def make(message: Mapping[str, Any], _: BatchProgress) -> list[Any]:
        sizes.append(len(message["works"]))
        if any(work["job"] == "large" for work in message["works"]):
            raise DeviceMemoryError("out of memory: try a smaller size")
        return [make_media(1, 8, 8) for _ in message["works"]]

    channel.cancelled.add("gone")
    engine.run({"works": works(tmp_path, "a", "large", "gone", "b")}, make)
    assert sizes == [3, 1, 1, 1]
    assert [message["job"] for message in channel.of("finished")] == ["a", "b"]
    (failed,) = channel.of("failed")
    assert (failed["job"], failed["kind"]) == ("large", "DeviceMemoryError")
    assert {message["job"] for message in channel.of("cancelled")} == {"gone"}
    assert channel.sent[-1]["type"] == "done"
    assert channel.cancelled == set()
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["a.png", "b.png"]


def test_a_warm_up_is_small_unless_a_choice_is_made_for_a_size_and_says_why_there_is_none(tmp_path: Path) -> None:
    channel: Any = RecordedChannel()
    engine = Engine(channel, ServedModel(RuntimeConfig(device="cpu"), {}), {}, tmp_path)
    made: list[dict[str, Any]] = []

    def make(message: Mapping[str, Any], _: object) -> list[Any]:
        made.append(message["works"][0]["request"])
        if len(made) > 1:
            raise DeviceMemoryError("out of memory")
        return []

    engine.warm_up(make)
    engine.warm_up(make)
    names = ("height", "width", "num_frames", "num_inference_steps")
    assert [made[0][name] for name in names] == [64, 64, 5, 2]
    of_default = ServedModel(RuntimeConfig(device="cpu", attention={"default": "torch_sdpa"}), {}).warm_up_request()
    assert [of_default[name] for name in names] == [256, 256, 29, 2]
    assert [message["error"] for message in channel.of("warmed")] == [None, "out of memory"]


def test_a_result_is_on_the_disk_before_anybody_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.readlink(f"/proc/self/fd/{file}")))
    publish(make_media(5, 16, 16), tmp_path / "clip.mp4", {})
    written = {str(path) for path in tmp_path.iterdir()}
    assert len(written) == 4
    assert written | {str(tmp_path)} <= synced


def test_paths_of_the_machine_become_public_names() -> None:
    recipe = {
        "runtime": {"model_path": "/models/wan", "lora": [{"path": "/l/a.safetensors"}]},
        "prompt": "/models/wan x",
    }
    names = {"/models/wan": "wan", "/l/a.safetensors": "a"}
    assert public_values(recipe, names) == {
        "runtime": {"model_path": "wan", "lora": [{"path": "a"}]},
        "prompt": "/models/wan x",
    }


def test_a_causal_model_says_why_it_shows_no_estimates() -> None:
    prepared = prepare(RuntimeConfig("shapes-causal", device="cpu"))
    previews = Previews("auto", prepared)
    assert previews.method is None
    assert "one part of the video after the other" in previews.reason
    with pytest.raises(ConfigError, match=r"^preview: decode: a causal model .*leave out --preview"):
        Previews("decode", prepared)


def test_an_engine_reads_no_file_beside_the_inputs(tmp_path: Path) -> None:
    channel: Any = RecordedChannel()
    engine = Engine(channel, None, {}, tmp_path)  # type: ignore[arg-type]
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs" / "link.png").symlink_to("/etc/passwd")
    inside = str(tmp_path / "inputs" / "a.png")
    for value in ("/etc/passwd", [inside, "/etc/passwd"], f"{tmp_path}/inputs/../x.png", f"{tmp_path}/inputs/link.png"):
        work = {**works(tmp_path, "a")[0], "request": {"prompt": "a", "image_path": value}}
        engine.run({"works": [work]}, lambda *_: pytest.fail("it was read"))
    assert [message["kind"] for message in channel.of("failed")] == ["RequestError"] * 4
    work["request"]["image_path"] = inside
    engine.run({"works": [work]}, lambda *_: [make_media(1, 8, 8)])
    assert len(channel.of("finished")) == 1


@table("steps, count", [(4, 2), (12, 3), (1, 3), (2, 1), (50, 3)])
def test_previews_are_of_late_steps_and_none_is_the_last(steps: int, count: int) -> None:
    chosen = sorted(preview_steps(steps, count))
    assert 1 <= len(chosen) <= count
    assert steps < 3 or chosen[-1] < steps - 1
    assert chosen[0] >= int(steps * 0.3) or steps < 3


@table(
    "value",
    [
        "/etc/passwd",
        "a.yaml",
        "x/y.json",
        "mask_strategy_file_path=x",
        "default.backend=sliding_tile_attn,default.extra.mask_strategy_file_path=x",
        {"default.extra.mask-strategy-file-path ": "x"},
        '{"default": {"backend": "sliding_tile_attn", "extra": {"mask_strategy_file_path": "x"}}}',
        {"per_role": {"self": {"backend": "sliding_tile_attn", "extra": {"mask_strategy_file_path": "x"}}}},
    ],
)
def test_the_attention_of_a_request_names_no_file(value: Any) -> None:
    with pytest.raises(RequestError, match="file"):
        parse_attention(value)


def test_a_process_that_is_cancelled_has_ended_when_its_server_goes_on(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import time\n\ntime.sleep(600)\n")
    process = EngineProcess({"program": "sleeper"}, print, {"PYTHONPATH": str(tmp_path)})

    async def cancelled() -> int | None:
        task = asyncio.create_task(process.run())
        while process.pid is None:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert process._process is not None
        return process._process.returncode

    assert asyncio.run(cancelled()) == -signal.SIGKILL
