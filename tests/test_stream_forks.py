"""Forks of streams: each goes on as it would alone, pages are shared, one computes at a time, what is refused."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
from recorded_capture import RecordedCapture
from tiny_models import write_tiny_wan

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.errors import ConfigError, PipelineBusyError, RequestError
from diffusion_runtime.generation.chunked_denoiser import ChunkStream
from diffusion_runtime.streaming.generation_stream import GenerationStream

# Chunks of 3 latent frames: 9 frames, then 12 each. A chunk behind the third takes slots of the ring.
KEYS = {"num_frames_per_block": 3, "local_attn_size": 7, "sink_size": 2}
REQUEST = GenerationRequest("a red circle", height=32, width=32, num_frames=57, fps=12, num_inference_steps=2, seed=4)

REQUEST_OF_NOISE = dataclasses.replace(REQUEST, commit_noise=0.1)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return load_pipeline(str(write_tiny_wan(tmp_path_factory.mktemp("wan") / "causal", causal=KEYS)), device="cpu")


def repeated(pipeline: Pipeline, stream: GenerationStream) -> numpy.ndarray:
    """The frames of a generation by the stream's recipe, which knows no forks."""
    frames: numpy.ndarray = pipeline(GenerationRequest.from_dict(stream.recipe["request"])).frames
    return frames


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"page_size": 2},
        {"page_size": 4, "kv_cache_dtype": "fp8_e4m3", "commit_noise": 0.1},
        {"page_size": 2, "positions": "window", "switch_mode": "keep", "guidance_scale": 3.0},
    ],
)
@pytest.mark.slow
def test_forks_that_take_turns_are_what_each_is_alone(pipeline: Pipeline, values: dict[str, Any]) -> None:
    request = dataclasses.replace(REQUEST, **values, prompt_switches=((45, "a green ring"),))
    whole = pipeline(request).frames
    with pipeline.stream(request, keeps_frames=True) as stream:
        next(stream), next(stream)
        before = stream.cache_bytes
        with stream.fork() as same, stream.fork("a blue star") as other:
            next(other), next(same)
            with other.fork("a white square") as third:
                next(stream), next(third)
                list(other), list(same), list(third), list(stream)
        forks = [stream, same, other, third]
        assert all(fork.num_frames == 57 for fork in forks)
    for fork in (stream, same):
        assert numpy.array_equal(fork.media().frames, whole)
    for fork in (other, third):
        assert numpy.array_equal(fork.media().frames, repeated(pipeline, fork))
    assert other.recipe["request"]["prompt_switches"] == [(21, "a blue star"), (45, "a green ring")]
    assert third.recipe["request"]["prompt_switches"][1] == (33, "a white square")
    assert len({fork.media().frames.tobytes() for fork in forks}) == 3
    # What each computed is in its own report.
    calls = [fork.attention_report.num_calls for fork in forks]
    assert calls[0] > calls[1] > 0
    notes = same.attention_report.notes
    assert any(note.startswith("forked at frame 21: what was computed before is in the report") for note in notes)
    cache = same.attention_report.cache
    assert cache is not None
    if "page_size" in values:
        assert 0 < cache.num_shared_bytes < before
        assert "shared at the last fork" in str(cache)
    else:
        assert cache.num_shared_bytes == 0
        assert any("keys in a row were copied; pages (page_size)" in note for note in notes)


def test_another_seed_of_the_later_chunks(pipeline: Pipeline) -> None:
    """Of a fork, of forks of it, and of a request; whatever draws the noise, commits included."""
    request = dataclasses.replace(REQUEST, page_size=2, commit_noise=0.1, seed_switches=[["3.5s", 6]])
    with pipeline.stream(request, keeps_frames=True) as stream, stream.fork(seed=2) as early:
        next(stream)
        with stream.fork(seed=9) as fork:
            next(fork), next(early), next(stream)
            with fork.fork("a blue star", seed=2**63 - 1) as third:
                list(third), list(stream), list(early), list(fork)
    switches = [each.recipe["request"]["seed_switches"] for each in (stream, early, fork, third)]
    assert switches == [[(45, 6)], [(45, 6)], [(9, 9), (45, 6)], [(9, 9), (21, 2**63 - 1), (45, 6)]]
    assert [early.recipe["request"]["seed"], fork.recipe["request"]["seed"]] == [2, 4]
    frames = [each.media().frames for each in (stream, early, fork, third)]
    for each, found in zip((stream, early, fork, third), frames, strict=True):
        assert numpy.array_equal(found, repeated(pipeline, each))
    same_until = [[int(numpy.argmin((one == two).all((1, 2, 3)))) for two in frames] for one in frames[:3]]
    assert same_until == [[0, 0, 9, 9], [0, 0, 0, 0], [9, 0, 0, 21]]
    # As a video of one seed to its end, and a beginning of it.
    assert numpy.array_equal(frames[0][:45], pipeline(REQUEST_OF_NOISE).frames[:45])
    with pytest.raises(RequestError, match="seed: expected a whole number from 0"):
        pipeline.stream(request).fork(seed=-1)
    for given, said in (
        ([["4s", 1], [48, 2]], "--seed-at: '4s' and 48 are the same chunk, which begins at frame 57"),
        ([["0s", 1]], "is the video's first frame, which is of the seed"),
        ([["1s", "x"]], r"seed_switches \(--seed-at\), at 1s: expected a whole number from 0"),
        (["soon 1"], "expected a time"),
        (["3 1"], "got '3': 3s for seconds, 3f for a frame"),
        (["3.5 1"], "got '3.5': 3.5s for seconds$"),
        (["99999999999 1"], "got '99999999999'$"),
        (["٣f 1"], "expected a time"),
        ([7], "expected pairs of a time and a seed, such as"),
    ):
        with pytest.raises(RequestError, match=said):
            pipeline.resolve(dataclasses.replace(REQUEST, num_frames=81, seed_switches=given))
    texts = dataclasses.replace(REQUEST, seed_switches=["3.5s 6", "9f 7"])
    assert pipeline.resolve(texts).seed_switches == ((9, 7), (45, 6))


def test_products_of_quantised_layers_count_for_the_stream_that_computes_them(pipeline: Pipeline) -> None:
    folder = pipeline.recipe["model"]["path"]
    quantised = load_pipeline(folder, device="cpu", quantization="fp8-all")
    whole = quantised(REQUEST)
    with quantised.stream(REQUEST, keeps_frames=True) as stream:
        next(stream), next(stream), next(stream)
        with stream.fork() as fork:
            next(fork), next(stream), next(fork)
        next(stream)
    assert numpy.array_equal(fork.media().frames, whole.frames)
    counts = [sum(row.count for row in each.attention_report.products) for each in (whole, stream, fork)]
    assert counts[0] == counts[1] > 2 * counts[2] > 0


def test_pages_are_shared_until_either_stream_writes_to_them(pipeline: Pipeline) -> None:
    """And the pages of a fork that is closed are free for the next one."""
    with pipeline.stream(dataclasses.replace(REQUEST, page_size=2, kv_sink=2, kv_window=7), endless=True) as stream:
        for _ in range(4):
            next(stream)
        alone = stream.cache_bytes
        tables = 2 * 7 * 2 * 4
        fork = stream.fork()
        # All seven frames in sight.
        assert stream.shared_cache_bytes == fork.shared_cache_bytes == alone - tables
        assert stream.cache_bytes + fork.cache_bytes == alone + tables
        for at in range(4):
            next(fork), next(stream)
            # A chunk of three frames, then all five of the ring; the sink is never written to.
            own = 3 if at == 0 else 5
            assert stream.shared_cache_bytes == (alone - tables) * (7 - own) // 7
            assert stream.cache_bytes + fork.cache_bytes == (alone - tables) * (7 + own) // 7 + 2 * tables
        together = stream.cache_bytes + fork.cache_bytes
        held = fork.cache_bytes
        fork.close()
        assert (fork.cache_bytes, stream.shared_cache_bytes) == (held, 0)
        first = next(stream)
        with stream.fork() as again:
            second = next(again)
            assert numpy.array_equal(next(stream).frames, second.frames)
            assert stream.cache_bytes + again.cache_bytes == together
    assert numpy.array_equal(numpy.concatenate([first.frames, second.frames]), ninth_and_tenth(pipeline))


def ninth_and_tenth(pipeline: Pipeline) -> numpy.ndarray:
    frames: numpy.ndarray = pipeline(dataclasses.replace(REQUEST, num_frames=9 + 12 * 9)).frames[-24:]
    return frames


def test_the_pipeline_is_free_when_the_last_of_them_is_closed(pipeline: Pipeline) -> None:
    stream = pipeline.stream(REQUEST, keeps_frames=True)
    # Before the first chunk it is a second stream, whose prompt is that of the request.
    early = stream.fork("a blue star")
    next(stream)
    fork = stream.fork()
    stream.close()
    with pytest.raises(PipelineBusyError):
        pipeline(REQUEST)
    assert sum(len(chunk.frames) for chunk in fork) == 48
    list(early)
    assert early.recipe["request"]["prompt"] == "a blue star"
    assert numpy.array_equal(early.media().frames, repeated(pipeline, early))
    assert numpy.array_equal(fork.media().frames, pipeline(REQUEST).frames)
    assert (fork.rate.num_frames, fork.rate.first_frame_seconds > 0) == (36, True)
    # An abandoned fork leaves the others alone.
    stream = pipeline.stream(REQUEST)
    next(stream), next(stream.fork())
    assert len(list(stream)) == 4


def test_decoding_beside_denoising_of_forks(pipeline: Pipeline) -> None:
    """They have one thread, and a chunk that was begun ahead is in both."""
    whole = pipeline(REQUEST).frames
    with pipeline.stream(REQUEST, keeps_frames=True, decodes_beside=True) as stream:
        next(stream), next(stream), next(stream)
        with stream.fork("a blue star") as fork, stream.fork() as closed:
            assert [next(fork).prompt, next(stream).prompt] == ["a red circle"] * 2
            closed.close()
            assert next(fork).prompt == "a blue star"
            next(stream)
    assert numpy.array_equal(stream.media().frames, whole)
    assert numpy.array_equal(fork.media().frames, repeated(pipeline, fork))


def test_one_of_them_computes_at_a_time(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call in another thread is refused, and leaves its stream as it was."""
    started, may_go_on = threading.Event(), threading.Event()
    following = ChunkStream.__next__

    def waits(self: ChunkStream) -> Any:
        started.set()
        assert may_go_on.wait(60)
        return following(self)

    with pipeline.stream(REQUEST, keeps_frames=True) as stream:
        next(stream)
        fork = stream.fork()
        monkeypatch.setattr(ChunkStream, "__next__", waits)
        thread = threading.Thread(target=next, args=(stream,))
        thread.start()
        assert started.wait(60)
        for call in (lambda: next(fork), lambda: next(stream), fork.fork):
            with pytest.raises(PipelineBusyError, match="a fork of the same video, is computing in another thread"):
                call()
        may_go_on.set()
        thread.join()
        list(fork), list(stream)
    assert numpy.array_equal(fork.media().frames, stream.media().frames)


def test_what_cannot_be_forked(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pipeline.stream(REQUEST) as stream:
        with pytest.raises(RequestError, match="at least one word"):
            stream.fork(" ")
        for _ in range(5):
            next(stream)
        with pytest.raises(RequestError, match="one whose last chunk has been made; fork it earlier, or give more"):
            stream.fork()
        assert list(stream) == []
    with pytest.raises(RequestError, match="got one that is closed after 57 frames; fork it inside"):
        stream.fork()
    rolling = dataclasses.replace(REQUEST, chunk_schedule="rolling", sampler="dmd", kv_window=9)
    with pipeline.stream(rolling) as stream:
        next(stream)
        with pytest.raises(RequestError, match="expected chunk_schedule 'sequential', got 'rolling'; use"):
            stream.fork()
        assert len(list(stream)) == 4
    graphs = ForwardGraphs(RecordedCapture(), is_probed=False)
    monkeypatch.setattr(pipeline, "parts", dataclasses.replace(pipeline.parts, graphs=graphs))
    with pipeline.stream(REQUEST) as stream:
        next(stream)
        with pytest.raises(ConfigError, match=r"expected cuda_graphs='off', got graphs; load .*\(--cuda-graphs off\)"):
            stream.fork()
        next(stream)
