"""Streams: the frames of a whole generation while it is made, prompts on the way, and a pipeline that is free again."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from saved_runs import assert_same, saving
from tiny_models import write_tiny_wan

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.errors import ConfigError, PipelineBusyError, RequestError
from diffusion_runtime.generation.chunked_denoiser import ChunkStream
from diffusion_runtime.generation.saved_latents import read_latents
from diffusion_runtime.profiling.instruments import counted_density
from diffusion_runtime.streaming.generation_stream import GenerationStream

# Chunks of 3 latent frames: 9 frames, then 12 each.
KEYS = {"num_frames_per_block": 3, "local_attn_size": 7, "sink_size": 2}
REQUEST = GenerationRequest("a red circle", height=32, width=32, num_frames=45, fps=12, num_inference_steps=2, seed=4)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return load_pipeline(str(write_tiny_wan(tmp_path_factory.mktemp("wan") / "causal", causal=KEYS)), device="cpu")


def test_a_stream_gives_the_frames_of_a_generation(pipeline: Pipeline) -> None:
    """Chunk by chunk, with prompts at times of the video, and its recipe repeats it."""
    request = dataclasses.replace(REQUEST, prompt_switches=[["1.5s", "a blue star"], ["30f", "a green ring"]])
    whole = pipeline(request)
    assert whole.recipe["request"]["prompt_switches"] == [(21, "a blue star"), (33, "a green ring")]
    plain = pipeline(REQUEST)
    assert numpy.array_equal(whole.frames[:21], plain.frames[:21])
    assert not numpy.array_equal(whole.frames[21:], plain.frames[21:])
    with counted_density(pipeline), pipeline.stream(request, keeps_frames=True) as stream:
        chunks = list(stream)
    assert {each.steps for each in stream.attention_report.density if each.role == "self"} == {(1.0, 1.0)}
    assert [(chunk.first_frame, len(chunk.frames), chunk.prompt) for chunk in chunks] == [
        (0, 9, "a red circle"),
        (9, 12, "a red circle"),
        (21, 12, "a blue star"),
        (33, 12, "a green ring"),
    ]
    media = stream.media()
    assert numpy.array_equal(media.frames, whole.frames)
    assert media.recipe == whole.recipe
    assert (media.attention_report.cache is None, media.attention_report.num_calls) == (
        False,
        whole.attention_report.num_calls,
    )
    assert set(media.timings) >= {"text", "denoise", "decode"}
    assert stream.rate.num_frames == 36
    assert stream.rate.first_frame_seconds > 0
    assert stream.rate.worst_gap_seconds <= stream.rate.seconds


def test_prompts_that_are_typed_are_in_the_recipe_which_repeats_them(pipeline: Pipeline) -> None:
    with pipeline.stream(REQUEST, endless=True, keeps_frames=True) as stream:
        next(stream)
        stream.prompt("never seen")
        stream.prompt("a blue star")
        next(stream), next(stream)
        with pytest.raises(RequestError, match="expected at least one word"):
            stream.prompt(" ")
        # The same prompt is no switch.
        stream.prompt("a blue star")
        last = next(stream)
    assert (last.first_frame, last.prompt) == (33, "a blue star")
    request = GenerationRequest.from_dict(stream.recipe["request"])
    assert (request.num_frames, request.prompt_switches) == (45, ((9, "a blue star"),))
    assert numpy.array_equal(pipeline(request).frames, stream.media().frames)


def test_whatever_ends_a_stream_its_recipe_repeats_it_and_the_pipeline_is_free(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pipeline.stream(REQUEST, endless=True, keeps_frames=True) as stream:
        next(stream)
        stream.prompt("a blue star")
        monkeypatch.setattr(ChunkStream, "__next__", raises(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        monkeypatch.undo()
    request = GenerationRequest.from_dict(stream.recipe["request"])
    assert (request.num_frames, request.prompt_switches) == (9, None)
    assert numpy.array_equal(pipeline(request).frames, stream.media().frames)
    monkeypatch.setattr(ChunkStream, "report", raises(RuntimeError("a GPU that is gone")))
    with pytest.raises(RuntimeError, match="gone"):
        pipeline.stream(REQUEST).close()
    monkeypatch.undo()
    assert len(pipeline(request).frames) == 9


def test_decoding_beside_denoising_gives_the_same_frames(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a thread of its own, from the third chunk on: prompts at their times, typed ones a chunk later, what fails
    fails at its chunk, and the recipe repeats it."""
    request = dataclasses.replace(REQUEST, prompt_switches=[["1.5s", "a blue star"], ["30f", "a green ring"]])
    whole = pipeline(request)
    with pipeline.stream(request, keeps_frames=True, decodes_beside=True) as stream:
        chunks = list(stream)
    assert [(chunk.first_frame, chunk.prompt) for chunk in chunks] == [
        (0, "a red circle"),
        (9, "a red circle"),
        (21, "a blue star"),
        (33, "a green ring"),
    ]
    assert numpy.array_equal(stream.media().frames, whole.frames)
    assert stream.media().recipe == whole.recipe
    threads = []
    decoded = GenerationStream._frames_of
    monkeypatch.setattr(
        GenerationStream, "_frames_of", lambda *a: (threads.append(threading.current_thread().name), decoded(*a))[1]
    )
    with pipeline.stream(REQUEST, endless=True, keeps_frames=True, decodes_beside=True) as stream:
        for _ in range(3):
            next(stream)
        # The fourth chunk has been begun.
        stream.prompt("a blue star")
        prompts = [next(stream).prompt for _ in range(2)]
    assert prompts == ["a red circle", "a blue star"]
    assert len(set(threads)) == 1
    assert threads[0].startswith("decoding")
    repeated = GenerationRequest.from_dict(stream.recipe["request"])
    assert repeated.prompt_switches == ((45, "a blue star"),)
    assert numpy.array_equal(pipeline(repeated).frames, stream.media().frames)
    monkeypatch.setattr(GenerationStream, "_frames_of", raises(RequestError("a decoder that fails")))
    with pytest.raises(RequestError, match="decoder that fails"):
        next(pipeline.stream(REQUEST, decodes_beside=True))
    monkeypatch.undo()
    # The chunk before the one that fails, or is interrupted, is handed out.
    for error in (RequestError("no more"), KeyboardInterrupt()):
        with pipeline.stream(REQUEST, endless=True, keeps_frames=True, decodes_beside=True) as stream:
            next(stream), next(stream), next(stream)
            monkeypatch.setattr(ChunkStream, "__next__", raises(error))
            if not isinstance(error, KeyboardInterrupt):
                assert next(stream).first_frame == 33
            with pytest.raises(type(error)):
                next(stream)
            monkeypatch.undo()
        frames = stream.media().frames
        assert numpy.array_equal(pipeline(dataclasses.replace(REQUEST, num_frames=len(frames))).frames, frames)


def raises(error: BaseException) -> Callable[..., None]:
    def method(*_: object) -> None:
        raise error

    return method


def test_a_video_without_an_end_takes_no_more_memory(pipeline: Pipeline) -> None:
    with pipeline.stream(REQUEST, endless=True) as stream:
        chunks, num_bytes = [], []
        for _ in range(8):
            chunks.append(next(stream).frames)
            num_bytes.append(stream.cache_bytes)
    assert len(set(num_bytes[2:])) == 1
    assert numpy.array_equal(numpy.concatenate(chunks)[:45], pipeline(REQUEST).frames), "the beginning is the same"
    with pytest.raises(ConfigError, match="does not keep its frames"):
        stream.media()


def test_the_pipeline_is_busy_until_the_stream_ends_however_it_does(pipeline: Pipeline) -> None:
    stream: GenerationStream | None = pipeline.stream(REQUEST)
    assert stream is not None
    next(stream)
    with pytest.raises(PipelineBusyError):
        pipeline(REQUEST)
    stream.close()
    assert list(stream) == []
    stream = pipeline.stream(REQUEST)
    stream = None
    with pipeline.stream(REQUEST) as ended:
        assert len(list(ended)) == 4
        pipeline(dataclasses.replace(REQUEST, num_frames=9))


def test_a_stream_that_is_closed_while_it_computes_is_released_behind_its_chunk(pipeline: Pipeline) -> None:
    """By a hook of the model or by another thread: nobody generates inside the chunk, whose frames are those of a
    stream that nobody closed."""
    with pipeline.stream(REQUEST) as stream:
        expected = [next(stream).frames, next(stream).frames]

    def close_here(stream: GenerationStream) -> None:
        stream.close()

    def close_there(stream: GenerationStream) -> None:
        thread = threading.Thread(target=stream.close)
        thread.start()
        thread.join()

    for close in (close_here, close_there):
        # The second chunk begins after a few forward passes; the 6th to 14th of a stream were seen to be entered.
        for at in (1, 4, 7):
            num_passes, refused = 0, []
            stream = pipeline.stream(REQUEST)

            def count(*_: object) -> None:
                nonlocal num_passes
                num_passes += 1
                if num_passes == at:  # noqa: B023 - called in this round alone
                    close(stream)  # noqa: B023
                    with pytest.raises(PipelineBusyError):
                        pipeline(REQUEST)
                    refused.append(at)  # noqa: B023

            hook = pipeline.transformer.register_forward_hook(count)
            try:
                frames = [chunk.frames for chunk in stream]
            finally:
                hook.remove()
            assert refused == [at]
            assert 1 <= len(frames) <= 4
            for made, wanted in zip(frames, expected, strict=False):
                assert numpy.array_equal(made, wanted)
            assert pipeline(dataclasses.replace(REQUEST, num_frames=9)).frames.shape[0] == 9


def test_what_cannot_be_streamed_is_refused_before_any_work(pipeline: Pipeline, tiny_wan_folder: Path) -> None:
    cases = {
        "a video without an end cannot see all of its frames; give --kv-window": {"kv_window": 0, "kv_sink": 0},
        "--at: '4s' is past the end: the video has 45 frames at 12": {"prompt_switches": [["4s", "a"]]},
        "are the same chunk, which begins at frame 21": {"prompt_switches": [["1s", "a"], [13, "b"]]},
        "expected a time": {"prompt_switches": [["soon", "a"]]},
        "'0s' is the video's first frame, which is of the prompt": {"prompt_switches": [["0s", "a"]]},
        # A clip of 2 latent frames has room for its only chunk; chunks of 3 behind it would overwrite their own keys.
        "which with a sink of 2 need --kv-window 5 or more, got 4": {"num_frames": 5, "kv_window": 4},
    }
    for message, values in cases.items():
        with pytest.raises(RequestError, match=message):
            pipeline.stream(dataclasses.replace(REQUEST, **values), endless=True)
    plain = load_pipeline(str(tiny_wan_folder), device="cpu")
    with pytest.raises(RequestError, match="makes a clip at once"):
        plain.stream(GenerationRequest("a", height=32, width=32, num_frames=5))
    with pytest.raises(RequestError, match="of one prompt; leave --at out, give windows of fewer frames"):
        plain(GenerationRequest("a", height=32, width=32, num_frames=5, prompt_switches=[["1s", "b"]]))
    tiled = load_pipeline(pipeline.recipe["model"]["path"], device="cpu", vae_tiling="on")
    with pytest.raises(ConfigError, match="leave out --vae-tiling"):
        tiled.stream(REQUEST)
    # It is free.
    assert len(tiled(REQUEST).frames) == 45


def test_a_video_in_chunks_is_decoded_from_its_latents(pipeline: Pipeline, tmp_path: Path) -> None:
    whole, (file,) = saving(pipeline, REQUEST, tmp_path)
    assert_same(pipeline.finish(read_latents(file)), whole)
    with pytest.raises(RequestError, match="stop_after_step: this model makes a video chunk by chunk"):
        pipeline.resolve(dataclasses.replace(REQUEST, stop_after_step=1))
