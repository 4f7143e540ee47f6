"""LoRA files that change text encoders, and what stands between these and a transformer: merged as a transformer's are,
wherever the weights wait, switched to the bit, and every key applied or named."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded_pipelines import planned
from safetensors.torch import load_file, save_file
from tables import table
from tiny_flux1 import write_tiny_flux1
from tiny_ltx2 import write_tiny_ltx2
from tiny_models import write_tiny_wan

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.text_encoders.interface import Conditions
from diffusion_runtime.text_encoders.offloaded import OffloadedTextEncoder, ReloadedTextEncoder, modules_of

HOW: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
RANK, STRENGTH = 3, 0.7
CLIP, T5 = "encoder.layers.1.self_attn.q_proj", "encoder.block.0.layer.0.SelfAttention.q"
IN_TRANSFORMER = "lora_unet_double_blocks_0_img_attn_qkv"


def random(*shape: int) -> torch.Tensor:
    return 0.2 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def low_rank(key: str, rows: int, columns: int, *, peft: bool = False) -> dict[str, torch.Tensor]:
    down, up = ("lora_A", "lora_B") if peft else ("lora_down", "lora_up")
    return {f"{key}.{down}.weight": random(RANK, columns), f"{key}.{up}.weight": random(rows, RANK)}


def written(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    save_file(dict(tensors), path)
    return str(path)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def parameter(pipeline: Pipeline, end: str) -> torch.Tensor:
    """The one parameter of a pipeline's text encoders whose name ends so."""
    named = [each for module in modules_of(pipeline.text_encoder) for each in module.named_parameters()]
    (found,) = [value for name, value in named if name.endswith(f"{end}.weight")]
    return found


def pooled(conditions: Conditions) -> torch.Tensor:
    assert conditions.pooled is not None
    return conditions.pooled


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_flux1(tmp_path_factory.mktemp("flux") / "model")


# What each writer calls these two modules.
SPELLINGS = {
    "kohya": ("lora_te1_text_model_encoder_layers_1_self_attn_q_proj", f"lora_te3_{T5.replace('.', '_')}"),
    "kohya, T5 as the second": (f"lora_te1_{CLIP.replace('.', '_')}", f"lora_te2_{T5.replace('.', '_')}"),
    "diffusers": (f"text_encoder.text_model.{CLIP}", f"text_encoder_2.{T5}"),
    "ComfyUI": (f"text_encoders.clip_l.transformer.text_model.{CLIP}", f"text_encoders.t5xxl.transformer.{T5}"),
    "peft, of an encoder alone": (f"base_model.model.text_model.{CLIP}", f"base_model.model.{T5}"),
    "LyCORIS": (f"lycoris_te1_text_model_{CLIP.replace('.', '_')}", f"lycoris_te2_{T5.replace('.', '_')}"),
}


@table("spelling", SPELLINGS)
def test_clip_and_t5_are_merged_in_every_spelling(spelling: str, flux: Path, tmp_path: Path) -> None:
    """In float64, W + strength * up @ down; what no key names stays as it is."""
    peft = spelling.startswith(("peft", "diffusers"))
    tensors = low_rank(IN_TRANSFORMER, 96, 32)
    expected = {}
    for key, name, component in zip(SPELLINGS[spelling], (CLIP, T5), ("text_encoder", "text_encoder_2"), strict=True):
        (weight,) = [value for tensor, value in weights(flux / component).items() if tensor.endswith(f"{name}.weight")]
        added = low_rank(key, *weight.shape, peft=peft)
        down, up = added.values()
        tensors |= added
        expected[name] = weight.double() + STRENGTH * up.double() @ down.double()
    pipeline = load_pipeline(str(flux), **HOW, lora=[(written(tmp_path / "a.safetensors", tensors), STRENGTH)])
    for name, value in expected.items():
        assert float((parameter(pipeline, name) - value).abs().max()) < 1e-6, name
    assert pipeline.loras[0].num_applied == len(tensors)
    plain = load_pipeline(str(flux), **HOW)
    other = CLIP.replace("q_proj", "k_proj")
    assert torch.equal(parameter(pipeline, other), parameter(plain, other))


def flux_file(folder: Path) -> str:
    tensors = low_rank(IN_TRANSFORMER, 96, 32) | low_rank(SPELLINGS["kohya"][0], 32, 32)
    t5 = next(value for name, value in weights(folder / "text_encoder_2").items() if name.endswith(f"{T5}.weight"))
    return written(folder.parent / "both.safetensors", tensors | low_rank(SPELLINGS["kohya"][1], *t5.shape))


def test_switched_files_are_bit_for_bit_loaded_ones(flux: Path) -> None:
    """Conditions that were encoded with other files are not used again."""
    path, request = flux_file(flux), GenerationRequest("a ring", height=64, width=64, num_inference_steps=1)
    loaded, switched = load_pipeline(str(flux), **HOW, lora=[path]), load_pipeline(str(flux), **HOW)
    plain = switched(request).frames
    encoded = switched.text_encoder.encode(["a ring"])
    switched.set_loras([path])
    found, expected = switched.text_encoder.encode(["a ring"]), loaded.text_encoder.encode(["a ring"])
    assert torch.equal(found.embeddings, expected.embeddings)
    assert torch.equal(pooled(found), pooled(expected))
    assert not torch.equal(pooled(found), pooled(encoded))
    assert (switched(request).frames == loaded(request).frames).all()
    switched.set_loras([])
    assert (switched(request).frames == plain).all()


def offloaded_pipeline(folder: Path, how: str, **values: Any) -> Pipeline:
    """how: `model` or `layers`; `files`, where the weights wait in their files, or `blocks of files`."""
    prepared = prepare(RuntimeConfig(model_path=str(folder), **HOW, **values))
    assert isinstance(prepared, PreparedModel)
    in_files = "files" in how
    prepared = planned(prepared, "layers" if in_files else how, {}, waits_in_files=in_files)
    plan = prepared.description.memory
    assert plan is not None
    plan = dataclasses.replace(plan, demand=dataclasses.replace(plan.demand, whole_text="small" * (how == "files")))
    pipeline = dataclasses.replace(prepared, description=dataclasses.replace(prepared.description, memory=plan)).load()
    assert isinstance(pipeline.text_encoder, ReloadedTextEncoder if how == "files" else OffloadedTextEncoder)
    return pipeline


@table("how", ("model", "layers", "files", "blocks of files"))
def test_offloaded_encoders_are_changed_too(how: str, flux: Path) -> None:
    path = flux_file(flux)
    pipeline = offloaded_pipeline(flux, how, lora=[path])
    expected = load_pipeline(str(flux), **HOW, lora=[path]).text_encoder.encode(["a ring"])
    plain = load_pipeline(str(flux), **HOW).text_encoder.encode(["a ring"])
    for conditions in (expected, plain):
        found = pipeline.text_encoder.encode(["a ring"])
        assert torch.equal(found.embeddings, conditions.embeddings)
        assert torch.equal(pooled(found), pooled(conditions))
        pipeline.set_loras([])


def test_keys_of_an_encoder_that_is_not_there_are_an_error_whose_remedy_works(flux: Path, tmp_path: Path) -> None:
    tensors = low_rank(IN_TRANSFORMER, 96, 32)
    others = low_rank("lora_te2_text_model_encoder_layers_40_self_attn_q_proj", 8, 8)
    with pytest.raises(ModelLoadError, match=r"2 of its 4 keys change a text encoder.*save the file without these"):
        load_pipeline(str(flux), **HOW, lora=[written(tmp_path / "a.safetensors", tensors | others)])
    load_pipeline(str(flux), **HOW, lora=[written(tmp_path / "a.safetensors", tensors)])


def test_a_module_of_ours_is_changed(tmp_path: Path) -> None:
    """Wan's UMT5."""
    folder = write_tiny_wan(tmp_path / "model")
    (weight,) = [value for name, value in weights(folder / "text_encoder").items() if name.endswith(f"{T5}.weight")]
    added = low_rank(f"text_encoder.{T5}", *weight.shape)
    down, up = added.values()
    pipeline = load_pipeline(str(folder), **HOW, lora=[written(tmp_path / "a.safetensors", added)])
    assert torch.allclose(parameter(pipeline, T5), weight + up @ down, atol=1e-6)


@table("key", ("text_embedding_projection.aggregate_embed", "connectors.text_proj_in"))
def test_the_connectors_of_ltx2_are_changed(key: str, tmp_path: Path) -> None:
    folder = write_tiny_ltx2(tmp_path / "model")
    (weight,) = [value for name, value in weights(folder / "connectors").items() if name == "text_proj_in.weight"]
    q = weights(folder / "transformer")["transformer_blocks.0.attn1.to_q.weight"]
    added = low_rank(key, *weight.shape, peft=True)
    down, up = added.values()
    tensors = added | low_rank("diffusion_model.transformer_blocks.0.attn1.to_q", *q.shape, peft=True)
    pipeline = load_pipeline(str(folder), **HOW, lora=[written(tmp_path / "a.safetensors", tensors)])
    assert torch.allclose(parameter(pipeline, "text_proj_in"), weight + up @ down, atol=1e-6)
    assert pipeline.loras[0].num_applied == 4
