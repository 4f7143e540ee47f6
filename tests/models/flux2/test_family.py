"""What a FLUX.2 folder says, beside what is in family_cases."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from family_cases import SCHEDULER, change
from published_configs import write_published
from tables import table
from tiny_flux2 import HIDDEN, TINY_SIZES, write_tiny_flux2_klein

from diffusion_runtime import GenerationRequest
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import ModelLoadError, RequestError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.flux2.family import FAMILY
from diffusion_runtime.text_encoders.language_model import StackedStatesEncoder


@pytest.fixture
def copy(tiny_flux2_folder: Path, tmp_path: Path) -> Callable[[], Path]:
    return lambda: Path(shutil.copytree(tiny_flux2_folder, tmp_path / "damaged"))


def test_a_text_encoder_of_too_few_layers_is_refused(copy: Callable[[], Path]) -> None:
    folder = copy()
    text = json.loads((folder / "text_encoder" / "config.json").read_text())["text_config"]
    change(folder, "text_encoder/config.json", {"text_config": {**text, "num_hidden_layers": 30}})
    with pytest.raises(ModelLoadError, match="num_hidden_layers: expected more than 30, got 30"):
        FAMILY.describe(folder).load_text_encoder(torch.device("cpu"), torch.float32)


def test_a_chat_template_of_the_folder_is_never_run(copy: Callable[[], Path]) -> None:
    """It is a program in jinja, and this one would fail."""
    folder = copy()
    model = FAMILY.describe(folder)
    expected = model.load_text_encoder(torch.device("cpu"), torch.float32).encode(["a red circle"])
    (folder / "tokenizer" / "chat_template.jinja").write_text("{{ raise_exception('the template ran') }}")
    found = model.load_text_encoder(torch.device("cpu"), torch.float32).encode(["a red circle"])
    assert torch.equal(found.embeddings, expected.embeddings)


def test_only_what_is_read_of_the_text_encoder_is_kept(tiny_flux2_folder: Path, tiny_klein_folder: Path) -> None:
    for folder, num_layers in ((tiny_flux2_folder, 30), (tiny_klein_folder, 27)):
        encoder = FAMILY.describe(folder).load_text_encoder(torch.device("cpu"), torch.float32)
        assert isinstance(encoder, StackedStatesEncoder)
        assert len(encoder.model.layers) == num_layers
        assert {name.split(".")[0] for name, _ in encoder.model.named_parameters()} == {"embed_tokens", "layers"}
        assert encoder.encode([""]).embeddings.shape == (1, 512, 3 * HIDDEN)


def test_a_distilled_model_takes_four_steps_without_guidance(tiny_klein_folder: Path, tmp_path: Path) -> None:
    folder = write_tiny_flux2_klein(tmp_path / "distilled", is_distilled=True)
    defaults = FAMILY.describe(folder).defaults
    assert (defaults["num_inference_steps"], defaults["guidance_scale"]) == (4, 1.0)
    defaults = FAMILY.describe(tiny_klein_folder).defaults
    assert (defaults["num_inference_steps"], defaults["guidance_scale"]) == (50, 4.0)
    assert not FAMILY.describe(folder).sampling.embeds_guidance
    # Its pipeline leaves the scale unread with a remark; two branches were run here.
    rules = inspect_pipeline(RuntimeConfig(model_path=str(folder), device="cpu")).rules
    with pytest.raises(RequestError, match=r"guidance_scale: this model was distilled .* expected 1 or less, got 4"):
        rules.resolve(GenerationRequest(prompt="a red circle", guidance_scale=4.0, **TINY_SIZES))
    assert not rules.is_guided(rules.resolve(GenerationRequest(prompt="a red circle", **TINY_SIZES)))


def test_a_size_that_is_no_whole_number_of_tokens_is_refused(tiny_flux2_folder: Path) -> None:
    rules = inspect_pipeline(RuntimeConfig(model_path=str(tiny_flux2_folder), device="cpu")).rules
    with pytest.raises(RequestError, match="height: expected a multiple of 4, got 18; use 16 or 20"):
        rules.resolve(GenerationRequest(prompt="a red circle", height=18, width=16))


def test_a_fixed_shift_is_honoured(copy: Callable[[], Path]) -> None:
    folder = copy()
    change(folder, SCHEDULER, {"use_dynamic_shifting": False, "shift": 2.5})
    rules = inspect_pipeline(RuntimeConfig(model_path=str(folder), device="cpu")).rules
    assert rules.resolve(GenerationRequest(prompt="a red circle", **TINY_SIZES)).flow_shift == 2.5


def test_statistics_stay_exact_in_bfloat16(tiny_flux2_folder: Path) -> None:
    decoders = [
        FAMILY.describe(tiny_flux2_folder).load_decoder(torch.device("cpu"), dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for name in ("running_mean", "running_var"):
        exact, rounded = (getattr(decoder._autoencoder.bn, name) for decoder in decoders)
        assert torch.equal(exact, rounded)
    latents = torch.randn(1, 8, 1, 4, 6, generator=torch.Generator().manual_seed(0))
    exact, rounded = (decoder.decode(latents) for decoder in decoders)
    assert exact.shape == (1, 1, 16, 24, 3)
    assert (exact - rounded).abs().max() < 0.05


@table("name", ["FLUX.2-dev", "FLUX.2-klein-4B"])
def test_latents_of_published_models(tmp_path: Path, name: str) -> None:
    folder = write_published(tmp_path, name)
    assert FAMILY.describe(folder).geometry.latent_shape(1024, 768, 1) == (128, 1, 64, 48)
