"""The whole generation against diffusers' own LTX2Pipeline: same folder, noise, prompts and guidance, float32, CPU."""

from __future__ import annotations

import os
import wave
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import LTX2Pipeline
from family_parity import load_theirs, record_latents
from sound_files import write_wave
from tables import table
from tiny_ltx2 import AUDIO_BINS, AUDIO_CHANNELS, TINY_SIZES, write_tiny_ltx2
from warm_python import run_python

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.denoising.noise import initial_noise
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry

PROMPTS = ("a red circle moving left", "two objects, a blue star and a green ring on a striped background .")
NEGATIVE_PROMPTS = ("a yellow square", "")
Pair = tuple[Pipeline, LTX2Pipeline]


@pytest.fixture(scope="module")
def pair(tiny_folder: Path) -> Pair:
    """Our pipeline and diffusers' on one folder."""
    return make_pair(tiny_folder)


def make_pair(folder: Path) -> Pair:
    ours = load_pipeline(str(folder), device="cpu")
    assert isinstance(ours, Pipeline)
    return ours, load_theirs(LTX2Pipeline, folder)


@pytest.fixture(scope="module")
def pair23(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """On a folder of LTX-2.3."""
    return make_pair(write_tiny_ltx2(tmp_path_factory.mktemp("ltx23") / "model", is_ltx23=True))


@pytest.fixture
def our_latents(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    return record_latents(monkeypatch)


def run_theirs(
    theirs: LTX2Pipeline, geometry: LTX2Geometry, requests: list[GenerationRequest], noise: torch.Tensor, size: ClipSize
) -> tuple[list[torch.Tensor], numpy.ndarray, numpy.ndarray]:
    """Their latents after every step as flat tensors like ours, their frames, and their sound [batch, channels, n]."""
    latents: list[torch.Tensor] = []
    video_shape, audio_shape = geometry.video_shape(size), geometry.audio_shape(size)

    def keep(pipeline: Any, step: int, timestep: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        video = tensors["latents"].transpose(1, 2).unflatten(2, video_shape[1:])
        audio = tensors["audio_latents"].unflatten(2, (AUDIO_CHANNELS, AUDIO_BINS)).transpose(1, 2)
        latents.append(geometry.join(video, audio))
        return {}

    # The sound's latents are there when the callback is called; the pipeline just does not offer them.
    theirs._callback_tensor_inputs = [*LTX2Pipeline._callback_tensor_inputs, "audio_latents"]
    parts = geometry.parts(noise, size)
    assert parts.audio is not None
    first = requests[0]
    # Latents of packed video are taken as they are; those of the sound are normalised first, whatever their shape.
    audio = parts.audio.transpose(1, 2).flatten(2) * theirs.audio_vae.latents_std + theirs.audio_vae.latents_mean
    assert audio.shape[1] == audio_shape[1]
    frames, sound = theirs(
        prompt=[request.prompt for request in requests],
        negative_prompt=[request.negative_prompt for request in requests],
        height=size.height,
        width=size.width,
        num_frames=size.num_frames,
        frame_rate=float(size.fps),
        num_inference_steps=first.num_inference_steps,
        guidance_scale=first.guidance_scale,
        latents=parts.video.flatten(2).transpose(1, 2),
        audio_latents=audio,
        callback_on_step_end=keep,
        callback_on_step_end_tensor_inputs=["latents", "audio_latents"],
        output_type="np",
        return_dict=False,
        **their_guidance(first),
    )
    return latents, frames, sound.numpy()


def their_guidance(request: GenerationRequest) -> dict[str, Any]:
    """The terms beside classifier-free guidance: what a request leaves out is on in their pipeline."""
    return {
        "stg_scale": request.stg_scale or 0.0,
        "modality_scale": 1.0 if request.modality_scale is None else request.modality_scale,
        "guidance_rescale": request.guidance_rescale or 0.0,
        "audio_guidance_scale": request.audio_guidance_scale,
        "audio_stg_scale": request.audio_stg_scale,
        "audio_modality_scale": request.audio_modality_scale,
        "audio_guidance_rescale": request.audio_guidance_rescale,
        "spatio_temporal_guidance_blocks": list(request.stg_blocks or ()),
    }


def both_parts(geometry: LTX2Geometry, latents: torch.Tensor, size: ClipSize) -> tuple[torch.Tensor, torch.Tensor]:
    parts = geometry.parts(latents, size)
    assert parts.audio is not None
    return parts.video, parts.audio


def compare(pair: Pair, requests: list[GenerationRequest], kept: list[torch.Tensor]) -> None:
    """Latents of both parts after every step within 1e-4 of their length, frames within 2/255, the sound within 1e-4 of
    full scale."""
    ours, theirs = pair
    geometry = ours.rules.sampling.geometry
    assert isinstance(geometry, LTX2Geometry)
    resolved = [ours.resolve(request) for request in requests]
    first = resolved[0].to_dict()
    size = ClipSize(*(first[name] for name in ("height", "width", "num_frames", "fps")))
    noise = initial_noise(geometry.sample_shape(size), [request.seed for request in requests])
    kept.clear()
    media = ours.generate(requests)
    expected_latents, expected_frames, expected_sound = run_theirs(theirs, geometry, resolved, noise, size)
    assert len(kept) == len(expected_latents) == first["num_inference_steps"]
    for found, expected in zip(kept, expected_latents, strict=True):
        assert found.shape == expected.shape
        for mine, other in zip(*(both_parts(geometry, x, size) for x in (found, expected)), strict=True):
            assert (mine - other).norm() <= 1e-4 * other.norm()
    # The steps did something: a comparison of noise with noise would pass too.
    assert (expected_latents[-1] - noise).abs().max() > 0.5
    for item, frames, sound in zip(media, expected_frames, expected_sound, strict=True):
        assert item.frames.shape == frames.shape
        assert numpy.abs(item.frames / 255 - frames).max() <= 2 / 255
        assert frames.std() > 0.02
        assert item.audio is not None
        assert item.audio.sample_rate == theirs.vocoder.config.output_sampling_rate
        assert item.audio.samples.shape == sound.shape
        assert numpy.abs(item.audio.samples - sound).max() <= 1e-4
        assert sound.std() > 0.01


def request(**values: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"prompt": PROMPTS[0], **TINY_SIZES, "num_inference_steps": 3, "seed": 5}
    return GenerationRequest(**(fields | values))


def batch(**values: Any) -> list[GenerationRequest]:
    pairs = zip(PROMPTS, NEGATIVE_PROMPTS, (5, 6), strict=True)
    return [request(prompt=prompt, negative_prompt=other, seed=seed, **values) for prompt, other, seed in pairs]


@table("changes", [{}, {"num_frames": 17, "fps": 24, "height": 96}, {"num_frames": 1, "fps": 12}])
def test_one_request_without_guidance(pair: Pair, our_latents: list[torch.Tensor], changes: dict[str, Any]) -> None:
    compare(pair, [request(guidance_scale=1.0, **changes)], our_latents)


@table("guidance_mode", ["batched", "two_pass"])
def test_a_batch_of_two_unequal_prompts_with_guidance(
    pair: Pair, our_latents: list[torch.Tensor], guidance_mode: str
) -> None:
    compare(pair, batch(guidance_scale=4.0, guidance_mode=guidance_mode), our_latents)


# The scales that are documented for LTX-2.3, with other ones of the sound.
ALL_TERMS: dict[str, Any] = {
    "guidance_scale": 3.0,
    "stg_scale": 1.0,
    "stg_blocks": (1,),
    "modality_scale": 3.0,
    "guidance_rescale": 0.7,
    "audio_guidance_scale": 7.0,
    "audio_stg_scale": 0.5,
    "audio_modality_scale": 2.0,
    "audio_guidance_rescale": 0.4,
}


@table(
    "terms, is_batch",
    [
        (ALL_TERMS, True),
        ({**ALL_TERMS, "guidance_mode": "two_pass", "audio_guidance_scale": None, "guidance_rescale": None}, False),
        ({"guidance_scale": 1.0, "stg_scale": 2.0, "stg_blocks": (0, 1)}, False),
    ],
)
def test_ltx23_and_its_terms_of_guidance(
    pair23: Pair, our_latents: list[torch.Tensor], terms: dict[str, Any], is_batch: bool
) -> None:
    values = {**terms, "num_inference_steps": 2}
    compare(pair23, batch(**values) if is_batch else [request(**values)], our_latents)


def test_ltx25_with_gemma_4(tiny_folder25: Path, our_latents: list[torch.Tensor]) -> None:
    values = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0, "audio_guidance_scale": 1.0}
    compare(make_pair(tiny_folder25), [request(**values, guidance_scale=1.0, num_inference_steps=2)], our_latents)


def test_the_terms_of_guidance_that_change_the_sound_alone(pair: Pair, our_latents: list[torch.Tensor]) -> None:
    compare(pair, [request(guidance_scale=3.0, audio_guidance_scale=5.0, audio_guidance_rescale=0.5)], our_latents)


def test_pictures_for_a_given_sound(
    pair23: Pair, our_latents: list[torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their transformer is called as their pipelines do that freeze the sound: clean, at timestep and sigma 0."""
    ours, theirs = pair23
    asked = request(**ALL_TERMS, num_inference_steps=2, audio_path=write_wave(tmp_path / "a.wav"))
    media = ours.generate([asked])
    resolved, geometry = ours.resolve(asked), ours.rules.sampling.geometry
    assert isinstance(geometry, LTX2Geometry)
    size = ClipSize(*(TINY_SIZES[name] for name in ("height", "width", "num_frames", "fps")))
    sound = ours.parts.load_image_conditioner().condition(resolved, size).sound
    assert sound is not None
    forward = theirs.transformer.forward

    def frozen(**values: Any) -> Any:
        batch, *_ = values["hidden_states"].shape
        still = torch.zeros(batch)
        clean = sound.transpose(1, 2).flatten(2).repeat(batch, 1, 1)
        return forward(**{**values, "audio_hidden_states": clean, "audio_timestep": still, "audio_sigma": still})

    monkeypatch.setattr(theirs.transformer, "forward", frozen)
    noise = initial_noise(geometry.sample_shape(size), [5])
    latents, frames, _ = run_theirs(theirs, geometry, [resolved], noise, size)
    for found, expected in zip(our_latents, latents, strict=True):
        mine, other = geometry.parts(found, size).video, geometry.parts(expected, size).video
        assert (mine - other).norm() <= 1e-4 * other.norm()
    assert numpy.abs(media[0].frames / 255 - frames[0]).max() <= 2 / 255


def test_the_report_says_the_forward_passes_of_a_step(pair23: Pair) -> None:
    """Two steps of both branches in one batch, one with values alone in block 1, and one of streams apart."""
    report = pair23[0](request(**ALL_TERMS, num_inference_steps=2)).attention_report
    expected = (
        "guidance: 3 forward passes per step: cond and uncond in one batch (guidance_scale 3, sound 7); "
        "self-attention of block 1 skipped (stg_scale 1, sound 0.5); "
        "pictures and sound apart (modality_scale 3, sound 2); guidance_rescale 0.7, sound 0.4"
    )
    assert expected in report.notes
    counts = {row.role: row.count for row in report.rows}
    assert counts == {
        **dict.fromkeys(("self", "ltx2.audio_self"), 2 * (2 + 1 + 2)),
        **dict.fromkeys(("cross", "ltx2.audio_cross"), 2 * (2 + 2 + 2)),
        **dict.fromkeys(("ltx2.audio_to_video", "ltx2.video_to_audio"), 2 * (2 + 2)),
    }


def test_terms_of_guidance_that_cannot_run_are_refused_before_any_work(pair: Pair, pair23: Pair) -> None:
    refused = [
        (pair, {"stg_scale": 1.0}, "stg_scale: this model takes no spatio-temporal guidance"),
        # The documented block is beyond the tiny model's.
        (pair23, {}, "stg_blocks: expected indices from 0 to 1, .* got 28"),
        (pair23, {"stg_scale": 0.0, "step_cache": "dbcache"}, "step_cache: dbcache is made for the two branches"),
    ]
    for (ours, _), values, told in refused:
        with pytest.raises(RequestError, match=told):
            ours.resolve(request(**values))


def test_easycache_reuses_every_branch_of_a_step(pair23: Pair) -> None:
    values = {**ALL_TERMS, "num_inference_steps": 6, "step_cache": "easycache:force=true,threshold=10"}
    rows = {row.role: row.count for row in pair23[0](request(**values)).attention_report.rows}
    full = 6 * (2 + 1 + 2)
    assert 0 < rows["self"] < full
    assert rows["self"] % (2 + 1 + 2) == 0


def test_connectors_without_registers_and_a_fixed_shift(tmp_path: Path, our_latents: list[torch.Tensor]) -> None:
    folder = write_tiny_ltx2(tmp_path / "model", rope_type="interleaved", has_registers=False, shifts_by_size=False)
    compare(make_pair(folder), batch(guidance_scale=3.0, num_inference_steps=2), our_latents)


def test_a_long_prompt_is_cut_where_diffusers_cuts_it(pair: Pair, our_latents: list[torch.Tensor]) -> None:
    long = "a red circle and a blue star moving left , " * 110
    conditions = pair[0].text_encoder.encode([long, "a red circle"])
    # 1100 words and the first token, in room for 1024.
    assert (conditions.lengths, conditions.num_cut_tokens) == ((1024, 1024), (77, 0))
    compare(pair, [request(prompt=long, guidance_scale=1.0, num_inference_steps=2)], our_latents)


def test_words_of_the_prompt_that_are_unknown_are_named(pair: Pair) -> None:
    conditions = pair[0].text_encoder.encode(["a red snark", "a circle"])
    assert conditions.unknown_words == (("snark",), ())


def test_prompts_guidance_and_seed_reach_pictures_and_sound(pair: Pair) -> None:
    """Otherwise the comparisons above could not tell whether one of them went astray."""
    values: list[dict[str, Any]] = [
        {},
        {"prompt": PROMPTS[1]},
        {"guidance_scale": 1.0},
        {"negative_prompt": NEGATIVE_PROMPTS[0]},
        {"seed": 6},
    ]
    made = [pair[0](request(**changed)) for changed in values]
    for index, first in enumerate(made):
        for other in made[index + 1 :]:
            assert numpy.abs(first.frames.astype(int) - other.frames.astype(int)).max() > 2
            assert first.audio is not None
            assert other.audio is not None
            assert numpy.abs(first.audio.samples - other.audio.samples).max() > 1e-3


def test_the_report_counts_every_role(pair: Pair) -> None:
    media = pair[0](request(num_inference_steps=2))
    rows = {row.role: row.count for row in media.attention_report.rows}
    # Two blocks, two steps, both branches in one batch.
    names = ("self", "cross", "ltx2.audio_self", "ltx2.audio_cross", "ltx2.audio_to_video", "ltx2.video_to_audio")
    assert rows == dict.fromkeys(names, 4)


def test_a_clip_too_short_for_sound_is_refused_before_any_work(pair: Pair) -> None:
    with pytest.raises(RequestError, match="1 frames at 60 a second are too short for any sound"):
        pair[0].resolve(request(num_frames=1, fps=60))


def test_one_step_is_refused_before_any_work(pair: Pair) -> None:
    with pytest.raises(RequestError, match="num_inference_steps: expected 2 or more, got 1"):
        pair[0].resolve(request(num_inference_steps=1))


@pytest.mark.slow
def test_two_processes_write_the_same_pictures_and_sound(tiny_folder: Path, tmp_path: Path) -> None:
    """12 tokens of video, half on each; the text and both decoders on the first."""
    values = {**TINY_SIZES, "num_inference_steps": 2, "seed": 5, "negative_prompt": NEGATIVE_PROMPTS[0]}
    flags = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = ["-m", "diffusion_runtime", "generate", PROMPTS[0], "--model-path", str(tiny_folder)]
    parallel = ["--device", "cpu", "--num-gpus", "2", "--ulysses-degree", "2"]
    done = run_python(
        *(*command, *parallel, *flags, "--output-path", str(tmp_path / "two.npy")),
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        max_ranks=2,
    )
    assert done.returncode == 0, done.stderr
    assert "cannot carry sound; it is in" in done.stderr
    pipeline = load_pipeline(str(tiny_folder), device="cpu")
    pipeline(GenerationRequest(prompt=PROMPTS[0], **values)).save(tmp_path / "one.npy")
    one, two = (numpy.load(tmp_path / f"{name}.npy").astype(int) for name in ("one", "two"))
    assert numpy.abs(one - two).max() <= 1
    sounds = [read_samples(tmp_path / f"{name}.wav") for name in ("one", "two")]
    assert sounds[0].std() > 1000
    assert numpy.abs(sounds[0] - sounds[1]).max() <= 3


def read_samples(path: Path) -> numpy.ndarray:
    with wave.open(str(path), "rb") as file:
        return numpy.frombuffer(file.readframes(file.getnframes()), "<i2").astype(int)
