"""LoRA files of a diffusers pipeline: through its own loader, every key accounted for, and switched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tables import table
from tiny_flux1 import write_tiny_flux1
from tiny_models import write_tiny_wan

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, ModelLoadError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.text_encoders.offloaded import modules_of

# What peft remarks about second adapters.
pytestmark = pytest.mark.filterwarnings("ignore")
Q = "blocks.0.attn1.to_q"
HOW: dict[str, Any] = {"device": "cpu", "dtype": "float32", "backend": "diffusers"}


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_wan(tmp_path_factory.mktemp("wan") / "model")


def random(*shape: int) -> torch.Tensor:
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def low_rank(key: str, rank: int = 2, size: int = 64) -> dict[str, torch.Tensor]:
    return {f"{key}.lora_A.weight": random(rank, size), f"{key}.lora_B.weight": random(size, rank)}


def written(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    save_file(tensors, path)
    return str(path)


def prediction(pipeline: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    latents, text = torch.randn(1, 16, 2, 4, 6, generator=generator), torch.randn(1, 7, 32, generator=generator)
    with torch.no_grad():
        return pipeline.pipeline.transformer(latents, torch.tensor([700.0]), text, return_dict=False)[0]


def test_files_are_applied_with_their_strengths_and_switched(wan: Path, tmp_path: Path) -> None:
    one = written(tmp_path / "one.safetensors", low_rank(f"transformer.{Q}"))
    two = written(tmp_path / "two.safetensors", low_rank(f"transformer.{Q}", rank=3))
    pipeline = load_pipeline(str(wan), **HOW)
    plain = prediction(pipeline)
    weight = pipeline.pipeline.transformer.get_submodule(Q).weight
    before = weight.detach().clone()
    for loras in ([(one, 0.5)], [(one, 0.5), (two, -2.0)], [(two, 1.0)]):
        pipeline.set_loras(loras)
        found = prediction(pipeline)
        assert torch.equal(prediction(load_pipeline(str(wan), **HOW, lora=loras)), found)
        assert [lora["path"] for lora in pipeline.recipe["runtime"]["lora"]] == [path for path, _ in loras]
        pipeline.set_loras([])
        assert torch.equal(prediction(pipeline), plain)
        linear = pipeline.pipeline.transformer.get_submodule(Q)
        with torch.no_grad():
            for path, strength in loras:
                down, up = low_rank("", rank=2 if path == one else 3).values()
                linear.weight += strength * up @ down
            expected = prediction(pipeline)
            linear.weight.copy_(before)
        assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_keys_that_the_conversion_drops_are_said_with_every_generation(wan: Path, tmp_path: Path) -> None:
    """diffusers leaves out the differences of norms."""
    tensors = low_rank("diffusion_model.blocks.0.self_attn.q") | {
        "diffusion_model.blocks.0.self_attn.norm_q.diff": random(64),
        "diffusion_model.blocks.0.self_attn.norm_k.diff": torch.zeros(64),
        "diffusion_model.blocks.0.self_attn.q.alpha": torch.tensor(1.0),
    }
    pipeline = load_pipeline(str(wan), **HOW, lora=[written(tmp_path / "a.safetensors", tensors)])
    media = pipeline(GenerationRequest("a ring", height=16, width=16, num_frames=1, num_inference_steps=1))
    (note,) = [note for note in media.recipe["notes"] if "left out" in note]
    assert pipeline.rules.unused(GenerationRequest("a ring")) == (note,)
    assert "left out 1 of its keys: diffusion_model.blocks.0.self_attn.norm_q.diff. A native model" in note


def test_a_folder_is_read_as_natively_and_alphas_that_diffusers_does_not_read_are_refused(
    wan: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "peft"
    folder.mkdir()
    written(folder / "adapter_model.safetensors", low_rank(f"transformer.{Q}"))
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({"r": 2, "lora_alpha": 2}))
    described = inspect_pipeline(RuntimeConfig(str(wan), **HOW, lora=[str(folder)]))
    assert described.rules.unused(GenerationRequest("a ring")) == ()
    for settings, told in (({"r": 2, "lora_alpha": 8}, "alpha 8 for"), ({"use_rslora": True}, "alpha 2, rslora for")):
        config.write_text(json.dumps(settings))
        with pytest.raises(ModelLoadError, match=f"adapter_config.json says {told} rank 2, which diffusers does not"):
            inspect_pipeline(RuntimeConfig(str(wan), **HOW, lora=[str(folder)]))
    save_file(low_rank(f"transformer.{Q}"), tmp_path / "a.safetensors", {"network_alpha": "1"})
    with pytest.raises(ModelLoadError, match="its metadata says alpha 1 for rank 2"):
        inspect_pipeline(RuntimeConfig(str(wan), **HOW, lora=[str(tmp_path / "a.safetensors")]))


def fused(folder: Path) -> str:
    key = "lora_unet_double_blocks_0_img_attn_qkv"
    tensors = {f"{key}.lora_down.weight": random(2, 32), f"{key}.lora_up.weight": random(96, 2)}
    return written(folder / "a.safetensors", {**tensors, f"{key}.alpha": torch.tensor(0.5)})


def test_fused_maps_of_kohya_are_all_applied(tmp_path: Path) -> None:
    folder = write_tiny_flux1(tmp_path / "model")
    pipeline = load_pipeline(str(folder), **HOW, lora=[fused(tmp_path)])
    (lora,) = pipeline._loras
    assert lora.dropped == ()
    native = load_pipeline(str(folder), device="cpu", lora=[fused(tmp_path)]).transformer.state_dict()
    pipeline.pipeline.fuse_lora()
    attention = pipeline.pipeline.transformer.get_submodule("transformer_blocks.0.attn")
    theirs = torch.cat([attention.get_submodule(f"to_{part}").base_layer.weight for part in "qkv"])
    assert torch.allclose(native["double_blocks.0.joint_attention.qkv.weight"], theirs, atol=1e-6)


BAD: dict[str, tuple[Callable[[], dict[str, torch.Tensor]], str]] = {
    "matches nothing": (
        lambda: low_rank(f"transformer.{Q}") | low_rank("transformer.blocks.7.attn1.to_k"),
        r"1 of its modules are not in it: transformer.blocks.7.attn1.to_k",
    ),
    "another family": (lambda: low_rank("transformer.layers.0.attention.to_q"), "not in it|cannot load it"),
    "NaN": (lambda: {key: value * torch.nan for key, value in low_rank(Q).items()}, "holds NaN"),
    "another size": (lambda: low_rank(f"transformer.{Q}", size=32), "diffusers cannot load it"),
    "no lora": (lambda: {"weight": random(3, 3)}, "Use a file that was made for this model|cannot load it"),
}


def test_what_a_pipeline_has_not_is_refused_before_its_weights(wan: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "a.safetensors", low_rank(f"transformer.{Q}"))
    with pytest.raises(ConfigError, match="this pipeline has no transformer_2; leave the component out"):
        inspect_pipeline(RuntimeConfig(str(wan), **HOW, lora=[{"path": path, "component": "transformer_2"}]))
    path = written(tmp_path / "b.safetensors", low_rank("transformer.blocks.7.attn1.to_k"))
    with pytest.raises(ModelLoadError, match=r"1 of its modules are not in it: transformer\.blocks\.7\.attn1\.to_k"):
        inspect_pipeline(RuntimeConfig(str(wan), **HOW, lora=[path]))
    two = write_tiny_wan(tmp_path / "two", boundary_ratio=0.9)
    with pytest.raises(ConfigError, match="this pipeline has two transformers: give component"):
        inspect_pipeline(RuntimeConfig(str(two), **HOW, lora=[str(tmp_path / "a.safetensors")]))


@table("case", BAD)
def test_bad_files_are_refused_and_change_nothing(case: str, wan: Path, tmp_path: Path) -> None:
    make, told = BAD[case]
    path = written(tmp_path / "bad.safetensors", make())
    pipeline = load_pipeline(
        str(wan), **HOW, lora=[written(tmp_path / "good.safetensors", low_rank(f"transformer.{Q}"))]
    )
    before = prediction(pipeline)
    with pytest.raises(ModelLoadError, match=told) as caught:
        pipeline.set_loras([path])
    assert "bad.safetensors" in str(caught.value)
    assert torch.equal(prediction(pipeline), before)


def test_pipelines_that_load_none_and_missing_files_fail_before_the_weights(
    image_folder: Path, wan: Path, tmp_path: Path
) -> None:
    config = RuntimeConfig(str(wan), backend="diffusers", lora=[str(tmp_path / "none.safetensors")])
    with pytest.raises(ModelLoadError, match=r"none.safetensors: no such file"):
        inspect_pipeline(config)
    path = written(tmp_path / "a.safetensors", low_rank(f"transformer.{Q}"))
    second = {"path": path, "component": "transformer_2"}
    with pytest.raises(ConfigError, match="this pipeline has no transformer_2"):
        load_pipeline(str(wan), **HOW, lora=[second])
    with pytest.raises(DiffusionRuntimeError):
        load_pipeline(str(image_folder), device="cpu", lora=[path])


def test_clip_layers_are_applied_by_the_installed_transformers_names(tmp_path: Path) -> None:
    """transformers 5 has CLIP's layers without the `text_model.` that files have; the same as natively."""
    folder = write_tiny_flux1(tmp_path / "model")
    q = "encoder.layers.0.self_attn.q_proj"
    for name in (f"lora_te1_text_model_{q.replace('.', '_')}", f"text_encoder.text_model.{q}"):
        down, up = ("lora_down", "lora_up") if name.startswith("lora_te1") else ("lora_A", "lora_B")
        added = {f"{name}.{down}.weight": random(2, 32), f"{name}.{up}.weight": random(32, 2)}
        fused_key = "lora_unet_double_blocks_0_img_attn_qkv"
        own = {f"{fused_key}.lora_down.weight": random(2, 32), f"{fused_key}.lora_up.weight": random(96, 2)}
        own |= {f"{key}.alpha": torch.tensor(1.0) for key in (fused_key, name)}
        if not name.startswith("lora_te1"):
            key = "transformer.transformer_blocks.0.attn.to_q"
            own = {f"{key}.lora_A.weight": random(2, 32), f"{key}.lora_B.weight": random(32, 2)}
        path = written(tmp_path / "clip.safetensors", added | own)
        pipeline = load_pipeline(str(folder), **HOW, lora=[path])
        layer = pipeline.pipeline.text_encoder.get_submodule(q)
        native = load_pipeline(str(folder), device="cpu", dtype="float32", lora=[path])
        (ours,) = [
            value
            for module in modules_of(native.text_encoder)
            for each, value in module.named_parameters()
            if each.endswith(f"{q}.weight")
        ]
        theirs = layer.base_layer.weight + layer.get_delta_weight("lora_0")
        assert torch.allclose(theirs, ours, atol=1e-6)
