"""What a FLUX.2 folder says, and what it may not say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_flux2 import HIDDEN, TINY_SIZES, change_json, write_tiny_flux2_klein

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.attention import AttentionPolicy
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import ModelLoadError, RequestError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.flux2.family import FAMILY
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.text_encoders.stacked_states import StackedStatesEncoder

REAL_DEV = {
    "attention_head_dim": 128,
    "axes_dims_rope": [32, 32, 32, 32],
    "eps": 1e-6,
    "in_channels": 128,
    "joint_attention_dim": 15360,
    "mlp_ratio": 3.0,
    "num_attention_heads": 48,
    "num_layers": 8,
    "num_single_layers": 48,
    "out_channels": None,
    "patch_size": 1,
    "rope_theta": 2000,
    "timestep_guidance_channels": 256,
}
REAL_KLEIN = {
    **REAL_DEV,
    "guidance_embeds": False,
    "joint_attention_dim": 7680,
    "num_attention_heads": 24,
    "num_layers": 5,
    "num_single_layers": 20,
}


@pytest.fixture
def copy(tiny_flux2_folder: Path, tmp_path: Path) -> Callable[[], Path]:
    return lambda: Path(shutil.copytree(tiny_flux2_folder, tmp_path / "damaged"))


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("patch_size", 2, "expected 1"),
        ("in_channels", 6, "a multiple of 4"),
        ("out_channels", 16, "differ: this is not a text-to-image checkpoint"),
        ("axes_dims_rope", [4, 4, 4, 2], "even numbers whose sum is attention_head_dim, 16"),
        ("axes_dims_rope", [8, 8], "a list of 4 whole numbers"),
        ("timestep_guidance_channels", 31, "an even number"),
        ("guidance_embeds", False, r"expected true in a folder of FLUX.2 \[dev\]"),
        ("num_experts", 4, "is unknown to this runtime"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_named(
    copy: Callable[[], Path], key: str, value: object, told: str
) -> None:
    folder = copy()
    change_json(folder / "transformer" / "config.json", {key: value})
    with pytest.raises(ModelLoadError, match=rf"transformer/config.json: key.*'{key}'.*{told}"):
        inspect_pipeline(RuntimeConfig(model_path=str(folder), device="cpu"))


@pytest.mark.parametrize(
    ("file", "values", "told"),
    [
        ("vae/config.json", {"latent_channels": 4}, "expected 2, a quarter of the transformer's in_channels"),
        ("vae/config.json", {"patch_size": [1, 1]}, r"expected \[2, 2\]"),
        ("model_index.json", {"_class_name": "Flux2KleinInpaintPipeline"}, "no native model for what that pipeline"),
        ("model_index.json", {"_class_name": "Flux2KleinPipeline"}, r"expected false in a folder of FLUX.2 \[klein\]"),
    ],
)
def test_another_kind_of_model_is_refused(
    copy: Callable[[], Path], file: str, values: dict[str, object], told: str
) -> None:
    folder = copy()
    change_json(folder / file, values)
    with pytest.raises(ModelLoadError, match=told):
        inspect_pipeline(RuntimeConfig(model_path=str(folder), device="cpu"))


@pytest.mark.parametrize("component", ["text_encoder", "tokenizer", "vae", "transformer", "scheduler"])
def test_a_missing_component_is_named(copy: Callable[[], Path], component: str) -> None:
    folder = copy()
    shutil.rmtree(folder / component)
    with pytest.raises(ModelLoadError, match=rf"{component}/"):
        load_pipeline(str(folder), device="cpu")


def test_weights_of_another_size_are_named(copy: Callable[[], Path]) -> None:
    folder = copy()
    change_json(folder / "transformer" / "config.json", {"num_single_layers": 3})
    model = FAMILY.describe(folder)
    transformer = model.build_transformer(AttentionPolicy())
    with pytest.raises(ModelLoadError, match=r"single_transformer_blocks\.2\.attn\.to_qkv_mlp_proj\.weight"):
        model.load_transformer(transformer, torch.device("cpu"), torch.float32)


def test_a_text_encoder_of_another_model_is_refused(copy: Callable[[], Path]) -> None:
    family, folder = FAMILY, copy()
    path = folder / "transformer" / "config.json"
    change_json(path, {"joint_attention_dim": 64})
    with pytest.raises(ModelLoadError, match="48 numbers a token, and the transformer takes joint_attention_dim, 64"):
        family.describe(folder).load_text_encoder(torch.device("cpu"), torch.float32)
    text = json.loads((folder / "text_encoder" / "config.json").read_text())["text_config"]
    change_json(folder / "text_encoder" / "config.json", {"text_config": {**text, "num_hidden_layers": 30}})
    with pytest.raises(ModelLoadError, match="num_hidden_layers: expected more than 30, got 30"):
        family.describe(folder).load_text_encoder(torch.device("cpu"), torch.float32)
    change_json(folder / "text_encoder" / "config.json", {"model_type": "llama"})
    with pytest.raises(ModelLoadError, match="model_type: expected 'mistral3', got 'llama'"):
        family.describe(folder).load_text_encoder(torch.device("cpu"), torch.float32)


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
    assert not FAMILY.describe(folder).embeds_guidance
    # Its pipeline leaves the scale unread with a remark; two branches were run here.
    rules = inspect_pipeline(RuntimeConfig(model_path=str(folder), device="cpu")).rules
    with pytest.raises(RequestError, match=r"guidance_scale: this model was distilled .* expected 1 or less, got 4"):
        rules.resolve(GenerationRequest(prompt="a red circle", guidance_scale=4.0, **TINY_SIZES))
    assert not rules.is_guided(rules.resolve(GenerationRequest(prompt="a red circle", **TINY_SIZES)))


def test_a_picture_to_edit_is_refused(tiny_flux2_folder: Path, tmp_path: Path) -> None:
    rules = inspect_pipeline(RuntimeConfig(model_path=str(tiny_flux2_folder), device="cpu")).rules
    request = GenerationRequest(prompt="a red circle", image_path=str(tmp_path / "a.png"), **TINY_SIZES)
    with pytest.raises(RequestError, match="image_path"):
        rules.resolve(request)
    with pytest.raises(RequestError, match="height: expected a multiple of 4, got 18; use 16 or 20"):
        rules.resolve(GenerationRequest(prompt="a red circle", height=18, width=16))


def test_a_fixed_shift_is_honoured(copy: Callable[[], Path]) -> None:
    folder = copy()
    change_json(folder / "scheduler" / "scheduler_config.json", {"use_dynamic_shifting": False, "shift": 2.5})
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


@pytest.mark.parametrize(
    ("pipeline", "config", "billions"),
    [("Flux2Pipeline", REAL_DEV, 32.22), ("Flux2KleinPipeline", REAL_KLEIN, 3.876)],
)
def test_a_model_of_the_real_size_builds_without_memory(
    copy: Callable[[], Path], pipeline: str, config: dict[str, object], billions: float
) -> None:
    folder = copy()
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    change_json(folder / "model_index.json", {"_class_name": pipeline})
    change_json(folder / "vae" / "config.json", {"latent_channels": 32, "block_out_channels": [128, 256, 512, 512]})
    model = family_for_folder(folder).describe(folder)
    transformer = model.build_transformer(AttentionPolicy())
    assert sum(parameter.numel() for parameter in transformer.parameters()) == pytest.approx(billions * 1e9, rel=1e-3)
    assert model.geometry.latent_shape(1024, 768, 1) == (128, 1, 64, 48)
