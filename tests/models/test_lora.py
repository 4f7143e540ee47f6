"""LoRA files in diffusers' format, merged at load, against diffusers on tiny weights."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from denoiser_inputs import text_inputs
from diffusers import WanPipeline
from safetensors.torch import save_file
from tiny_models import write_tiny_wan

from diffusion_runtime import load_pipeline
from diffusion_runtime.attention import AttentionContext, StepInfo
from diffusion_runtime.config import LoraConfig, RuntimeConfig
from diffusion_runtime.errors import ConfigError, ModelLoadError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.lora import read_lora

WIDTH, RANK = 64, 4
MODULES = ("blocks.0.attn1.to_q", "blocks.1.attn1.to_out.0", "blocks.0.attn2.to_v", "blocks.1.ffn.net.2")


def lora_tensors(prefix: str = "transformer.", seed: int = 0, rank: int = RANK) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in MODULES:
        width = 96 if name.endswith("net.2") else WIDTH
        tensors[f"{prefix}{name}.lora_A.weight"] = 0.3 * torch.randn(rank, width, generator=generator)
        tensors[f"{prefix}{name}.lora_B.weight"] = 0.3 * torch.randn(WIDTH, rank, generator=generator)
    return tensors


def write(path: Path, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any] | None = None) -> str:
    metadata = None if settings is None else {"format": "pt", "lora_adapter_metadata": json.dumps(settings)}
    save_file(dict(tensors), path, metadata=metadata)
    return str(path)


def velocity(transformer: Any, *, ours: bool, expert: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 16, 2, 4, 6, generator=generator)
    text = torch.randn(1, 7, 32, generator=generator)
    timestep = torch.tensor([700.0])
    if ours:
        return transformer(latents, timestep, text_inputs(text), AttentionContext(step=StepInfo(expert=expert)))
    with torch.no_grad():
        return transformer(latents, timestep, text, return_dict=False)[0]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("component", ["transformer_2.", "transformer.transformer_2."], ids=["own", "named"])
def test_a_component_that_the_model_has_not_is_named(tiny_wan_folder: Path, tmp_path: Path, component: str) -> None:
    """It changed nothing, without a word, and the recipe listed the file."""
    prefix = component.rpartition("transformer_2.")[0]
    path = write(tmp_path / "second.safetensors", lora_tensors(prefix or "transformer_2."))
    lora = LoraConfig(path, component="transformer_2")
    with pytest.raises(
        ModelLoadError, match="4 modules of transformer_2, and the model has transformer alone"
    ) as caught:
        inspect_pipeline(RuntimeConfig(str(tiny_wan_folder), device="cpu", lora=(lora,)))
    assert path in str(caught.value)


def test_what_a_file_does_to_text_encoders_is_said(tmp_path: Path) -> None:
    """The advice was a conversion that drops them."""
    for prefix in ("text_encoder.", "text_encoder_2.", "lora_te1_"):
        path = write(tmp_path / "both.safetensors", {**lora_tensors(), **lora_tensors(prefix)})
        with pytest.raises(ModelLoadError, match="8 of these keys change a text encoder: that is not supported here"):
            read_lora(LoraConfig(path))


@pytest.mark.parametrize("settings", [None, {"transformer.lora_alpha": 10, "transformer.r": RANK}], ids=["no", "alpha"])
def test_two_files_with_scales_equal_diffusers(
    tiny_wan_folder: Path, tmp_path: Path, settings: dict[str, Any] | None
) -> None:
    if settings is not None:
        settings = {**settings, "transformer.target_modules": list(MODULES)}
    first = write(tmp_path / "first.safetensors", lora_tensors(), settings)
    second = write(tmp_path / "second.safetensors", lora_tensors(seed=2, rank=2))
    theirs = WanPipeline.from_pretrained(tiny_wan_folder, dtype=torch.float32)
    plain = velocity(theirs.transformer, ours=False)
    with warnings.catch_warnings():
        # peft remarks that a model gets a second adapter.
        warnings.simplefilter("ignore")
        theirs.load_lora_weights(first, adapter_name="first")
        theirs.load_lora_weights(second, adapter_name="second")
    theirs.set_adapters(["first", "second"], [0.8, -0.5])
    expected = velocity(theirs.transformer, ours=False)
    ours = load_pipeline(str(tiny_wan_folder), device="cpu", lora=[(first, 0.8), {"path": second, "scale": -0.5}])
    assert relative(plain, expected) > 1e-2
    assert relative(velocity(ours.transformer, ours=True), expected) < 1e-5


def test_keys_without_a_component_alphas_and_biases(tiny_wan_folder: Path, tmp_path: Path) -> None:
    """Merged by hand: alpha / rank in front, and the bias of the upper map."""
    name = MODULES[0]
    tensors = {key: value for key, value in lora_tensors("").items() if name in key}
    tensors[f"{name}.alpha"] = torch.tensor(2.0)
    tensors[f"{name}.lora_B.bias"] = torch.randn(WIDTH, generator=torch.Generator().manual_seed(7))
    path = write(tmp_path / "plain.safetensors", tensors)
    theirs = WanPipeline.from_pretrained(tiny_wan_folder, dtype=torch.float32).transformer
    linear = theirs.get_submodule(name)
    with torch.no_grad():
        factor = 0.7 * 2.0 / RANK
        linear.weight += factor * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        linear.bias += factor * tensors[f"{name}.lora_B.bias"]
    ours = load_pipeline(str(tiny_wan_folder), device="cpu", lora=[(path, 0.7)])
    assert relative(velocity(ours.transformer, ours=True), velocity(theirs, ours=False)) < 1e-5


ADAPTER = {"r": RANK, "lora_alpha": 12, "alpha_pattern": {"to_q": 2, "blocks.1.attn1.to_k": 6}}


@pytest.mark.parametrize("whole", [True, False], ids=["save_lora_weights", "save_lora_adapter"])
def test_files_that_peft_wrote_keep_their_alphas(tiny_wan_folder: Path, tmp_path: Path, whole: bool) -> None:
    """diffusers' two ways of saving: keys and settings with the component's name in front, and without."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model_state_dict

    theirs = WanPipeline.from_pretrained(tiny_wan_folder, dtype=torch.float32)
    transformer = theirs.transformer
    transformer.add_adapter(PeftConfig(target_modules=["to_q", "to_k"], init_lora_weights=False, **ADAPTER))
    expected = velocity(transformer, ours=False)
    if whole:
        WanPipeline.save_lora_weights(
            tmp_path,
            transformer_lora_layers=get_peft_model_state_dict(transformer),
            transformer_lora_adapter_metadata=transformer.peft_config["default"].to_dict(),
        )
    else:
        transformer.save_lora_adapter(tmp_path)
    path = tmp_path / "pytorch_lora_weights.safetensors"
    ours = load_pipeline(str(tiny_wan_folder), device="cpu", lora=[str(path)])
    assert relative(velocity(ours.transformer, ours=True), expected) < 1e-5
    for_second = read_lora(LoraConfig(str(path), component="transformer_2")).parts["transformer_2"]
    assert for_second["blocks.0.attn1.to_k"].factor == 12 / RANK
    assert for_second["blocks.1.attn1.to_k"].factor == 6 / RANK
    assert for_second["blocks.1.attn2.to_q"].factor == 2 / RANK


def test_a_file_for_each_expert(tmp_path: Path) -> None:
    folder = write_tiny_wan(tmp_path / "experts", boundary_ratio=0.9)
    path = write(tmp_path / "a.safetensors", lora_tensors())
    plain = load_pipeline(str(folder), device="cpu").transformer
    changed = load_pipeline(str(folder), device="cpu", lora=[{"path": path, "component": "transformer_2"}]).transformer
    assert torch.equal(velocity(changed, ours=True, expert=0), velocity(plain, ours=True, expert=0))
    assert relative(velocity(changed, ours=True, expert=1), velocity(plain, ours=True, expert=1)) > 1e-2


def test_the_recipe_says_which_files_are_in(tiny_wan_folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", lora_tensors())
    recipe = load_pipeline(str(tiny_wan_folder), device="cpu", lora=[(path, 0.5)]).recipe
    assert list(recipe["runtime"]["lora"]) == [{"path": path, "scale": 0.5, "component": "transformer"}]
    assert RuntimeConfig.from_dict(recipe["runtime"]).lora == (LoraConfig(path, 0.5),)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_lora_for_another_model_names_its_keys(tiny_wan_folder: Path, tmp_path: Path) -> None:
    other = {key.replace("attn1", "self_attn"): value for key, value in lora_tensors().items()}
    path = write(tmp_path / "other.safetensors", other)
    with pytest.raises(ModelLoadError, match=r"for another model: 2 of its 4 modules .*: blocks.0.self_attn.to_q"):
        load_pipeline(str(tiny_wan_folder), device="cpu", lora=[path])
    wide = {key: value.repeat(1, 2) if "lora_A" in key else value for key, value in lora_tensors().items()}
    path = write(tmp_path / "wide.safetensors", wide)
    with pytest.raises(ModelLoadError, match=r"to_q is \[64, 64\], the LoRA's \[64, 128\]"):
        load_pipeline(str(tiny_wan_folder), device="cpu", lora=[path])


@pytest.mark.parametrize(
    ("rename", "told"),
    [
        (lambda key: key.replace("lora_A", "lora_down"), "4 of 8 keys are others"),
        (lambda key: key.replace("transformer.", "diffusion_model."), "8 of 8 keys are others"),
        (lambda key: key.replace("transformer.", "text_encoder."), "8 of 8 keys are others"),
    ],
)
def test_another_format_is_named(tmp_path: Path, rename: Callable[[str], str], told: str) -> None:
    path = write(tmp_path / "a.safetensors", {rename(key): value for key, value in lora_tensors().items()})
    with pytest.raises(ModelLoadError, match=told):
        read_lora(LoraConfig(path))


def test_a_half_a_convolution_odd_settings_and_dora_are_refused(tmp_path: Path) -> None:
    half = {key: value for key, value in lora_tensors().items() if "to_q.lora_B" not in key}
    with pytest.raises(ModelLoadError, match=r"to_q has only one of lora_A.weight and lora_B.weight"):
        read_lora(LoraConfig(write(tmp_path / "half.safetensors", half)))
    deep = {key: value[..., None, None].contiguous() for key, value in lora_tensors().items()}
    with pytest.raises(ModelLoadError, match="LoRAs of convolutions are not supported"):
        read_lora(LoraConfig(write(tmp_path / "deep.safetensors", deep)))
    for pattern, told in (({"(": 2}, "alpha_pattern: '\\('"), ([1], "expected names with numbers")):
        path = write(tmp_path / "odd.safetensors", lora_tensors(), {"transformer.alpha_pattern": pattern})
        with pytest.raises(ModelLoadError, match=told):
            read_lora(LoraConfig(path))
    path = write(tmp_path / "dora.safetensors", lora_tensors(), {"transformer.use_dora": True})
    with pytest.raises(ModelLoadError, match="DoRA is not supported"):
        read_lora(LoraConfig(path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file"):
        read_lora(LoraConfig(str(tmp_path / "none.safetensors")))
    (tmp_path / "a.bin").write_bytes(b"pickle")
    with pytest.raises(ModelLoadError, match="a pickle can run code"):
        read_lora(LoraConfig(str(tmp_path / "a.bin")))
    path = Path(write(tmp_path / "a.safetensors", lora_tensors()))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"a.safetensors"):
        read_lora(LoraConfig(str(path)))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("a.safetensors", "expected a list of files"),
        ([3], "expected a path"),
        ([{"path": "a", "strength": 1}], "unknown key 'strength'"),
        ([{"scale": 1}], "'path' is missing"),
        ([("a", "strong")], "lora.scale: expected a number"),
        ([("a", float("inf"))], "lora.scale: expected a number"),
        ([{"path": "a", "component": "vae"}], "lora.component: unknown value 'vae'"),
    ],
)
def test_a_wrong_choice_is_named(value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        RuntimeConfig(lora=value)
