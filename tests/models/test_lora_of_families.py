"""A LoRA on every linear map of every family's transformer: merged at load, it equals what diffusers' own
load_lora_weights and fuse_lora make of it, whatever our layers fuse."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family_parity import record_latents
from safetensors.torch import save_file
from tiny_families import WRITERS, small_request
from torch import nn

from diffusion_runtime import load_pipeline
from diffusion_runtime.config import LoraConfig
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.lora import read_lora

# What importing diffusers' pipelines says about packages that are not here, and peft about names of modules.
pytestmark = pytest.mark.filterwarnings("ignore")
RANK, SCALE = 3, 0.7
# diffusers' pipeline of HunyuanVideo-1.5 loads none.
FAMILIES = tuple(family for family in WRITERS if family != "hunyuan_video_15")


def write_lora(transformer: nn.Module, path: Path) -> str:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            down = torch.randn(RANK, module.in_features, generator=generator) / module.in_features**0.5
            up = torch.randn(module.out_features, RANK, generator=generator)
            tensors[f"transformer.{name}.lora_A.weight"] = 0.5 * down
            tensors[f"transformer.{name}.lora_B.weight"] = 0.1 * up
    save_file(tensors, path)
    return str(path)


def last_latents(
    folder: Path, kept: list[torch.Tensor], **how: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """After the last step; the transformer's weights; how many frames there are."""
    pipeline = load_pipeline(str(folder), device="cpu", dtype="float32", **how)
    kept.clear()
    media = pipeline(small_request(pipeline))
    return kept[-1].clone(), pipeline.transformer.state_dict(), len(media.frames)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def their_outputs(theirs: Any, num_frames: int) -> list[torch.Tensor]:
    """What their transformer predicts, step by step."""
    outputs: list[torch.Tensor] = []
    hook = theirs.transformer.register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
    theirs.set_progress_bar_config(disable=True)
    frames = {"num_frames": num_frames} if num_frames > 1 else {}
    theirs(
        prompt="a red circle",
        height=64,
        width=64,
        num_inference_steps=2,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
        **frames,
    )
    hook.remove()
    return [output[0] if isinstance(output, list | tuple) else output for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_at_load_equals_diffusers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their adapters beside the weights give what their fused weights give, and those are ours, to the number."""
    from diffusers import DiffusionPipeline

    folder = WRITERS[family](tmp_path / "model")
    theirs = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    path = write_lora(theirs.transformer, tmp_path / "lora.safetensors")
    kept = record_latents(monkeypatch)
    plain, _, num_frames = last_latents(folder, kept)
    theirs.load_lora_weights(path, adapter_name="only")
    theirs.set_adapters("only", SCALE)
    beside = their_outputs(theirs, num_frames)
    theirs.set_adapters("only", 1.0)
    theirs.fuse_lora(lora_scale=SCALE)
    theirs.unload_lora_weights()
    fused = their_outputs(theirs, num_frames)
    assert len(fused) >= 2
    for one, other in zip(fused, beside, strict=True):
        assert relative(one, other) < 1e-5
    merged = Path(shutil.copytree(folder, tmp_path / "merged"))
    theirs.transformer.save_pretrained(merged / "transformer")

    expected, their_weights, _ = last_latents(merged, kept)
    found, our_weights, _ = last_latents(folder, kept, lora=[(path, SCALE)])
    assert relative(plain, expected) > 1e-3
    for name, weight in their_weights.items():
        assert torch.allclose(our_weights[name], weight, rtol=1e-5, atol=1e-6), name
    assert relative(found, expected) < 1e-5


# What kohya's trainer, ComfyUI and the models' own authors call the maps of these models.
FOREIGN = {
    "kohya": "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight",
    "comfyui": "diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight",
    "an older diffusers": "transformer.transformer_blocks.0.attn.to_q.lora.down.weight",
    "lokr": "lora_unet_blocks_0_self_attn_q.lokr_w1",
}


@pytest.mark.parametrize("key", FOREIGN.values(), ids=FOREIGN)
def test_formats_that_diffusers_would_convert_are_said_to_be_others(tmp_path: Path, key: str) -> None:
    path = tmp_path / "foreign.safetensors"
    save_file({key: torch.zeros(3, 8)}, path)
    with pytest.raises(ModelLoadError) as caught:
        read_lora(LoraConfig(str(path)))
    assert key in str(caught.value)
    assert "pipe.load_lora_weights(file, adapter_name='default'), then" in str(caught.value)


def test_names_of_the_authors_are_not_in_the_transformer(tmp_path: Path) -> None:
    folder = WRITERS["flux1"](tmp_path / "model")
    path = tmp_path / "foreign.safetensors"
    name = "double_blocks.0.img_attn.qkv"
    save_file({f"{name}.lora_A.weight": torch.zeros(3, 8), f"{name}.lora_B.weight": torch.zeros(8, 3)}, path)
    with pytest.raises(ModelLoadError, match=rf"1 of its 1 modules .*{name}.*in another format: diffusers converts"):
        load_pipeline(str(folder), device="cpu", lora=[str(path)])
