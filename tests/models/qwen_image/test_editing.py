"""Qwen-Image-Edit and -2509 against diffusers' pipelines on tiny weights: images that the language model sees with the
prompt, and whose latents stand beside the noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from family_parity import assert_equal_runs, load_transformer, record_latents, relative
from PIL import Image
from tables import table
from tiny_qwen_image import TINY_SIZES, write_tiny_qwen_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.errors import ModelLoadError, RequestError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.media.images import open_picture
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.models.qwen_image import editing
from diffusion_runtime.models.qwen_image.family import FAMILY
from diffusion_runtime.text_encoders.interface import Conditions
from diffusion_runtime.text_encoders.picture_patches import read_patch_preparation

PROMPTS = ("a red circle moving left", "two objects: a blue star, and a green ring.")
NEGATIVE = "a yellow square"
# The last one's references are at timestep 0, as in Qwen-Image-Edit-2511.
PIPELINES = {"one": QwenImageEditPipeline, "several": QwenImageEditPlusPipeline, "at zero": QwenImageEditPlusPipeline}
# Pictures of so much fewer pixels than the published models'.
SMALLER = 64
FolderOf = Callable[[str], Path]
_real = editing.scaled_to


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    folders: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in folders:
            path = tmp_path_factory.mktemp("models") / kind
            folders[kind] = write_tiny_qwen_image(path, edits=PIPELINES[kind].__name__)
            if kind == "at zero":
                config = path / "transformer" / "config.json"
                config.write_text(json.dumps({**json.loads(config.read_text()), "zero_cond_t": True}))
        return folders[kind]

    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A wide one and a high one."""
    folder = tmp_path_factory.mktemp("pictures")
    for index, (height, width) in enumerate(((40, 80), (90, 70))):
        rows, columns = numpy.mgrid[0:height, 0:width]
        pixels = numpy.stack([2 * rows, 3 * columns, 255 - rows], axis=-1).astype(numpy.uint8)
        Image.fromarray(numpy.roll(pixels, index, axis=2)).save(folder / f"{index}.png")
    return tuple(str(folder / f"{index}.png") for index in range(2))


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        theirs = module.calculate_dimensions
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio, of=theirs: of(area // SMALLER, ratio))
    monkeypatch.setattr(editing, "scaled_to", lambda area, size: _real(area // SMALLER, size))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    return record_latents(monkeypatch)


def request(**values: Any) -> GenerationRequest:
    fields = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVE, **TINY_SIZES, "seed": 5, "num_inference_steps": 3}
    return GenerationRequest(**{**fields, **values})


def load(folder: Path, **how: Any) -> Pipeline:
    pipeline = load_pipeline(str(folder), device="cpu", **how)
    assert isinstance(pipeline, Pipeline)
    return pipeline


class Processor:
    """transformers' own, without the preprocessing of videos, which needs torchvision."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.images = Qwen2VLImageProcessorPil()

    def __call__(self, text: list[str], images: Any, **how: Any) -> Any:
        # As many pictures as there are marks, in the order of the texts.
        given = images if isinstance(images, list) else [images]
        made = self.images(given * len(text), return_tensors="pt")
        counts, mark = iter((made["image_grid_thw"].prod(-1) // 4).tolist()), "<|image_pad|>"
        whole = []
        for each in text:
            first, *others = each.split(mark)
            whole.append(first + "".join(mark * next(counts) + other for other in others))
        found = self.tokenizer(whole, **how)
        found.update(made)
        return found


def theirs_of(folder: Path, kind: str) -> Any:
    """Their pipeline. transformers from version 5 on makes rows and columns of a picture's positions only where it is
    told which tokens are of one; before, it saw for itself."""
    theirs = PIPELINES[kind].from_pretrained(folder, dtype=torch.float32, processor=None)
    theirs.set_progress_bar_config(disable=True)
    theirs.processor = Processor(theirs.tokenizer)
    forward, token = theirs.text_encoder.forward, theirs.text_encoder.config.image_token_id

    def with_types(*, input_ids: torch.Tensor, **given: Any) -> Any:
        return forward(input_ids=input_ids, mm_token_type_ids=(input_ids == token).int(), **given)

    theirs.text_encoder.forward = with_types
    return theirs


def compare(folder: Path, kind: str, requests: list[GenerationRequest], kept: list[torch.Tensor]) -> None:
    theirs = theirs_of(folder, kind)

    def run_theirs(resolved: list[GenerationRequest], noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
        first, latents = resolved[0], []
        batch, channels, _, height, width = noise.shape
        paths = [first.image_path] if isinstance(first.image_path, str) else first.image_path

        def keep(_: Any, __: int, ___: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            latents.append(theirs._unpack_latents(values["latents"], height, width, vae_scale_factor=1))
            return {}

        opened = [Image.open(path) for path in paths]
        images = theirs(
            image=opened[0] if kind == "one" else opened,
            prompt=[each.prompt for each in resolved],
            negative_prompt=[each.negative_prompt for each in resolved],
            true_cfg_scale=first.guidance_scale,
            height=first.height,
            width=first.width,
            num_inference_steps=first.num_inference_steps,
            latents=theirs._pack_latents(noise[:, :, 0], batch, channels, height, width),
            callback_on_step_end=keep,
            output_type="np",
        ).images
        return latents, images[:, None]

    assert_equal_runs(load(folder), requests, kept, run_theirs)


def test_a_generation_equals_diffusers(
    folder_of: FolderOf, pictures: tuple[str, ...], kept: list[torch.Tensor]
) -> None:
    """A batch; a size that follows the image; several images."""
    pairs = zip(PROMPTS, (5, 6), strict=True)
    batch = [request(prompt=prompt, seed=seed, image_path=pictures[0]) for prompt, seed in pairs]
    compare(folder_of("one"), "one", batch, kept)
    compare(folder_of("one"), "one", [request(image_path=pictures[0], height=None, width=None)], kept)
    compare(folder_of("several"), "several", [request(image_path=pictures, guidance_mode="two_pass")], kept)
    compare(folder_of("several"), "several", [request(image_path=pictures[1])], kept)
    compare(folder_of("at zero"), "at zero", [request(image_path=pictures)], kept)


def test_the_conditions_are_what_diffusers_makes_of_prompt_and_pictures(
    folder_of: FolderOf, pictures: tuple[str, ...]
) -> None:
    """At positions of rows and columns."""
    theirs, prompts = theirs_of(folder_of("several"), "several"), list(PROMPTS)
    encoder = FAMILY.describe(folder_of("several")).load_text_encoder(torch.device("cpu"), torch.float32)
    positions: list[torch.Tensor] = []
    encoder.model.register_forward_pre_hook(
        lambda _, __, given: positions.append(given["position_ids"]), with_kwargs=True
    )
    theirs.text_encoder.model.language_model.register_forward_pre_hook(
        lambda _, __, given: positions.append(given["position_ids"]), with_kwargs=True
    )
    for paths in (pictures, pictures[1:]):
        ours = encoder.of_pictures(paths).encode(prompts)
        opened = [open_picture(path) for path in paths]
        sizes = [editing.scaled_to(editing.SEEN_AREA, each.size[::-1]) for each in opened]
        resized = [theirs.image_processor.resize(each, *size) for each, size in zip(opened, sizes, strict=True)]
        with torch.no_grad():
            expected, _ = theirs.encode_prompt(prompts, image=resized)
        assert relative(ours.embeddings, expected) < 1e-5
        one, other = positions[-2:]
        for index, length in enumerate(ours.lengths):
            real = length + editing.TEMPLATE.num_cropped
            assert torch.equal(one[:, index, :real], other[-3:, index, :real])


@table("kind", ["several", "at zero"])
def test_a_forward_pass_equals_diffusers(folder_of: FolderOf, kind: str) -> None:
    ours = load_transformer(FAMILY, folder_of(kind))
    theirs = QwenImageTransformer2DModel.from_pretrained(folder_of(kind) / "transformer").eval()
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(2, *shape, generator=generator)

    parts = [random(4, 1, 8, 12), random(4, 1, 6, 4), random(4, 1, 10, 14)]
    text, timestep, lengths = random(9, 32), torch.tensor([937.3, 12.0]), (9, 4)
    inputs = DenoiserInputs(
        Conditions.of(text, lengths), ClipSize(32, 48, 1, 1), image=ImageCondition(parts[1], further=(parts[2],))
    )
    found = ours(parts[0], timestep, inputs, AttentionContext())
    pack, shapes = (
        QwenImageEditPlusPipeline._pack_latents,
        [(1, part.shape[3] // 2, part.shape[4] // 2) for part in parts],
    )
    packed = [pack(part[:, :, 0], 2, 4, *part.shape[3:]) for part in parts]
    with torch.no_grad():
        velocity = theirs(
            hidden_states=torch.cat(packed, dim=1),
            timestep=timestep / 1000,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=torch.arange(9)[None] < torch.tensor(lengths)[:, None],
            img_shapes=[shapes] * 2,
        ).sample[:, : packed[0].shape[1]]
    expected = QwenImageEditPlusPipeline._unpack_latents(velocity, 8, 12, vae_scale_factor=1)
    assert relative(found, expected) < 1e-5


def test_pictures_become_the_patches_of_transformers(folder_of: FolderOf) -> None:
    path = folder_of("one") / "processor" / "preprocessor_config.json"
    ours, theirs = read_patch_preparation(path), Qwen2VLImageProcessorPil()
    for height, width in ((20, 30), (96, 192), (1024, 1024), (1200, 1400)):
        pixels = torch.randint(
            0, 256, (height, width, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
        )
        made, expected = ours.prepare(pixels), theirs(Image.fromarray(pixels.numpy()), return_tensors="pt")
        assert list(made.grid) == expected["image_grid_thw"][0].tolist()
        assert relative(made.patches, expected["pixel_values"]) < 1e-5
    path.write_text(path.read_text().replace('"patch_size": 14', '"patch_size": 0'))
    with pytest.raises(ModelLoadError, match="key 'patch_size': expected a whole number, 1 to 1024, got 0"):
        read_patch_preparation(path)
    with pytest.raises(ModelLoadError, match="key 'patch_size'"):
        inspect_pipeline(RuntimeConfig(str(folder_of("one")), device="cpu"))
    path.write_text(path.read_text().replace('"patch_size": 0', '"patch_size": 14'))


def test_the_sizes_of_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for height, width in ((100, 300), (1024, 1024), (3000, 2000), (768, 1344)):
        for area in (editing.AREA, editing.SEEN_AREA):
            columns, rows = pipeline_qwenimage_edit_plus.calculate_dimensions(area, width / height)
            assert editing.scaled_to(area, (height, width)) == (rows, columns)


def test_every_image_matters_to_prompt_and_latents(
    folder_of: FolderOf, pictures: tuple[str, ...], kept: list[torch.Tensor]
) -> None:
    ours = load(folder_of("several"))
    media = ours(request(image_path=pictures))
    assert len(media.recipe["inputs"]["image_path"]) == 2
    assert media.recipe["request"]["image_path"] == list(pictures)
    one = kept[-1]
    for paths in (pictures[:1], pictures[1:], pictures[::-1]):
        ours(request(image_path=paths))
        assert (kept[-1] - one).norm() > 1e-3 * one.norm()
    of = [ours.text_encoder.of_pictures(paths).encode(["a star"]) for paths in ((), pictures[:1], pictures[1:])]
    assert of[0].lengths[0] < of[1].lengths[0]
    # Of the words behind the pictures.
    assert relative(of[1].embeddings[:, -5:], of[2].embeddings[:, -5:]) > 1e-3
    # A prompt's words are no pictures.
    marked = ours.text_encoder.of_pictures(pictures).encode(["a <|image_pad|>star"])
    assert marked.lengths == ours.text_encoder.of_pictures(pictures).encode(["a star"]).lengths


def test_what_cannot_be_edited_is_said_before_the_weights_load(
    folder_of: FolderOf, pictures: tuple[str, ...], tmp_path: Path
) -> None:
    narrow = tmp_path / "narrow.png"
    Image.new("RGB", (2, 4000)).save(narrow)
    for kind, given, told in (
        ("one", {}, "image_path: this model edits an image; give one: --image-path FILE"),
        ("one", {"image_path": pictures}, "image_path: expected one image, got 2: .*; leave all but one out"),
        ("several", {"image_path": pictures * 2}, "image_path: expected at most 3 images, got 4"),
        ("several", {"image_path": (pictures[0], "none.png")}, "image_path: none.png: no such file"),
        ("one", {"image_path": str(narrow)}, "image_path: .*narrow.png is 2 x 4000 .*: too narrow; crop it"),
    ):
        rules = inspect_pipeline(RuntimeConfig(str(folder_of(kind)), device="cpu")).rules
        with pytest.raises(RequestError, match=told):
            rules.resolve(request(**given))
    resolved = rules.resolve(GenerationRequest("make it night", image_path=pictures[0]))
    assert (resolved.height, resolved.width) == (96, 192)
    assert (resolved.num_inference_steps, resolved.guidance_scale, resolved.negative_prompt) == (50, 4.0, " ")
