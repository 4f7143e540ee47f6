"""Video to video of models that make pictures and sound: both are noised to the level of the first step."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch
from diffusers.pipelines.ltx2 import pipeline_ltx2 as theirs_module
from family_parity import load_theirs
from PIL import Image
from several_processes import start
from sound_files import write_wave
from tables import table
from tiny_ltx2 import ONE_SCALE

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.core.sound_geometry import SoundGeometry
from diffusion_runtime.denoising.initial_latents import InitialLatents
from diffusion_runtime.denoising.noise import initial_noise
from diffusion_runtime.errors import RequestError
from diffusion_runtime.generation.initial_picture import initial_latents, latent_mask, sound_mask
from diffusion_runtime.media.audio import read_sound
from diffusion_runtime.models.minimax_h3.transformer import MiniMaxH3Transformer

SIZES: Mapping[str, dict[str, Any]] = {
    "ltx2": {"height": 64, "width": 96, "num_frames": 17, "fps": 24},
    "minimax_h3": {"height": 64, "width": 96, "num_frames": 22, "fps": 24},
}
LoadTiny = Callable[[str], Pipeline]


@pytest.fixture(scope="module")
def load_tiny(tiny_folder_of: Callable[[str], Path]) -> LoadTiny:
    return functools.cache(lambda family: load_pipeline(str(tiny_folder_of(family)), device="cpu"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Videos of 22 frames at 24 a second, with sound and without, one at 30; masks: the right half, and that of the
    first frames alone."""
    folder = tmp_path_factory.mktemp("initial")
    frames = numpy.random.default_rng(0).integers(0, 256, (22, 8, 12, 3), dtype=numpy.uint8).repeat(8, 1).repeat(8, 2)
    numpy.save(folder / "silent.npy", frames)
    sound = write_wave(folder / "sound.wav", seconds=1.2)
    for name, rate, more in (("loud", 24, ["-i", sound]), ("mute", 24, []), ("fast", 30, ["-i", sound])):
        raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", "96x64", "-r", str(rate), "-i", "-"]
        command = [
            "ffmpeg",
            "-v",
            "error",
            *raw,
            *more,
            "-c:v",
            "ffv1",
            "-c:a",
            "pcm_s16le",
            str(folder / f"{name}.mkv"),
        ]
        subprocess.run(command, input=frames.tobytes(), check=True)
    masks = numpy.zeros((22, 64, 96, 3), dtype=numpy.uint8)
    masks[:, :, 48:] = 255
    Image.fromarray(masks[0]).save(folder / "half.png")
    masks[:] = 0
    masks[:5] = 255
    numpy.save(folder / "first.npy", masks)
    return {path.stem: str(path) for path in folder.iterdir()}


def request(family: str, path: str | None, **values: Any) -> GenerationRequest:
    fields = {"num_inference_steps": 4, "strength": 0.5, "seed": 5, "init_path": path, "sampler": "flow_match_euler"}
    return GenerationRequest(**({"prompt": "a red circle"} | SIZES[family] | fields | values))


def initial_of(ours: Pipeline, asked: GenerationRequest) -> InitialLatents:
    resolved = ours.resolve(asked)
    size = ours.rules.settings(resolved).size
    return initial_latents(resolved, size, ours.rules.sampling.geometry, ours.parts.latent_encoder)


def geometry_of(ours: Pipeline) -> SoundGeometry:
    geometry = ours.rules.sampling.geometry
    assert isinstance(geometry, SoundGeometry)
    return geometry


def test_ltx_2_equals_diffusers(
    load_tiny: LoadTiny,
    tiny_folder_of: Callable[[str], Path],
    files: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their pipeline takes latents to start from with a noise level and the levels of its steps, as for its second
    stage. The sound's latents are those that test_audio_to_video.py compares."""
    ours, theirs = load_tiny("ltx2"), load_theirs(diffusers.LTX2Pipeline, tiny_folder_of("ltx2"))
    geometry, asked = geometry_of(ours), request("ltx2", files["loud"], guidance_scale=3.0, negative_prompt="a square")
    resolved = ours.resolve(asked)
    settings = ours.rules.settings(resolved)
    size, found = settings.size, ours.latents(asked)
    noise = geometry.parts(initial_noise(geometry.sample_shape(size), [5]), size)
    clean = geometry.parts(initial_of(ours, asked).clean, size)
    assert noise.audio is not None
    assert clean.audio is not None
    frames = torch.from_numpy(numpy.load(files["silent"])[:17]).float().div(127.5).sub(1).permute(3, 0, 1, 2)[None]
    vae, audio_vae = theirs.vae, theirs.audio_vae
    with torch.no_grad():
        video = vae.encode(frames).latent_dist.mode()
    draws = [noise.video.flatten(2).transpose(1, 2), noise.audio.transpose(1, 2).flatten(2)]
    monkeypatch.setattr(theirs_module, "randn_tensor", lambda *_, **__: draws.pop(0).clone())
    level = settings.build_sampler().steps(torch.device("cpu"))[0].sigma
    expected: list[torch.Tensor] = []

    def keep(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        expected[:] = [tensors["latents"].clone(), tensors["audio_latents"].clone()]
        return {}

    theirs._callback_tensor_inputs = [*diffusers.LTX2Pipeline._callback_tensor_inputs, "audio_latents"]
    theirs(
        prompt=asked.prompt,
        negative_prompt=asked.negative_prompt,
        height=64,
        width=96,
        num_frames=17,
        frame_rate=24.0,
        sigmas=[0.5, 0.25],
        noise_scale=level,
        guidance_scale=3.0,
        latents=video,
        audio_latents=clean.audio.transpose(1, 2).flatten(2) * audio_vae.latents_std + audio_vae.latents_mean,
        callback_on_step_end=keep,
        callback_on_step_end_tensor_inputs=["latents", "audio_latents"],
        output_type="latent",
        **ONE_SCALE,
    )
    mine = geometry.parts(found, size)
    assert mine.audio is not None
    packed = mine.video.flatten(2).transpose(1, 2), mine.audio.transpose(1, 2).flatten(2)
    for one, other in zip(packed, expected, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()


def velocity(latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """Of a model that is not linear in pictures and sound, each of which sees the other."""
    return torch.tanh(latents.flip(-1)) - 0.3 * latents + timestep[:, None] / 1000


def shifted(share: float, shift: float) -> float:
    return shift * share / (1 + (shift - 1) * share)


@table("sampler, mask", [("flow_match_euler", None), ("flow_match_euler", "first"), ("dpmpp_2m_sigma", "first")])
def test_minimax_h3_keeps_the_noise_levels_of_its_sound(
    load_tiny: LoadTiny,
    files: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
    mask: str | None,
) -> None:
    """The pictures are mixed at their level and the sound at its own, and so is what a mask keeps, in every step;
    Euler's steps of both, in float64."""
    ours = load_tiny("minimax_h3")
    asked = request("minimax_h3", files["loud"], sampler=sampler, mask_path=None if mask is None else files[mask])
    geometry, size = geometry_of(ours), ours.rules.settings(ours.resolve(asked)).size
    seen: list[tuple[torch.Tensor, float]] = []

    def forward(_: Any, latents: torch.Tensor, timestep: torch.Tensor, *__: Any) -> torch.Tensor:
        seen.append((latents.double(), float(timestep[0]) / 1000))
        return velocity(latents, timestep)

    monkeypatch.setattr(MiniMaxH3Transformer, "forward", forward)
    found, initial = ours.latents(asked).double(), initial_of(ours, asked)
    assert isinstance(ours.transformer, MiniMaxH3Transformer)
    shifts, shares = ours.transformer.config.shifts, (0.5, 0.25, 0.0)
    shape, clean = geometry.sample_shape(size), initial.clean.double()
    noise, made = initial_noise(shape, [5]).double(), torch.ones(1, *shape, dtype=torch.bool)
    made = made if initial.mask is None else initial.mask

    def levels(share: float) -> torch.Tensor:
        """Of each number of a sample."""
        each = geometry.parts(torch.ones(1, *shape, dtype=torch.float64), size)
        assert each.audio is not None
        return geometry.join(each.video * shifted(share, shifts[0]), each.audio * shifted(share, shifts[1]))

    x = levels(0.5) * noise + (1 - levels(0.5)) * clean
    for (given, level), share, following in zip(seen, shares[:-1], shares[1:], strict=True):
        assert level == pytest.approx(shifted(share, shifts[0]), rel=1e-6)
        mixed = levels(share) * noise + (1 - levels(share)) * clean
        if sampler == "flow_match_euler":
            assert (given - x).norm() <= 1e-5 * x.norm()
            x = x + (levels(following) - levels(share)) * velocity(x, torch.tensor([1000 * level], dtype=torch.float64))
        else:
            assert (given - mixed)[~made].norm() <= 1e-5 * mixed[~made].norm()
        x = torch.where(made, x, levels(following) * noise + (1 - levels(following)) * clean)
    if sampler == "flow_match_euler":
        assert (found - x).norm() <= 1e-5 * x.norm()
    assert torch.equal(found[~made].float(), clean[~made].float()) or (found - clean)[~made].abs().max() < 1e-5
    assert (found - clean)[made].abs().mean() > 0.1


def test_the_sound_to_start_from(load_tiny: LoadTiny, files: Mapping[str, str]) -> None:
    """The given one, the video's, or silence; one of another rate is refused."""
    for family in SIZES:
        ours = load_tiny(family)
        geometry, rate = geometry_of(ours), ours.parts.latent_encoder.sound.sample_rate  # type: ignore[union-attr]
        sounds = dict[str, torch.Tensor]()
        of_family = {"audio_path": files["sound"]} if family == "ltx2" else {}
        for name, path, values in (
            *((name, name, {}) for name in ("loud", "mute", "silent", "half")),
            *((("given", "mute", of_family),) if of_family else ()),
        ):
            asked = request(family, files[path], **values)
            resolved = ours.resolve(asked)
            size = ours.rules.settings(resolved).size
            parts = geometry.parts(initial_of(ours, asked).clean, size)
            assert parts.audio is not None
            sounds[name] = parts.audio
            source = {"loud": "that of the video", "given": "that of audio_path"}.get(
                name, "silence, as the file has none"
            )
            assert any(f"the sound starts from {source}" in each for each in ours.rules.unused(resolved))
        encoder = ours.parts.latent_encoder.sound
        assert encoder is not None
        count = encoder.num_samples(sounds["mute"].shape[2])
        for name, samples in (
            ("loud", torch.from_numpy(read_sound(files["sound"], "", count / rate, rate).samples)),
            ("mute", torch.zeros(2, count)),
        ):
            assert torch.equal(sounds[name], encoder.encode(samples))
        assert all(torch.equal(sounds["mute"], sounds[name]) for name in ("silent", "half"))
        assert not torch.equal(sounds["mute"], sounds["loud"])
        if "given" in sounds:
            assert torch.equal(sounds["given"], sounds["loud"])
        with pytest.raises(
            RequestError, match=r"init_path: .* has 30 frames per second, the clip 24.*ffmpeg -i in.mp4"
        ):
            ours.resolve(request(family, files["fast"]))


def test_minimax_h3_encodes_the_likeliest_latents(load_tiny: LoadTiny, files: Mapping[str, str]) -> None:
    """Those of diffusers' mode; a reference is a sample of theirs, rounded to float16."""
    ours = load_tiny("minimax_h3")
    folder = ours.recipe["model"]["path"]
    vae = diffusers.AutoencoderKLMiniMaxH3.from_pretrained(f"{folder}/vae")
    frames = torch.from_numpy(numpy.load(files["silent"])).float().div(255).permute(3, 0, 1, 2)[None]
    by_channel = [torch.tensor(each).view(1, -1, 1, 1, 1) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    with torch.no_grad():
        mode = vae.encode((frames - by_channel[0]) / by_channel[1]).latent_dist.mode()
    mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std))
    asked = request("minimax_h3", files["silent"])
    size = ours.rules.settings(ours.resolve(asked)).size
    found = geometry_of(ours).parts(initial_of(ours, asked).clean, size).video
    assert (found - (mode - mean) / std).norm() <= 1e-5 * found.norm()


def test_masks_of_latents_and_of_moments(load_tiny: LoadTiny) -> None:
    """Of MiniMax-H3, whose chunks of 17 frames begin with a frame alone; a moment of sound is made anew where a frame
    of its time has any white."""
    geometry = geometry_of(load_tiny("minimax_h3"))
    assert geometry.frames_of_latents(22) == (1, 4, 4, 4, 4, 1, 4)
    assert len(geometry.frames_of_latents(39)) == geometry.latent_shape(64, 96, 39)[1] == 12
    white = torch.zeros(22, 32, 32, dtype=torch.bool)
    white[17, 0, 16] = white[18, 1, 1] = True
    assert latent_mask(white, geometry)[0, 0, :, 0, 1].tolist() == [False] * 5 + [True, False]
    found = sound_mask(white, 37).flatten().tolist()
    expected = [
        any(first * 37 < (moment + 1) * 22 and moment * 22 < (first + 1) * 37 for first in (17, 18))
        for moment in range(37)
    ]
    assert found == expected
    assert 0 < sum(found) < 6


@table("family", list(SIZES))
def test_a_strength_of_1_is_noise_alone(load_tiny: LoadTiny, files: Mapping[str, str], family: str) -> None:
    ours = load_tiny(family)
    plain = dataclasses.replace(request(family, None), strength=None, num_inference_steps=2)
    full = dataclasses.replace(plain, init_path=files["loud"], strength=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ours.parts.__dict__, "latent_encoder", None)
        assert torch.equal(ours.latents(full), ours.latents(plain))


@pytest.mark.slow
def test_images_that_count_in_part_are_noised_with_the_video(load_tiny: LoadTiny, files: Mapping[str, str]) -> None:
    """LTX-2's keyframes behind the clip and its first frame; a batch is as its samples alone."""
    ours = load_tiny("ltx2")
    conditions = ((0, files["half"], 0.6), (8, files["half"], 0.8))
    asked = [
        request("ltx2", files["loud"], frame_conditions=conditions, mask_path=files["half"], seed=seed, image_crf=0)
        for seed in (5, 6)
    ]
    media = ours.generate(asked)
    assert numpy.array_equal(media[1].frames, ours(asked[1]).frames)
    assert media[0].audio is not None


@pytest.mark.slow
@table("family", list(SIZES))
def test_two_processes_equal_one(
    tiny_folder_of: Callable[[str], Path], files: Mapping[str, str], tmp_path: Path, family: str
) -> None:
    command = [
        "generate",
        "a red circle",
        "--model-path",
        tiny_folder_of(family),
        "--device",
        "cpu",
        "--strength",
        "0.5",
    ]
    command += [
        "--init-path",
        files["loud"],
        "--mask-path",
        files["half"],
        "--num-inference-steps",
        "2",
        "-o",
        "clip.npy",
    ]
    for name, value in SIZES[family].items():
        command += [f"--{name.replace('_', '-')}", value]
    made = {}
    for name, several in (("one", ()), ("two", ("--num-gpus", "2", "--ulysses-degree", "2"))):
        result = start(tmp_path / name, *map(str, command), *several).finish()
        assert result.code == 0, result.err
        made[name] = numpy.load(tmp_path / name / "clip.npy")
    assert abs(made["one"].astype(int) - made["two"].astype(int)).max() <= 1
