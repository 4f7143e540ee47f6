"""Video to video of causal models: each chunk starts from its own frames of the video, noised."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from several_processes import start
from tables import table
from tiny_models import write_tiny_wan

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.chunk_samplers import ChunkedVideo, Commit, PerChunkSampler
from diffusion_runtime.denoising.chunks import ChunkPlan
from diffusion_runtime.denoising.initial_latents import InitialLatents
from diffusion_runtime.denoising.noise import ChunkNoise
from diffusion_runtime.denoising.registry import build_sampler
from diffusion_runtime.errors import RequestError
from diffusion_runtime.generation.initial_picture import initial_latents

# Chunks of 3 latent frames: 9 frames, then 12 each.
KEYS = {"num_frames_per_block": 3, "local_attn_size": 7, "sink_size": 2}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return load_pipeline(str(write_tiny_wan(tmp_path_factory.mktemp("wan") / "causal", causal=KEYS)), device="cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("initial")
    frames = numpy.random.default_rng(0).integers(0, 256, (33, 4, 4, 3), dtype=numpy.uint8).repeat(8, 1).repeat(8, 2)
    mask = numpy.zeros((32, 32), dtype=numpy.uint8)
    mask[:, 16:] = 255
    numpy.save(folder / "video.npy", frames)
    Image.fromarray(mask).save(folder / "mask.png")
    return {"video": str(folder / "video.npy"), "mask": str(folder / "mask.png")}


def request(path: str | None, **values: Any) -> GenerationRequest:
    fields = {"height": 32, "width": 32, "num_frames": 33, "num_inference_steps": 4, "seed": 4, "strength": 0.5}
    return GenerationRequest(**({"prompt": "a red circle", "init_path": path} | fields | values))


@table("name", ["flow_match_euler", "unipc", "dmd", "rcm"])
def test_chunks_start_from_their_own_latents(name: str) -> None:
    """Each is what a clip of its frames alone is, of the noise of its chunk; in part by a mask."""
    shape, chunks = (4, 6, 8), ChunkPlan(2, 1, 5)
    generator = torch.Generator().manual_seed(7)
    clean = torch.randn(1, 4, 5, 6, 8, generator=generator)
    mask = torch.zeros(1, 1, 5, 6, 8, dtype=torch.bool)
    mask[:, :, 1:4, 3:] = True
    sampler, noise = build_sampler(name, 4, 3.0, {}).from_step(2), ChunkNoise(shape, (1, 2))
    level = sampler.steps(torch.device("cpu"))[0].sigma
    assert level is not None

    def velocity(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        return torch.tanh(latents.flip(-1)) - 0.3 * latents + 0.1 * float(step.sigma or 0.0)

    def forward(latents: torch.Tensor, frames: range, step: StepInfo) -> torch.Tensor:
        del frames
        return velocity(latents, step)

    for of_mask in (None, mask):
        initial = InitialLatents(clean, of_mask)
        video = ChunkedVideo(chunks, forward, noise, Commit(forward, noise), torch.device("cpu"), None, initial)
        made = PerChunkSampler(sampler, video)
        for chunk in chunks:
            of_chunk, draws = clean[:, :, chunk.frames.start : chunk.frames.stop], iter(range(9))
            start = noise.draw(chunk.index, len(chunk.frames), next(draws))

            def draw(chunk: Any = chunk, draws: Any = draws) -> torch.Tensor:
                return noise.draw(chunk.index, len(chunk.frames), next(draws))

            found = made.next_chunk().latents
            if of_mask is None:
                expected = sampler.sample(level * start + (1 - level) * of_chunk, velocity, None, draw)
                assert torch.allclose(found, expected, atol=1e-6)
            else:
                rest = ~mask[:, :, chunk.frames.start : chunk.frames.stop].expand_as(found)
                assert torch.equal(found[rest], of_chunk.expand_as(found)[rest])


def test_a_causal_model_starts_from_a_video(pipeline: Pipeline, files: dict[str, str]) -> None:
    """Half of the steps of every chunk run; what a mask leaves is the video's to the bit; a stream gives the same."""
    plain, asked = pipeline(request(None, strength=None)), request(files["video"])
    media, steps = pipeline(asked), list[int]()
    assert not numpy.array_equal(media.frames, plain.frames)
    rules = pipeline.rules
    assert rules.settings(rules.resolve(asked)).chunking.num_steps_of_video == 3 * 2
    with pipeline.hooks.holding("on_step", lambda step, _: steps.append(step.index)):
        pipeline(asked)
    assert steps == [0, 1] * 3
    with pipeline.stream(asked, keeps_frames=True) as stream:
        list(stream)
        assert numpy.array_equal(stream.media().frames, media.frames)
    masked = rules.resolve(request(files["video"], mask_path=files["mask"]))
    initial = initial_latents(
        masked, rules.settings(masked).size, rules.sampling.geometry, pipeline.parts.latent_encoder
    )
    found = pipeline.latents(masked)
    assert initial.mask is not None
    made = initial.mask.expand_as(found)
    assert torch.equal(found[~made], initial.clean[~made])
    assert (found - initial.clean)[made].abs().mean() > 0.01
    whole = pipeline.latents(dataclasses.replace(masked, mask_path=None, strength=1.0))
    assert torch.equal(whole, pipeline.latents(request(None, strength=None)))


def test_the_first_chunk_has_its_share_of_its_own_steps(pipeline: Pipeline, files: dict[str, str]) -> None:
    asked = request(files["video"], num_inference_steps=5, first_chunk_steps=10, strength=0.6)
    settings = pipeline.rules.settings(pipeline.resolve(asked))
    assert [settings.chunking.num_steps_of_chunk(index) for index in (0, 1)] == [6, 3]
    assert [len(settings.build_sampler(chunk).steps(torch.device("cpu"))) for chunk in (0, 1)] == [6, 3]


@pytest.mark.slow
def test_two_processes_equal_one(files: dict[str, str], tmp_path: Path) -> None:
    folder = write_tiny_wan(tmp_path / "model", causal=KEYS)
    command = ["generate", "a red circle", "--model-path", folder, "--device", "cpu", "--height", 32, "--width", 32]
    command += [
        "--num-frames",
        33,
        "--num-inference-steps",
        4,
        "--init-path",
        files["video"],
        "--mask-path",
        files["mask"],
    ]
    made = {}
    for name, several in (("one", ()), ("two", ("--num-gpus", "2", "--ulysses-degree", "2"))):
        result = start(tmp_path / name, *command, "--strength", "0.5", "-o", "clip.npy", *several).finish()
        assert result.code == 0, result.err
        made[name] = numpy.load(tmp_path / name / "clip.npy")
    assert abs(made["one"].astype(int) - made["two"].astype(int)).max() <= 1


def test_what_is_refused(pipeline: Pipeline, files: dict[str, str]) -> None:
    rolling = request(files["video"], chunk_schedule="rolling", sampler="dmd")
    with pytest.raises(
        RequestError, match=r"init_path: rolling has chunks at several noise levels in one pass.*sequent"
    ):
        pipeline.resolve(rolling)
    with pytest.raises(RequestError, match="init_path: a video without an end is longer than any file"):
        pipeline.stream(request(files["video"]), endless=True)
