"""`generate --stream`: a video that is written while it is made, whatever ends it."""

from __future__ import annotations

import io
import json
import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_support import Command
from tiny_models import write_tiny_wan

from diffusion_runtime.cli.stream import _agreed, _native_model
from diffusion_runtime.denoising.chunk_samplers import CleanChunk
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError
from diffusion_runtime.generation.chunked_denoiser import ChunkStream
from diffusion_runtime.media import read_media_file, read_own_sidecar
from diffusion_runtime.media.clips import inspect_clip
from diffusion_runtime.media.growing_clip import GrowingClip
from diffusion_runtime.session.coordinator import SingleProcessCoordinator


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags of a model whose chunks are 9 and then 12 frames."""
    keys = {"num_frames_per_block": 3, "local_attn_size": 7, "sink_size": 2}
    folder = write_tiny_wan(tmp_path_factory.mktemp("wan") / "causal", causal=keys)
    sizes = ("--height", "32", "--width", "32", "--num-inference-steps", "1", "--fps", "12")
    return ("generate", "a red circle", "--model-path", str(folder), *sizes)


def test_pipelines_without_a_cache_say_what_is_theirs() -> None:
    import diffusers

    for name, said in (
        ("SanaVideoPipeline", "linear attention has a state of fixed size.* --model-path shapes-causal"),
        ("SkyReelsV2DiffusionForcingPipeline", "noise levels that rise along a window"),
        ("SkyReelsV2DiffusionForcingImageToVideoPipeline", "keeps no keys"),
        ("LTXPipeline", "diffusers' own pipelines make a clip at once"),
    ):
        assert hasattr(diffusers, name)
        with pytest.raises(ConfigError, match=f"--stream: .*{said}"):
            _native_model(SimpleNamespace(inspectable=None, description=SimpleNamespace(family=name)))  # type: ignore[arg-type]


def test_a_stream_leaves_an_ordinary_file_that_repeats_itself(command: Command, causal: tuple[str, ...]) -> None:
    done = command(
        *causal, "--seconds", "3.7", "--at", "1.5s", "a blue star", "--seed-at", "9f", "7", "--stream", "new/x.mp4"
    )
    assert (done.code, done.out) == (0, "new/x.mp4\n"), done.err
    for said in (
        "9 of 45 frames (0.8 s of video), first frames after",
        "frame 21 (1.8 s): a blue star",
        "key-value cache: 7 latent frames in sight",
    ):
        assert said in done.said
    sidecar = read_own_sidecar(Path("new/x.mp4"))
    assert sidecar is not None
    assert sidecar["recipe"]["request"]["prompt_switches"] == [[21, "a blue star"]]
    assert sidecar["recipe"]["request"]["seed_switches"] == [[9, 7]]
    assert set(sidecar["stream"]) == {
        "first_frame_seconds",
        "frames_per_second",
        "worst_gap_seconds",
        "cache_bytes",
        "decodes_beside",
        "interrupted",
    }
    assert read_media_file("new/x.mp4").num_frames == 45
    again = command("generate", "--from", "new/x.mp4", "--stream", "y.mp4", "--json").json
    assert (again["num_frames"], again["exit_code"], again["path"]) == (45, 0, "y.mp4")
    whole = command("generate", "--from", "new/x.mp4", "-o", "z.npy")
    assert whole.code == 0, whole.err
    shown = command(*causal, "--at", "2s", "a blue star", "--seconds", "4", "--stream", "x.mp4", "--dry-run")
    assert "from frame 33: a blue star" in shown.said
    assert "x.mp4" in shown.said


def test_typed_prompts_change_the_video_until_the_input_ends(
    command: Command, causal: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a length: the chunk after the last line is the last one."""

    class Typing(io.StringIO):
        """The second line comes once three chunks are written, and the input ends."""

        def __iter__(self) -> Iterator[str]:  # type: ignore[override]
            yield "half of a character: \udc80\n"
            yield "a blue star\n"
            while num_written[0] < 33:
                time.sleep(0.001)
            yield "a green ring\n"

    num_written = [0]
    write = GrowingClip.write

    def count(self: GrowingClip, frames: Any) -> None:
        write(self, frames)
        num_written[0] = self.num_frames

    monkeypatch.setattr(GrowingClip, "write", count)
    monkeypatch.setattr(sys, "stdin", Typing())
    done = command(*causal, "--stream", "x.mp4", "--interactive", "--json")
    assert done.code == 0, done.err
    request = done.json["request"]
    frames = [at for at, _ in request["prompt_switches"]]
    assert [prompt for _, prompt in request["prompt_switches"]][-1:] in (["a blue star"], ["a green ring"])
    assert all((at - 9) % 12 == 0 for at in frames)
    assert done.json["num_frames"] >= 33
    assert "the prompt stays as it was" in done.said


def test_processes_agree_on_the_lines_and_on_the_end_of_them() -> None:
    """No line yet is not the end, which would end a video without a length after its first chunk."""
    typed: queue.Queue[str] = queue.Queue()
    coordinator = SingleProcessCoordinator()
    assert _agreed(coordinator, typed) == []
    for line in ("a blue star\n", "a ring\n", ""):
        typed.put(line)
    assert _agreed(coordinator, typed) == ["a blue star", "a ring", ""]


def test_what_ends_a_stream_leaves_what_was_made(
    command: Command, causal: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    following = ChunkStream.__next__
    for error, number, code, said in (
        (KeyboardInterrupt(), 3, 130, "interrupted: the 21 frames made so far are in x.mp4"),
        (
            DiffusionRuntimeError("numbers overflowed"),
            3,
            DiffusionRuntimeError.exit_code,
            "numbers overflowed; the 21 frames made so far are in x.mp4",
        ),
        (KeyboardInterrupt(), 1, 130, "interrupted: nothing was finished"),
    ):
        num_made = 0

        def fail(self: ChunkStream, error: BaseException = error, number: int = number) -> CleanChunk:
            nonlocal num_made
            num_made += 1
            if num_made == number:
                raise error
            return following(self)

        monkeypatch.setattr(ChunkStream, "__next__", fail)
        done = command(*causal, "--seconds", "4", "--stream", "x.mp4")
        assert done.code == code, done.err
        assert said in done.said
        if number == 1:
            assert not Path("x.mp4").exists()
            continue
        assert inspect_clip("x.mp4", "video_path", 100).num_frames == 21
        sidecar = json.loads(Path("x.json").read_text())
        assert sidecar["stream"]["interrupted"] is (code == 130)
        assert sidecar["recipe"]["request"]["num_frames"] == 21
        Path("x.mp4").unlink()
        Path("x.json").unlink()


def test_what_does_not_go_with_a_stream_is_refused_before_loading(
    command: Command, causal: tuple[str, ...], tiny_flags: tuple[str, ...]
) -> None:
    cases: tuple[tuple[tuple[str, ...], str], ...] = (
        (("--interactive",), "it goes with --stream FILE.mp4"),
        (("--stream", "x.gif"), "use a name that ends in .mp4"),
        (("--stream", "x.mp4", "-o", "y.mp4"), "--output-path does not go with it"),
        (("--stream", "x.mp4", "--attention-plot", "y.png"), "--attention-plot does not go with it"),
        (("--stream", "x.mp4", "--seed", "1-3"), "expected one prompt and one seed, got 3 generations"),
        (("--stream", "-", "--json"), "standard output carries the video"),
        (("--stream", "x.mp4", "--seconds", "2", "--at", "9s", "late"), "; give more --seconds or --num-frames"),
        (("--stream", "x.mp4", "--at", "soon", "b"), "expected a time (5s, 1m30s"),
        (("--stream", "x.mp4", "--at", "3", "b"), "got '3': 3s for seconds, 3f for a frame"),
        (("--at", "2s", "--stream", "x.mp4"), "--at 2s: expected a prompt in quotes after the time"),
        (("--seconds", "2", "--num-frames", "9"), "expected one of them, got both"),
        (("--stream", "x.mp4", "--interactive", "--kv-window", "0", "--kv-sink", "0"), "give --kv-window"),
    )
    for flags, said in cases:
        done = command(*causal, *flags)
        assert done.code == 2, (flags, done.err)
        assert said in done.said, done.said
        assert "loading the" not in done.said
    done = command("generate", "a", *tiny_flags, "--stream", "x.mp4")
    assert done.code == 2
    assert "this model makes a clip at once" in done.said
    assert list(Path().iterdir()) == []
