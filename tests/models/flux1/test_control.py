"""FLUX.1 Fill, Canny and Depth against diffusers' FluxFillPipeline and FluxControlPipeline on tiny weights: an image,
or its masked part and the mask, beside the latents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import FluxControlPipeline, FluxFillPipeline, FluxTransformer2DModel
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from family_parity import assert_equal_runs, load_theirs, load_transformer, record_latents, relative
from PIL import Image
from safetensors.torch import save_file
from tiny_flux1 import CHANNELS, MAX_TEXT_TOKENS, TINY_SIZES, write_tiny_flux1

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext
from diffusion_runtime.benchmark.step_model import open_step_model, with_size
from diffusion_runtime.errors import RequestError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.flux1.control import size_made
from diffusion_runtime.models.flux1.family import FAMILY

# Of the tiny autoencoder, 2 x 2 pixels a latent.
MASK_CHANNELS = 4


@pytest.fixture(scope="module")
def fill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "fill"
    return write_tiny_flux1(folder, pipeline_class="FluxFillPipeline", condition_channels=CHANNELS + MASK_CHANNELS)


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "control"
    return write_tiny_flux1(folder, pipeline_class="FluxControlPipeline", condition_channels=CHANNELS)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An image of the ratio of what is made, and a mask of it with greys at its edge."""
    folder = tmp_path_factory.mktemp("pictures")
    rows, columns = numpy.mgrid[0:40, 0:60]
    image = numpy.stack([6 * rows, 4 * columns, 255 - 2 * rows - 2 * columns], axis=-1).astype(numpy.uint8)
    mask = numpy.clip(40 * (columns - 20), 0, 255).astype(numpy.uint8)
    parts = {"image": image, "mask": mask, "black": 0 * mask, "small": mask[::2, ::2]}
    for name, pixels in parts.items():
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return {name: str(folder / f"{name}.png") for name in parts}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    # What is computed here is the mode of the encoder's distribution.
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda given, generator=None: given.mode())
    return record_latents(monkeypatch)


def asked(pictures: dict[str, str], *, masks: bool, **values: Any) -> GenerationRequest:
    paths = {"image_path": pictures["image"], **({"mask_path": pictures["mask"]} if masks else {})}
    fields = {"prompt": "a red circle", **TINY_SIZES, "seed": 5, "num_inference_steps": 3, **paths}
    return GenerationRequest(**{**fields, **values})


def load(folder: Path) -> Pipeline:
    pipeline = load_pipeline(str(folder), device="cpu")
    assert isinstance(pipeline, Pipeline)
    return pipeline


@pytest.mark.parametrize("name", ["fill", "control"])
def test_a_generation_equals_diffusers(
    name: str, request: pytest.FixtureRequest, pictures: dict[str, str], kept: list[torch.Tensor]
) -> None:
    folder = request.getfixturevalue(name)
    theirs = load_theirs(FluxFillPipeline if name == "fill" else FluxControlPipeline, folder)
    image, mask = (Image.open(pictures[each]).copy() for each in ("image", "mask"))
    given = {"image": image, "mask_image": mask} if name == "fill" else {"control_image": image}

    def run_theirs(resolved: list[GenerationRequest], noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
        first, latents = resolved[0], []
        batch, channels, _, height, width = noise.shape

        def keep(_: Any, __: int, ___: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            latents.append(theirs._unpack_latents(values["latents"], height, width, vae_scale_factor=1)[:, :, None])
            return {}

        images = theirs(
            **given,
            prompt=[each.prompt for each in resolved],
            height=first.height,
            width=first.width,
            num_inference_steps=first.num_inference_steps,
            guidance_scale=first.guidance_scale,
            latents=theirs._pack_latents(noise[:, :, 0], batch, channels, height, width),
            max_sequence_length=MAX_TEXT_TOKENS,
            callback_on_step_end=keep,
            output_type="np",
        ).images
        return latents, images[:, None]

    masks = name == "fill"
    wanted = [asked(pictures, masks=masks, prompt=prompt, seed=seed) for prompt, seed in (("a", 5), ("b", 6))]
    assert_equal_runs(load(folder), wanted, kept, run_theirs)


@pytest.mark.parametrize("name", ["fill", "control"])
def test_a_timed_step_equals_diffusers(name: str, request: pytest.FixtureRequest) -> None:
    """A forward pass on random conditions."""
    folder = request.getfixturevalue(name)
    opened = with_size(open_step_model(str(folder)), **TINY_SIZES, num_frames=None, batch=2)
    assert opened.num_images == 0
    given = opened.inputs(torch.device("cpu"), torch.float32)
    theirs = FluxTransformer2DModel.from_pretrained(folder / "transformer").eval()
    found = load_transformer(FAMILY, folder)(*given.ours, AttentionContext())
    with torch.no_grad():
        expected = given.theirs_to_velocity(theirs(**given.theirs))
    assert relative(found, expected) < 1e-5


def test_the_mask_and_the_image_matter(
    fill: Path, pictures: dict[str, str], kept: list[torch.Tensor], tmp_path: Path
) -> None:
    ours, found = load(fill), []
    for name in ("image", "mask"):
        Image.open(pictures[name]).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / f"{name}.png")
    for changed in ({}, {"image_path": str(tmp_path / "image.png")}, {"mask_path": str(tmp_path / "mask.png")}):
        media = ours(asked(pictures, masks=True, **changed))
        found.append(kept[-1])
    assert set(media.recipe["inputs"]) == {"image_path", "mask_path"}
    for other in found[1:]:
        assert (other - found[0]).norm() > 1e-3 * found[0].norm()
    guided = asked(
        pictures, masks=True, true_cfg_scale=3.0, negative_prompt="a star", step_cache="easycache:force=true"
    )
    assert numpy.isfinite(ours(guided).frames).all()


def test_a_lora_of_another_flux_says_what_did_not_apply(fill: Path, pictures: dict[str, str], tmp_path: Path) -> None:
    """One of FLUX.1 [dev], whose image embedding has other inputs."""
    names = {"x_embedder": 4 * CHANNELS, "transformer_blocks.0.attn.to_q": 32}
    path, tensors = tmp_path / "dev.safetensors", {}
    for name, width in names.items():
        tensors[f"transformer.{name}.lora_A.weight"] = torch.ones(2, width)
        tensors[f"transformer.{name}.lora_B.weight"] = torch.ones(32, 2)
    save_file(tensors, path)
    rules = inspect_pipeline(RuntimeConfig(str(fill), device="cpu", lora=(str(path),))).rules
    remarks = rules.unused(rules.resolve(asked(pictures, masks=True)))
    assert any("the image embedding of a model with other inputs" in remark for remark in remarks), remarks


def test_what_is_made_is_as_large_as_the_image(fill: Path, pictures: dict[str, str]) -> None:
    rules = inspect_pipeline(RuntimeConfig(str(fill), device="cpu")).rules
    resolved = rules.resolve(asked(pictures, masks=True, height=None, width=None, num_inference_steps=None))
    assert (resolved.height, resolved.width) == (32, 48)
    assert (resolved.num_inference_steps, resolved.guidance_scale) == (50, 30.0)
    for size, made in (((1632, 1232), (1632, 1232)), ((3000, 4000), (1248, 1664)), ((700, 5), (688, 16))):
        assert size_made(size) == made


def test_what_cannot_be_made_is_said_before_the_weights_load(
    fill: Path, control: Path, pictures: dict[str, str], tmp_path: Path
) -> None:
    of_fill, of_control = (
        inspect_pipeline(RuntimeConfig(str(folder), device="cpu")).rules for folder in (fill, control)
    )
    Image.open(pictures["mask"]).convert("LA").point(lambda x: x // 2).save(tmp_path / "alpha.png")
    for rules, masks, given, told in (
        (of_fill, False, {}, "mask_path: this model repaints a part of an image; give its mask.*--mask-path FILE"),
        (of_fill, True, {"image_path": None}, "image_path: this model makes images from an image; give one"),
        (of_fill, True, {"image_path": (pictures["image"],) * 2}, "image_path: expected one image, got 2"),
        (
            of_fill,
            True,
            {"mask_path": pictures["small"]},
            "small.png is 30 x 20 .*and its image .* 60 x 40; expected a",
        ),
        (of_fill, True, {"mask_path": pictures["black"]}, "black.png is black, so that nothing would be repainted"),
        (of_fill, True, {"mask_path": str(tmp_path / "alpha.png")}, "mask_path: .*alpha.png has transparent parts"),
        (of_fill, True, {"mask_path": str(tmp_path / "none.png")}, "mask_path: .*none.png: no such file"),
        (of_fill, True, {"height": 64}, "image_path: .* is 60 x 40 .*ratio of the sides must agree"),
        (of_control, True, {}, "mask_path: a mask says what of a picture or a video is made anew; give that"),
        (of_control, False, {"image_path": None}, "image_path: this model makes images from an image; give one"),
    ):
        with pytest.raises(RequestError, match=told):
            rules.resolve(asked(pictures, masks=masks, **given))
