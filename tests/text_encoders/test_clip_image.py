"""CLIP's image encoder: how a picture is prepared for it, against transformers' own way; published names of weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tables import table
from transformers import CLIPVisionConfig, CLIPVisionModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from diffusion_runtime.text_encoders.clip import load_clip_image_encoder
from diffusion_runtime.text_encoders.image_preparation import read_preparation

SIZES = {"size": {"shortest_edge": 30}, "crop_size": {"height": 28, "width": 28}}


def write_folder(folder: Path) -> CLIPVisionModel:
    config = CLIPVisionConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=14
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIPVisionModel(config).eval()
    model.save_pretrained(folder / "image_encoder")
    CLIPImageProcessorPil(**SIZES).save_pretrained(folder / "image_processor")
    return model


@table(("height", "width"), [(37, 53), (53, 37), (32, 32), (40, 127)])
def test_a_picture_is_prepared_as_transformers_does(tmp_path: Path, height: int, width: int) -> None:
    write_folder(tmp_path)
    pixels = numpy.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    expected = CLIPImageProcessorPil(**SIZES)(images=Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    preparation = read_preparation(tmp_path / "image_processor" / "preprocessor_config.json")
    found = preparation.prepare(torch.from_numpy(pixels))
    assert found.shape == expected.shape == (1, 3, 28, 28)
    assert (found - expected).abs().max() < 1e-6


def test_weights_under_their_published_names_are_read(tmp_path: Path) -> None:
    """Wan's folders were converted from a model with a projection behind it, whose parts stand under vision_model."""
    model = write_folder(tmp_path)
    file = tmp_path / "image_encoder" / "model.safetensors"
    published = {f"vision_model.{name}": value for name, value in load_file(file).items()}
    save_file({**published, "visual_projection.weight": torch.ones(8, 24)}, file, {"format": "pt"})
    config = tmp_path / "image_encoder" / "config.json"
    values = {**json.loads(config.read_text()), "architectures": ["CLIPVisionModelWithProjection"]}
    config.write_text(json.dumps(values))
    encoder = load_clip_image_encoder(tmp_path, torch.device("cpu"), torch.float32)
    pixels = torch.randint(0, 256, (40, 60, 3), generator=torch.Generator().manual_seed(0)).byte()
    with torch.no_grad():
        states = model(encoder.preparation.prepare(pixels), output_hidden_states=True).hidden_states
    assert states is not None
    tokens = encoder.encode(pixels)
    assert tokens.shape == (1, 5, 24)
    torch.testing.assert_close(tokens, states[-2])
