"""FLUX.1 Kontext against diffusers' FluxKontextPipeline on tiny weights: the same transformer, with the tokens of an
image beside those of the noise."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import diffusers.pipelines.flux.pipeline_flux_kontext as theirs_module
import numpy
import pytest
import torch
from diffusers import FluxKontextPipeline, FluxTransformer2DModel
from diffusers.image_processor import VaeImageProcessor
from family_parity import assert_equal_runs, load_theirs, load_transformer, record_latents, relative
from graphed_forwards import run_request
from PIL import Image
from recorded_capture import RecordedCapture
from tiny_flux1 import MAX_TEXT_TOKENS, TINY_SIZES, write_tiny_flux1

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.errors import RequestError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.flux1 import editing
from diffusion_runtime.models.flux1.family import FAMILY
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.text_encoders.interface import Conditions

PROMPTS = ("a red circle moving left", "two objects: a blue star, and a green ring.")
# Widths and heights of tiny pictures, in place of a megapixel.
SIZES = ((16, 32), (24, 24), (32, 16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_flux1(tmp_path_factory.mktemp("models") / "kontext", pipeline_class="FluxKontextPipeline")


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Wide: of another ratio than what is made."""
    rows, columns = numpy.mgrid[0:30, 0:64]
    pixels = numpy.stack([8 * rows, 3 * columns, 255 - rows], axis=-1).astype(numpy.uint8)
    path = tmp_path_factory.mktemp("pictures") / "wide.png"
    Image.fromarray(pixels).save(path)
    return str(path)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs_module, "PREFERRED_KONTEXT_RESOLUTIONS", list(SIZES))
    monkeypatch.setattr(editing, "TRAINED_SIZES", SIZES)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    return record_latents(monkeypatch)


def request(**values: Any) -> GenerationRequest:
    return GenerationRequest(**{"prompt": PROMPTS[0], **TINY_SIZES, "seed": 5, "num_inference_steps": 3, **values})


def load(folder: Path, **how: Any) -> Pipeline:
    pipeline = load_pipeline(str(folder), device="cpu", **how)
    assert isinstance(pipeline, Pipeline)
    return pipeline


def compare(folder: Path, requests: list[GenerationRequest], kept: list[torch.Tensor]) -> None:
    theirs = load_theirs(FluxKontextPipeline, folder)

    def run_theirs(resolved: list[GenerationRequest], noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
        first, latents = resolved[0], []
        batch, channels, _, height, width = noise.shape

        def keep(_: Any, __: int, ___: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            unpacked = theirs._unpack_latents(values["latents"], height, width, vae_scale_factor=1)
            latents.append(unpacked[:, :, None])
            return {}

        images = theirs(
            image=None if first.image_path is None else Image.open(first.image_path),
            prompt=[each.prompt for each in resolved],
            negative_prompt=[each.negative_prompt for each in resolved],
            true_cfg_scale=first.true_cfg_scale or 1.0,
            height=first.height,
            width=first.width,
            max_area=first.height * first.width,
            num_inference_steps=first.num_inference_steps,
            guidance_scale=first.guidance_scale,
            latents=theirs._pack_latents(noise[:, :, 0], batch, channels, height, width),
            max_sequence_length=MAX_TEXT_TOKENS,
            callback_on_step_end=keep,
            output_type="np",
        ).images
        return latents, images[:, None]

    assert_equal_runs(load(folder), requests, kept, run_theirs)


def test_a_generation_equals_diffusers(folder: Path, picture: str, kept: list[torch.Tensor]) -> None:
    """A batch with guidance of two branches; one image; none."""
    guided = {"negative_prompt": "a yellow square", "true_cfg_scale": 3.0, "image_path": picture}
    pairs = zip(PROMPTS, (5, 6), strict=True)
    compare(folder, [request(prompt=prompt, seed=seed, **guided) for prompt, seed in pairs], kept)
    compare(folder, [request(image_path=picture, height=32, width=16)], kept)
    compare(folder, [request()], kept)


def test_a_forward_pass_equals_diffusers(folder: Path) -> None:
    ours = load_transformer(FAMILY, folder)
    theirs = FluxTransformer2DModel.from_pretrained(folder / "transformer").eval()
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(2, *shape, generator=generator)

    def packed(latents: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        _, channels, _, height, width = latents.shape
        ids = FluxKontextPipeline._prepare_latent_image_ids(2, height // 2, width // 2, "cpu", torch.float32)
        ids[:, 0] = first
        return FluxKontextPipeline._pack_latents(latents[:, :, 0], 2, channels, height, width), ids

    latents, reference = random(4, 1, 8, 12), random(4, 1, 16, 4)
    text, pooled, timestep = random(7, 32), random(32), torch.tensor([937.3, 12.0])
    conditions = Conditions.of(text, pooled=pooled)
    inputs = DenoiserInputs(conditions, ClipSize(16, 24, 1, 1), 2.5, ImageCondition(reference))
    before = reference.clone()
    found = ours(latents, timestep, inputs, AttentionContext())
    (tokens, ids), (further, further_ids) = packed(latents, 0), packed(reference, 1)
    with torch.no_grad():
        velocity = theirs(
            hidden_states=torch.cat([tokens, further], dim=1),
            timestep=timestep / 1000,
            guidance=torch.full((2,), 2.5),
            pooled_projections=pooled,
            encoder_hidden_states=text,
            txt_ids=torch.zeros(7, 3),
            img_ids=torch.cat([ids, further_ids]),
        ).sample[:, : tokens.shape[1]]
    expected = FluxKontextPipeline._unpack_latents(velocity, 8, 12, vae_scale_factor=1)[:, :, None]
    assert relative(found, expected) < 1e-5
    assert torch.equal(reference, before)


def test_the_size_of_the_picture_is_the_trained_one_of_the_nearest_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    known = theirs_module.PREFERRED_KONTEXT_RESOLUTIONS
    assert list(editing.TRAINED_SIZES) == known
    # Every size, and not those of whole tokens alone: diffusers takes the ratio after rounding down.
    processor = VaeImageProcessor(vae_scale_factor=16)
    sides = range(16, 2600, 41)
    wrong = []
    for height, width in ((631, 996), *itertools.product(sides, sides)):
        whole_height, whole_width = processor.get_default_height_width(numpy.empty((1, height, width)))
        _, columns, rows = min((abs(whole_width / whole_height - w / h), w, h) for w, h in known)
        if editing.trained_size((height, width)) != (rows, columns):
            wrong.append((height, width))
    assert wrong == []
    assert editing.trained_size((631, 996)) == (800, 1328)
    # Thinner than a token, where diffusers divides by zero.
    assert editing.trained_size((9, 900)) == (672, 1568)


def test_the_image_matters_and_is_embedded_once(
    folder: Path, picture: str, kept: list[torch.Tensor], tmp_path: Path
) -> None:
    ours, calls = load(folder), []
    ours.transformer.patch_embedding.register_forward_hook(lambda *_: calls.append(1))
    media = ours(request(image_path=picture))
    assert len(calls) == 3 + 1
    assert media.recipe["inputs"]["image_path"]
    (encoder,) = [part for part in media.attention_report.libraries if part.component == "vae encoder"]
    assert (encoder.library, encoder.implementation) == ("diffusers", "AutoencoderKL's encoder")
    other = tmp_path / "other.png"
    Image.open(picture).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(other)
    one = kept[-1]
    for changed in (str(other), None):
        ours(request(image_path=changed))
        assert (kept[-1] - one).norm() > 1e-3 * one.norm()


def test_everything_runs_beside_an_image(folder: Path, picture: str) -> None:
    """Step caches that leave nothing out, sparse attention that keeps everything, quantised blocks."""
    plain, asked = load(folder), request(image_path=picture, num_inference_steps=5)
    expected = plain(asked)
    for cache in ("easycache:threshold=0,force=true", "dbcache:F=1,R=0,W=0,force=true"):
        assert numpy.array_equal(plain(dataclasses.replace(asked, step_cache=cache)).frames, expected.frames)
    sparse = load(folder, attention={"backend": "video_sparse_attn", "extra": {"sparsity": 0.0}})(asked)
    assert numpy.abs(sparse.frames.astype(int) - expected.frames.astype(int)).max() <= 1
    assert {row.backend for row in sparse.attention_report.rows} == {"video_sparse_attn"}
    assert numpy.isfinite(load(folder, quantization="fp8-all")(asked).frames).all()


def test_another_image_of_the_same_size_is_another_replay_of_one_graph(folder: Path) -> None:
    model, graphs, outcomes = load_transformer(FAMILY, folder), ForwardGraphs(RecordedCapture()), []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        conditions = Conditions.of(
            torch.randn(1, 5, 32, generator=generator), pooled=torch.randn(1, 32, generator=generator)
        )
        image = ImageCondition(torch.randn(1, 4, 1, 4, 6, generator=generator))
        inputs = DenoiserInputs(conditions, ClipSize(16, 24, 1, 1), 2.5, image)
        found, report = run_request(model, inputs, graphs, sample_shape=(1, 4, 1, 8, 12))
        expected, _ = run_request(model, inputs, None, sample_shape=(1, 4, 1, 8, 12))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert report.graphs is not None
        outcomes.append((report.graphs.num_replayed, report.graphs.num_graphs))
    assert outcomes == [(2, 1), (4, 1)]


def test_what_cannot_be_edited_is_said_before_the_weights_load(folder: Path, picture: str, tmp_path: Path) -> None:
    rules = inspect_pipeline(RuntimeConfig(str(folder), device="cpu")).rules
    for given, told in (
        ({"image_path": (picture, picture)}, "image_path: expected one image, got 2: .*; leave all but one out"),
        ({"image_path": str(tmp_path / "none.png")}, "image_path: .*none.png: no such file"),
        ({"last_image_path": picture}, "last_image_path: this model takes no image to end with"),
        ({"image_path": picture, "progressive_resolution": "dct"}, "progressive_resolution: an image to edit has one"),
    ):
        with pytest.raises(RequestError, match=told):
            rules.resolve(request(**given))
    assert rules.resolve(request(image_path=[picture])).image_path == picture
    # As in diffusers, what is made has the model's size and not the image's.
    defaults = rules.resolve(GenerationRequest("make it night", image_path=picture))
    assert (defaults.height, defaults.width, defaults.num_inference_steps) == (1024, 1024, 30)
    assert defaults.guidance_scale == 2.5
