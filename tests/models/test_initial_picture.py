"""Image to image, video to video and inpainting by strength: against diffusers' pipelines, and what holds of every
family and every sampler."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from family_parity import load_theirs
from PIL import Image
from tables import table
from tiny_families import WRITERS, makes_videos, small_request
from tiny_flux1 import MAX_TEXT_TOKENS
from tiny_models import write_tiny_wan

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.denoising.initial_latents import InitialLatents
from diffusion_runtime.errors import RequestError
from diffusion_runtime.generation.initial_picture import initial_latents, latent_mask
from diffusion_runtime.loading import prepare
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.request.strength import steps_that_run

PLAIN_WAN = "wan with a plain vae"
LoadTiny = Callable[[str], Pipeline]
# They restore a video or move a character: from noise alone.
FROM_NOISE_ALONE = ("seedvr2", "wan_animate_2", "scail_2")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """A picture and a video of 64 x 64, and a mask whose white is the right half."""
    folder = tmp_path_factory.mktemp("initial")
    frames = numpy.random.default_rng(0).integers(0, 256, (22, 8, 8, 3), dtype=numpy.uint8).repeat(8, 1).repeat(8, 2)
    mask = numpy.zeros((64, 64), dtype=numpy.uint8)
    mask[:, 32:] = 255
    Image.fromarray(frames[0]).save(folder / "picture.png")
    numpy.save(folder / "video.npy", frames)
    Image.fromarray(mask).save(folder / "mask.png")
    return {
        name: str(folder / file)
        for name, file in zip(("picture", "video", "mask"), ("picture.png", "video.npy", "mask.png"), strict=True)
    }


@pytest.fixture(scope="module")
def load_tiny(folder_of: Callable[[str], Path]) -> LoadTiny:
    return functools.cache(lambda family: load_pipeline(str(folder_of(family)), device="cpu"))


@pytest.fixture(scope="module")
def folder_of(tiny_folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folders of the families, and a Wan of whose autoencoder diffusers' video to video knows the sizes."""
    plain = functools.cache(lambda: write_tiny_wan(tmp_path_factory.mktemp("wan") / "plain", vae="plain"))
    return lambda name: plain() if name == PLAIN_WAN else tiny_folder_of(name)


@dataclass(frozen=True)
class Theirs:
    """A family and diffusers' pipelines of it: from a picture or video alone, and with a mask. base: the one that the
    folder names. values: of the call. shape: their latents -> [1, channels, frames, height, width] of our shape."""

    family: str
    base: str
    whole: str = ""
    masked: str = ""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shape: Callable[[Any, torch.Tensor], torch.Tensor] = lambda _, latents: latents[:, :, None]


def _unpacked(pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
    unpacked: torch.Tensor = pipeline._unpack_latents(latents, 64, 64, pipeline.vae_scale_factor)
    return unpacked if unpacked.ndim == 5 else unpacked[:, :, None]


PIPELINES = (
    Theirs(
        "flux1", "FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline",
        {"max_sequence_length": MAX_TEXT_TOKENS}, _unpacked,
    ),
    Theirs(
        "qwen_image", "QwenImagePipeline", "QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline",
        {"true_cfg_scale": 2.0}, _unpacked,
    ),
    Theirs("z_image", "ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline"),
    Theirs(PLAIN_WAN, "WanPipeline", "WanVideoToVideoPipeline", shape=lambda _, latents: latents),
)  # fmt: skip


@table(
    "theirs, has_mask, strength",
    [
        (each, has_mask, strength)
        for each in PIPELINES
        for has_mask, strength in ((False, 0.5), (True, 0.5), (True, 1.0))
        if each.masked or not has_mask
    ],
)
def test_strength_equals_that_of_diffusers(
    load_tiny: LoadTiny,
    folder_of: Callable[[str], Path],
    files: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
    theirs: Theirs,
    has_mask: bool,
    strength: float,
) -> None:
    ours = load_tiny(theirs.family)
    # Our latents are the most likely ones, of which diffusers' pipelines draw a sample.
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    given = {"init_path": files["video" if makes_videos(ours) else "picture"]}
    given |= {"mask_path": files["mask"]} if has_mask else {}
    request = dataclasses.replace(
        small_request(ours, 4), strength=strength, guidance_scale=2.0, negative_prompt="a yellow square", **given
    )
    base = _base(theirs.base, folder_of(theirs.family))
    made_by = getattr(diffusers, theirs.masked if has_mask else theirs.whole)
    taken = inspect.signature(made_by.__init__).parameters
    other = made_by(**{name: part for name, part in base.components.items() if name in taken})
    other.set_progress_bar_config(disable=True)
    resolved = ours.resolve(request)
    pictures = [Image.fromarray(frame) for frame in numpy.load(files["video"])]
    arguments: dict[str, Any] = (
        {"video": pictures[: resolved.num_frames]} if makes_videos(ours) else {"image": Image.open(files["picture"])}
    )
    arguments |= {"mask_image": Image.open(files["mask"])} if has_mask else {}
    made = other(
        prompt=request.prompt,
        **({} if theirs.family == "flux1" else {"negative_prompt": request.negative_prompt}),
        height=64,
        width=64,
        strength=strength,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="latent",
        **{"guidance_scale": 2.0, "max_sequence_length": ours.text_encoder.max_tokens, **arguments, **theirs.values},
    )
    expected = theirs.shape(other, made.frames if makes_videos(ours) else made.images)
    found = ours.latents(resolved)
    assert found.shape == expected.shape
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@functools.cache
def _base(name: str, folder: Path) -> Any:
    return load_theirs(getattr(diffusers, name), folder)


# One of each autoencoder's class; the others have the same, or are above.
ENCODERS = ("flux2", "hunyuan_video", "hunyuan_video_15", "ltx2", "ltx_video", "minimax_h3", "qwen_image_21", "wan")
OTHERS = sorted(set(WRITERS) - {*ENCODERS, *FROM_NOISE_ALONE})


def check_family(family: str, ours: Pipeline, files: Mapping[str, str]) -> None:
    """What a mask leaves is kept to the bit, and the rest is made anew."""
    request = dataclasses.replace(small_request(ours), init_path=files["video"], mask_path=files["mask"], strength=0.5)
    resolved = ours.resolve(request)
    settings = ours.rules.settings(resolved)
    initial = initial_latents(resolved, settings.size, ours.rules.sampling.geometry, ours.parts.latent_encoder)
    assert initial.mask is not None
    found = ours.latents(resolved)
    kept, made = ~initial.mask.expand_as(found), initial.mask.expand_as(found)
    # MiniMax-H3 carries its sound times another number.
    torch.testing.assert_close(found[kept], initial.clean[kept], rtol=1e-6 if family == "minimax_h3" else 0, atol=0)
    assert (found - initial.clean)[made].abs().mean() > 0.01


def test_a_preview_keeps_what_a_mask_leaves(load_tiny: LoadTiny, files: Mapping[str, str]) -> None:
    ours = load_tiny("wan")
    given = {"init_path": files["video"], "mask_path": files["mask"], "num_inference_steps": 4}
    resolved = ours.resolve(dataclasses.replace(small_request(ours), stop_after_step=2, strength=1.0, **given))
    settings = ours.rules.settings(resolved)
    initial = initial_latents(resolved, settings.size, ours.rules.sampling.geometry, ours.parts.latent_encoder)
    assert initial.mask is not None
    found = ours.latents(resolved)
    kept = ~initial.mask.expand_as(found)
    assert torch.equal(found[kept], initial.clean[kept])
    assert (found - initial.clean)[~kept].abs().mean() > 0.01


@table("family", ENCODERS)
def test_a_family_of_every_autoencoder(load_tiny: LoadTiny, files: Mapping[str, str], family: str) -> None:
    check_family(family, load_tiny(family), files)


@pytest.mark.slow
@table("family", OTHERS)
def test_the_other_families(load_tiny: LoadTiny, files: Mapping[str, str], family: str) -> None:
    check_family(family, load_tiny(family), files)


def test_some_families_start_from_noise_alone(tiny_folder_of: Callable[[str], Path], files: Mapping[str, str]) -> None:
    for name in FROM_NOISE_ALONE:
        assert family_for_folder(tiny_folder_of(name)).decoding.load_encoder is None
    rules = prepare(RuntimeConfig(str(tiny_folder_of("wan_animate_2")), device="cpu")).rules
    given = GenerationRequest("a star", image_path=files["picture"], video_path=files["video"])
    # The second is refused before a picture is asked for.
    for values in ({"init_path": files["video"]}, {"strength": 0.5}):
        with pytest.raises(RequestError, match=f"{next(iter(values))}: this model starts from noise alone, beside the"):
            rules.resolve(dataclasses.replace(given, **values))


@pytest.fixture(scope="module")
def shapes() -> Pipeline:
    return load_pipeline("shapes", device="cpu")


def request_of(**values: Any) -> GenerationRequest:
    sizes = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 4}
    return GenerationRequest("a red circle", **{**sizes, "seed": 3, **values})


def test_a_strength_of_1_is_noise_alone(load_tiny: LoadTiny, files: Mapping[str, str]) -> None:
    """To the bit, and no encoder is loaded; of a sampler whose first level is below 1 as well."""
    ours = load_tiny("wan")
    for sampler in ("unipc", "dpmpp_2m", "rcm"):
        plain = dataclasses.replace(small_request(ours), sampler=sampler)
        full = dataclasses.replace(plain, init_path=files["video"], strength=1.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ours.parts.__dict__, "latent_encoder", None)
            assert torch.equal(ours.latents(full), ours.latents(plain))


@table(
    "num_steps, strength, expected",
    # As diffusers' FluxImg2Img counts them, with its rounding.
    [(10, 0.6, 6), (10, 0.61, 7), (10, 0.7, 7), (100, 0.29, 29), (3, 0.01, 1), (4, 1.0, 4), (4, 0.0, 0)],
)
def test_the_steps_that_run(num_steps: int, strength: float, expected: int) -> None:
    request = GenerationRequest("a star", init_path="a.png", strength=strength, num_inference_steps=num_steps)
    assert steps_that_run(request) == expected


def test_what_a_request_says(shapes: Pipeline, files: Mapping[str, str], tmp_path: Path) -> None:
    """The default strength; the size of the picture; levels of its own; the steps that run, in words."""
    rules, wide = shapes.rules, str(tmp_path / "wide.png")
    Image.new("RGB", (200, 100)).save(wide)
    resolved = rules.resolve(request_of(init_path=wide, height=None, width=None, num_inference_steps=10))
    assert (resolved.strength, (resolved.width or 0) / (resolved.height or 1)) == (0.6, pytest.approx(2, rel=0.1))
    assert rules.settings(resolved).num_steps == 6
    # As was asked for: a note, no warning.
    assert "init_path: strength 0.6: 6 of 10 steps run, from a noise level of" in (rules.sampling_note(resolved) or "")
    assert not any("steps run" in each for each in rules.unused(resolved))
    levels = rules.resolve(
        request_of(init_path=files["picture"], sigmas=(0.5, 0.25), num_inference_steps=None, sampler="flow_match_euler")
    )
    assert levels.strength is None
    (first, _) = rules.settings(levels).build_sampler().steps(torch.device("cpu"))
    assert first.sigma == 0.5
    initial = InitialLatents(torch.zeros(1))
    assert torch.equal(initial.noised(torch.ones(1), 0.5), torch.full((1,), 0.5))
    unused = rules.unused(rules.resolve(request_of(init_path=files["picture"], strength=1.0)))
    assert any("strength 1 begins with noise: it is not used" in each for each in unused)
    whole = rules.resolve(request_of(init_path=files["picture"], strength=1.0))
    assert "steps run" not in (rules.sampling_note(whole) or "")
    few = rules.resolve(request_of(init_path=files["picture"], strength=0.8, num_inference_steps=4))
    told = "init_path: strength 0.8 begins with noise, as 4 steps are few (give 0.75 or less): it is not used"
    assert told in rules.unused(few)
    assert rules.settings(rules.resolve(dataclasses.replace(few, strength=0.75))).num_steps == 3


@table(
    "values, message",
    [
        ({"init_path": None}, "strength: it says how much of a picture or a video"),
        ({"init_path": None, "strength": None, "mask_path": "mask"}, "mask_path: a mask says what of a picture"),
        ({"strength": 0.0}, "strength: with 0 none of 4 steps runs"),
        ({"num_frames": 29}, "init_path: .* has 22 frames, the clip 29; give a longer one, or --num-frames 21"),
        ({"width": 128}, "init_path: .* the ratio of the sides"),
        (
            {"progressive_resolution": "dct:delta=0.05"},
            "progressive_resolution: its first steps are of smaller",
        ),
        ({"mask_path": "black"}, "mask_path: .* is black"),
        ({"expert": "low_noise"}, "expert: this model has one expert"),
    ],
)
def test_what_is_refused(
    shapes: Pipeline, files: Mapping[str, str], tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    Image.new("L", (64, 64)).save(tmp_path / "black.png")
    named = {**files, "black": str(tmp_path / "black.png")}
    values = {key: named.get(value, value) if key == "mask_path" else value for key, value in values.items()}
    with pytest.raises(RequestError, match=message):
        shapes.resolve(request_of(**{"init_path": files["video"], "strength": 0.5, **values}))


def test_a_mask_of_latents(shapes: Pipeline) -> None:
    """A latent frame is made anew where any of its frames is white, at the first pixel of a latent's square."""
    geometry = shapes.rules.sampling.geometry
    side, factor = geometry.spatial_factor, geometry.temporal_factor
    white = torch.zeros(1 + factor, 2 * side, 2 * side, dtype=torch.bool)
    white[2, 0, side] = white[0, 1, 0] = True
    assert latent_mask(white, geometry)[0, 0].tolist() == [[[False] * 2] * 2, [[False, True], [False, False]]]
