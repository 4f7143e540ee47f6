"""FLUX.2 with reference images against diffusers' Flux2Pipeline and Flux2KleinPipeline on tiny weights."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import Flux2KleinKVPipeline, Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from family_parity import assert_equal_runs, load_theirs, load_transformer, record_latents, relative
from PIL import Image
from recorded_capture import RecordedCapture
from safetensors.torch import load_file, save_file
from tiny_flux2 import CHANNELS, TEXT_DIM, TINY_SIZES, write_tiny_flux2_klein

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext, StepInfo
from diffusion_runtime.benchmark.step_model import open_step_model, with_size
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.denoising.cuda_graphs.captured_forward import ForwardPass
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.errors import ConfigError, RequestError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.flux2 import editing
from diffusion_runtime.models.flux2.family import FAMILY
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.text_encoders.interface import Conditions

# The middle 64 x 84 and 76 x 64 pixels of them are whole tokens.
SIZES = {"wide": (65, 86), "tall": (78, 67)}


def lively(folder: Path, copy: Path) -> Path:
    """A copy whose transformer attends: as initialised, images hardly change what is made."""
    path = shutil.copytree(folder, copy) / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    save_file({name: x * 2 if x.dim() == 2 else x for name, x in tensors.items()}, path, {"format": "pt"})
    return copy


@pytest.fixture(scope="module")
def dev(tiny_flux2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively(tiny_flux2_folder, tmp_path_factory.mktemp("models") / "dev")


@pytest.fixture(scope="module")
def klein(tiny_klein_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively(tiny_klein_folder, tmp_path_factory.mktemp("models") / "klein")


@pytest.fixture(scope="module")
def klein_kv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return lively(write_tiny_flux2_klein(folder / "as written", caches_references=True), folder / "klein-kv")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    return record_latents(monkeypatch)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pictures")
    for name, (height, width) in SIZES.items():
        rows, columns = numpy.mgrid[0:height, 0:width]
        pixels = numpy.stack([3 * rows, 2 * columns, 255 - rows - columns], axis=-1).astype(numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return {name: str(folder / f"{name}.png") for name in SIZES}


def request(**values: Any) -> GenerationRequest:
    fields = {"prompt": "a red circle moving left", **TINY_SIZES, "seed": 5, "num_inference_steps": 3}
    return GenerationRequest(**{**fields, **values})


def load(folder: Path, **how: Any) -> Pipeline:
    pipeline = load_pipeline(str(folder), device="cpu", **how)
    assert isinstance(pipeline, Pipeline)
    return pipeline


def compare(ours: Pipeline, theirs: Any, wanted: list[GenerationRequest], kept: list[torch.Tensor]) -> None:
    asked = wanted[0]
    paths = [asked.image_path] if isinstance(asked.image_path, str) else list(asked.image_path or ())

    def run_theirs(resolved: list[GenerationRequest], noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
        latents: list[torch.Tensor] = []
        rows, columns = noise.shape[-2:]

        def keep(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            latents.append(tensors["latents"].transpose(1, 2).unflatten(2, (1, rows, columns)).clone())
            return {}

        guidance = {} if isinstance(theirs, Flux2KleinKVPipeline) else {"guidance_scale": resolved[0].guidance_scale}
        images = theirs(
            image=[Image.open(path) for path in paths] or None,
            prompt=[item.prompt for item in resolved],
            # As the request says them: what is left out follows from the images on both sides.
            height=asked.height,
            width=asked.width,
            num_inference_steps=resolved[0].num_inference_steps,
            **guidance,
            latents=noise.squeeze(2).clone(),
            callback_on_step_end=keep,
            output_type="np",
        ).images
        return latents, images[:, None]

    assert_equal_runs(ours, wanted, kept, run_theirs)


def test_generations_of_dev_equal_those_of_diffusers(
    dev: Path, pictures: dict[str, str], kept: list[torch.Tensor]
) -> None:
    """Two images; a batch; the size of the first image where the request says none."""
    ours, theirs = load(dev), load_theirs(Flux2Pipeline, dev)
    both = (pictures["wide"], pictures["tall"])
    compare(ours, theirs, [request(image_path=both), request(prompt="a star", seed=6, image_path=both)], kept)
    compare(ours, theirs, [request(image_path=both[::-1], height=None, width=None)], kept)
    resolved = ours.resolve(request(image_path=both[::-1], height=None, width=None))
    assert (resolved.height, resolved.width) == (76, 64)


def test_generations_of_klein_equal_those_of_diffusers(
    klein: Path, pictures: dict[str, str], kept: list[torch.Tensor]
) -> None:
    """With two branches of guidance, both of which see the images."""
    ours, theirs = load(klein), load_theirs(Flux2KleinPipeline, klein)
    compare(ours, theirs, [request(image_path=pictures["wide"], guidance_scale=4.0)], kept)


def test_generations_with_cached_references_equal_those_of_diffusers(
    klein_kv: Path, pictures: dict[str, str], kept: list[torch.Tensor]
) -> None:
    """Two images, a batch; without images, too. The references go through the blocks once."""
    ours, theirs = load(klein_kv), load_theirs(Flux2KleinKVPipeline, klein_kv)
    both = (pictures["wide"], pictures["tall"])
    compare(ours, theirs, [request(image_path=both), request(prompt="a star", seed=6, image_path=both)], kept)
    compare(ours, theirs, [request()], kept)
    calls = []
    ours.transformer.patch_embedding.register_forward_hook(lambda *_: calls.append(1))
    report = ours(request(image_path=both)).attention_report
    assert len(calls) == 3 + 2
    # 16 x 21 and 19 x 16 tokens, of 3 heads of 16 numbers in 4 layers, float32.
    assert "reference images: keys and values of 640 tokens computed once, 1.0 MB" in report.notes
    assert ours.resolve(request()).guidance_scale == 1.0


def test_a_prefix_and_every_later_pass_equal_diffusers(klein_kv: Path) -> None:
    """Keys and values of two references: those of the first pass serve passes of other latents and timesteps."""
    ours, theirs = load_transformer(FAMILY, klein_kv), load_theirs(Flux2KleinKVPipeline, klein_kv).transformer
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(2, *shape, generator=generator)

    references, text = (random(CHANNELS, 1, 5, 3), random(CHANNELS, 1, 2, 7)), random(7, TEXT_DIM)
    inputs = DenoiserInputs(
        Conditions.of(text), ClipSize(16, 24, 1, 1), None, ImageCondition(references[0], further=references[1:])
    )
    before, context, cache = [reference.clone() for reference in references], AttentionContext(), None
    for timestep in (torch.tensor([937.3, 12.0]), torch.tensor([250.0, 500.0])):
        latents = random(CHANNELS, 1, 4, 6)
        found = ours(latents, timestep, inputs, context)
        every = [each.squeeze(2) for each in ((*references, latents) if cache is None else (latents,))]
        of_references = Flux2KleinKVPipeline._prepare_image_ids([x[:1] for x in every[:-1]])[0] if cache is None else []
        ids = [*of_references, *Flux2KleinKVPipeline._prepare_latent_ids(every[-1])[0]]
        mode = {"kv_cache_mode": "cached", "kv_cache": cache}
        if cache is None:
            mode = {"kv_cache_mode": "extract", "num_ref_tokens": 5 * 3 + 2 * 7}
        with torch.no_grad():
            velocity, *made = theirs(
                hidden_states=torch.cat([Flux2KleinKVPipeline._pack_latents(each) for each in every], dim=1),
                timestep=timestep / 1000,
                encoder_hidden_states=text,
                txt_ids=Flux2KleinKVPipeline._prepare_text_ids(text)[0],
                img_ids=torch.stack(ids),
                return_dict=False,
                **mode,
            )
        cache = made[0] if made else cache
        assert relative(found, velocity.transpose(1, 2).unflatten(2, (1, 4, 6))) < 1e-5
    assert all(torch.equal(now, then) for now, then in zip(references, before, strict=True))


def test_a_replayed_pass_attends_to_the_references_of_its_own_request(klein_kv: Path) -> None:
    model, graphs = load_transformer(FAMILY, klein_kv), ForwardGraphs(RecordedCapture())
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        latents = torch.randn(1, CHANNELS, 1, 4, 6, generator=generator)
        image = ImageCondition(torch.randn(1, CHANNELS, 1, 5, 3, generator=generator))
        text = Conditions.of(torch.randn(1, 7, TEXT_DIM, generator=generator))
        inputs, recorder = DenoiserInputs(text, ClipSize(16, 24, 1, 1), None, image), AttentionRecorder()
        forward, replayed, eager = graphs.of_generation(model, recorder), AttentionContext(), AttentionContext()
        for index in range(5):
            timestep, step = torch.tensor([1000.0 - 200 * index]), StepInfo(index, 5)
            context = dataclasses.replace(replayed, step=step, recorder=recorder)
            with torch.inference_mode():
                found = forward(ForwardPass(latents, timestep, inputs, context))
                expected = model(latents, timestep, inputs, dataclasses.replace(eager, step=step))
            assert torch.equal(found, expected)
        forward.report()
        graphs_report = recorder.report().graphs
        assert graphs_report is not None
        assert graphs_report.num_replayed == (2 if seed == 0 else 4)


def test_a_forward_pass_equals_diffusers(dev: Path) -> None:
    ours = load_transformer(FAMILY, dev)
    theirs = Flux2Transformer2DModel.from_pretrained(dev / "transformer").eval()
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(2, *shape, generator=generator)

    latents, references = random(CHANNELS, 1, 4, 6), (random(CHANNELS, 1, 5, 3), random(CHANNELS, 1, 2, 7))
    text, timestep = random(7, TEXT_DIM), torch.tensor([937.3, 12.0])
    condition = ImageCondition(references[0], further=references[1:])
    inputs = DenoiserInputs(Conditions.of(text), ClipSize(16, 24, 1, 1), 2.5, condition)
    before = [reference.clone() for reference in references]
    found = ours(latents, timestep, inputs, AttentionContext())
    every = [each.squeeze(2) for each in (latents, *references)]
    ids = [
        Flux2Pipeline._prepare_latent_ids(every[0])[0],
        Flux2Pipeline._prepare_image_ids([x[:1] for x in every[1:]])[0],
    ]
    with torch.no_grad():
        velocity = theirs(
            hidden_states=torch.cat([Flux2Pipeline._pack_latents(each) for each in every], dim=1),
            timestep=timestep / 1000,
            guidance=torch.full((2,), 2.5),
            encoder_hidden_states=text,
            txt_ids=Flux2Pipeline._prepare_text_ids(text)[0],
            img_ids=torch.cat(ids),
            return_dict=False,
        )[0][:, :24]
    assert relative(found, velocity.transpose(1, 2).unflatten(2, (1, 4, 6))) < 1e-5
    assert all(torch.equal(now, then) for now, then in zip(references, before, strict=True))
    # Their order, and the sizes, are in the positions.
    swapped = dataclasses.replace(inputs, image=ImageCondition(references[1], further=references[:1]))
    assert relative(ours(latents, timestep, swapped, AttentionContext()), found) > 1e-3


def test_pixels_are_those_of_diffusers(tmp_path: Path) -> None:
    """At published sizes: above a megapixel scaled down, then cut to whole tokens; nothing is scaled up."""
    processor, images = Flux2ImageProcessor(vae_scale_factor=16), editing.references(6, 16)
    generator = numpy.random.default_rng(0)
    for height, width in ((1500, 1203), (1024, 1024), (1023, 1026), (70, 500), (64, 64)):
        path = tmp_path / f"{height}x{width}.png"
        given = Image.fromarray(generator.integers(0, 255, (height, width, 3), dtype=numpy.uint8))
        given.save(path)
        if height * width > 1024 * 1024:
            given = processor._resize_to_target_area(given, 1024 * 1024)
        columns, rows = (side // 16 * 16 for side in given.size)
        expected = processor.preprocess(given, height=rows, width=columns, resize_mode="crop")
        found = images.pixels(str(path))
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < 1e-6


def test_what_cannot_be_used_is_said_before_the_weights_load(
    dev: Path, klein: Path, pictures: dict[str, str], tmp_path: Path
) -> None:
    of_dev, of_klein = (inspect_pipeline(RuntimeConfig(str(folder), device="cpu")).rules for folder in (dev, klein))
    for name, size in (("small", (63, 80)), ("strip", (800, 90))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    picture = pictures["wide"]
    for rules, given, told in (
        (of_dev, (picture,) * 7, "image_path: expected at most 6 images, got 7"),
        (of_klein, (picture,) * 5, "image_path: expected at most 4 images, got 5"),
        (
            of_dev,
            str(tmp_path / "small.png"),
            "small.png is 63 x 80 .*: expected sides of at least 64 pixels; scale it up",
        ),
        (
            of_dev,
            (picture, str(tmp_path / "strip.png")),
            "strip.png is 800 x 90 .*: expected sides of a ratio of 8 : 1",
        ),
        (of_dev, str(tmp_path / "none.png"), "none.png: no such file"),
    ):
        with pytest.raises(RequestError, match=told):
            rules.resolve(request(image_path=given))
    # Those of the text alone stay the model's own.
    assert of_dev.resolve(GenerationRequest("a star")).height == 1024
    assert of_dev.resolve(GenerationRequest("a star", image_path=picture, width=32)).height == 64


def test_the_images_matter_and_are_embedded_once(
    klein: Path, pictures: dict[str, str], kept: list[torch.Tensor]
) -> None:
    ours, calls = load(klein), []
    ours.transformer.patch_embedding.register_forward_hook(lambda *_: calls.append(1))
    both = (pictures["wide"], pictures["tall"])
    media = ours(request(image_path=both, guidance_scale=1.0))
    assert len(calls) == 3 + 2
    assert len(media.recipe["inputs"]["image_path"]) == 2
    (encoder,) = [part for part in media.attention_report.libraries if part.component == "vae encoder"]
    assert (encoder.library, encoder.implementation) == ("diffusers", "AutoencoderKLFlux2's encoder")
    one = kept[-1]
    for changed in (both[::-1], both[0], None):
        ours(request(image_path=changed, guidance_scale=1.0))
        assert (kept[-1] - one).norm() > 1e-3 * one.norm()
    cached = request(image_path=both, guidance_scale=1.0, step_cache="easycache:threshold=0,force=true")
    assert numpy.array_equal(ours(cached).frames, media.frames)


def test_a_timed_step_has_as_many_images_as_are_asked_for(dev: Path, klein_kv: Path) -> None:
    sizes = {"height": 16, "width": 24, "num_frames": None, "batch": 2}
    opened = with_size(open_step_model(str(dev)), **sizes)
    assert opened.num_images == 0
    two = with_size(opened, **sizes, num_images=2)
    assert "24 tokens and 48 of 2 images to edit" in two.describe()
    with pytest.raises(ConfigError, match="--num-images: expected 6 or less for this model, got 7"):
        with_size(opened, **sizes, num_images=7)
    with pytest.raises(ConfigError, match=r"--num-images: expected 0 for this model, .* `bench generate` times"):
        with_size(open_step_model(str(klein_kv)), **sizes, num_images=1)
    given = two.inputs(torch.device("cpu"), torch.float32)
    ours = load_transformer(FAMILY, dev)
    theirs = Flux2Transformer2DModel.from_pretrained(dev / "transformer").eval()
    with torch.no_grad():
        expected = given.theirs_to_velocity(theirs(**given.theirs))
    assert relative(ours(*given.ours, AttentionContext()), expected) < 1e-5
