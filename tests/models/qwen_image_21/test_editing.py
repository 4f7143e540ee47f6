"""Images to edit with Qwen-Image 2.1 against diffusers' QwenImage21Pipeline: same folder, noise, prompts and images, in
float32 on the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch
import transformers
from diffusers import QwenImage21Pipeline
from family_parity import assert_equal_runs, record_latents
from PIL import Image
from tables import table
from tiny_qwen_image_21 import TINY_SIZES, write_tiny_qwen_image_21
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.errors import ModelLoadError, RequestError
from diffusion_runtime.models.qwen_image_21 import editing
from diffusion_runtime.models.qwen_image_21.family import FAMILY

# Of the side of a picture of as many pixels as those made of images.
SIDE = 96
NUM_STEPS = 3


class Processor:
    """What QwenImage21Pipeline asks of Qwen3VLProcessor, without the preprocessing of videos, which needs
    torchvision."""

    def __init__(self, tokenizer: Any, images: Any) -> None:
        self.tokenizer = tokenizer
        self.images = images

    def __call__(self, text: list[str], images: Any = None, **how: Any) -> Any:
        mark = "<|image_pad|>"
        if images is None:
            return self.tokenizer(text, **how)
        made = self.images(images, return_tensors="pt")
        counts = iter((made["image_grid_thw"].prod(-1) // 4).tolist())
        whole = []
        for each in text:
            first, *others = each.split(mark)
            whole.append(first + "".join(mark * next(counts) + other for other in others))
        found = self.tokenizer(whole, **how)
        found.update(made)
        found["mm_token_type_ids"] = (found["input_ids"] == self.tokenizer.convert_tokens_to_ids(mark)).int()
        return found

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> list[list[int]]:
        """Qwen's chat format."""
        (message,) = messages
        (part,) = message["content"]
        return [self.tokenizer(f"<|im_start|>{message['role']}\n{part['text']}<|im_end|>\n").input_ids]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen_image_21(tmp_path_factory.mktemp("models") / "sees", sees=True)


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Pipeline, QwenImage21Pipeline]:
    float32 = {"dtype": torch.float32}
    processor = Processor(
        transformers.Qwen2Tokenizer.from_pretrained(folder / "processor"),
        Qwen2VLImageProcessorPil.from_pretrained(folder / "processor"),
    )
    theirs = QwenImage21Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        vae=diffusers.AutoencoderKLQwenImage21.from_pretrained(folder / "vae", **float32),
        text_encoder=transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder", **float32),
        processor=processor,
        transformer=diffusers.QwenImage21Transformer2DModel.from_pretrained(folder / "transformer", **float32),
    )
    theirs.set_progress_bar_config(disable=True)
    ours = load_pipeline(str(folder), device="cpu")
    assert isinstance(ours, Pipeline)
    return ours, theirs


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A wide one and a high one."""
    place = tmp_path_factory.mktemp("pictures")
    for index, (height, width) in enumerate(((50, 100), (90, 70))):
        rows, columns = numpy.mgrid[0:height, 0:width]
        pixels = numpy.stack([2 * rows, 2 * columns, 255 - rows], axis=-1).astype(numpy.uint8)
        Image.fromarray(numpy.roll(pixels, index, axis=2)).save(place / f"{index}.png")
    return tuple(str(place / f"{index}.png") for index in range(2))


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(editing, "AREA", SIDE * SIDE)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    return record_latents(monkeypatch)


def request(**values: Any) -> GenerationRequest:
    fields = {"prompt": "a red circle moving left", **TINY_SIZES, "seed": 5, "num_inference_steps": NUM_STEPS}
    return GenerationRequest(**{**fields, **values})


@table(
    ("num_pictures", "values"),
    [
        (1, {}),
        (2, {}),
        (2, {"guidance_scale": 4.0, "negative_prompt": "a yellow square", "guidance_mode": "two_pass"}),
        # Both as long, as in diffusers the place of a picture depends on the longest prompt.
        (1, {"guidance_scale": 4.0, "negative_prompt": "a blue star moving right", "guidance_mode": "batched"}),
    ],
)
def test_latents_and_pictures_equal_diffusers(
    pair: tuple[Pipeline, QwenImage21Pipeline],
    pictures: tuple[str, ...],
    kept: list[torch.Tensor],
    num_pictures: int,
    values: dict[str, Any],
) -> None:
    ours, theirs = pair

    def run_theirs(requests: list[GenerationRequest], noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
        first, latents = requests[0], []

        def keep(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            latents.append(tensors["latents"].transpose(1, 2).unflatten(2, noise.shape[2:]).clone())
            return {}

        images = theirs(
            prompt=[each.prompt for each in requests],
            image=[Image.open(path) for path in pictures[:num_pictures]],
            negative_prompt=[each.negative_prompt for each in requests] if first.guidance_scale > 1 else None,
            true_cfg_scale=first.guidance_scale,
            height=first.height,
            width=first.width,
            num_inference_steps=first.num_inference_steps,
            latents=noise.flatten(2).transpose(1, 2).clone(),
            callback_on_step_end=keep,
            output_type="np",
            output_resolution=SIDE,
        ).images
        colours, opacity = images[..., :3], images[..., 3:]
        return latents, (colours * opacity + 1 - opacity)[:, None]

    asked = request(image_path=pictures[:num_pictures], **values)
    assert_equal_runs(ours, [asked], kept, run_theirs)


def test_images_matter_and_say_the_size(pair: tuple[Pipeline, Any], pictures: tuple[str, ...]) -> None:
    ours, _ = pair
    found = [ours(request(image_path=each)).frames.astype(int) for each in (None, pictures[0], pictures[1], pictures)]
    for index, one in enumerate(found):
        for other in found[index + 1 :]:
            assert numpy.abs(one - other).max() > 2
    resolved = ours.resolve(GenerationRequest("make it night", image_path=pictures[0]))
    assert (resolved.height, resolved.width) == editing.scaled((50, 100)) == (64, 128)
    assert ours.resolve(GenerationRequest("a star")).height == 2048
    with pytest.raises(RequestError, match="image_path: expected at most 4 images, got 5"):
        ours.resolve(request(image_path=(*pictures, *pictures, pictures[0])))
    assert [note for note in ours(request(image_path=pictures)).attention_report.notes if "text and pictures:" in note]


def test_the_preprocessing_of_pictures_in_the_processors_own_file(folder: Path, tmp_path: Path) -> None:
    """As transformers writes it since version 5; a folder is refused for what it says before a weight is read."""
    copy = shutil.copytree(folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    own = copy / "processor" / "preprocessor_config.json"
    values = json.loads(own.read_text())
    own.unlink()
    whole = copy / "processor" / "processor_config.json"
    whole.write_text(json.dumps({"image_processor": values, "processor_class": "Qwen3VLProcessor"}))
    assert dict(FAMILY.describe(ModelFolder(copy)).inputs.images) == {"image_path": False}
    whole.write_text(json.dumps({"image_processor": {**values, "resample": 1}}))
    with pytest.raises(ModelLoadError, match="key 'resample': expected 3"):
        FAMILY.files.check_parts(ModelFolder(copy))


def test_a_folder_without_the_preprocessing_of_pictures_takes_none(tmp_path: Path, pictures: tuple[str, ...]) -> None:
    ours = load_pipeline(str(write_tiny_qwen_image_21(tmp_path / "model")), device="cpu")
    with pytest.raises(RequestError, match="image_path: this model makes images from text alone"):
        ours.resolve(request(image_path=pictures[0]))
