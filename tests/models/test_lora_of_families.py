"""A LoRA on every linear map of every family's transformer: merged at load, it equals what diffusers' own
load_lora_weights and fuse_lora make of it, whatever our layers fuse."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_parity import record_latents
from safetensors.torch import load_file, save_file
from tables import table
from tiny_families import WRITERS, small_request
from torch import nn

from diffusion_runtime import Pipeline, load_pipeline

# What importing diffusers' pipelines says about packages that are not here, and peft about names of modules.
pytestmark = pytest.mark.filterwarnings("ignore")
RANK, SCALE = 3, 0.7
# diffusers' pipelines of these load none, or are modular; for the others: the test_pipeline.py of their folders.
OTHERS = (
    "hunyuan_video_15",
    "longcat_image",
    "flux3",
    "minimax_h3",
    "qwen_image_21",
    "wan_animate_2",
    "anima",
    "moss_image",
    "seedvr2",
    "scail_2",
)
FAMILIES = tuple(family for family in WRITERS if family not in OTHERS)


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


def last_latents(folder: Path, kept: list[torch.Tensor], **how: Any) -> tuple[torch.Tensor, Pipeline, int]:
    """After the last step; what made them; how many frames there are."""
    pipeline = load_pipeline(str(folder), device="cpu", dtype="float32", **how)
    kept.clear()
    media = pipeline(small_request(pipeline))
    return kept[-1].clone(), pipeline, len(media.frames)


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
def test_merged_at_load_equals_diffusers(
    family: str, tiny_folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their adapters beside the weights give what their fused weights give, and those are ours, to the number."""
    from diffusers import DiffusionPipeline

    folder = tiny_folder_of(family)
    theirs = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    path = write_lora(theirs.transformer, tmp_path / "lora.safetensors")
    kept = record_latents(monkeypatch)
    plain, switched, num_frames = last_latents(folder, kept)
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

    expected, from_theirs, _ = last_latents(merged, kept)
    found, ours, _ = last_latents(folder, kept, lora=[(path, SCALE)])
    assert relative(plain, expected) > 1e-3
    switched.set_loras([(path, SCALE)])
    our_weights, switched_weights = ours.transformer.state_dict(), switched.transformer.state_dict()
    for name, weight in from_theirs.transformer.state_dict().items():
        assert torch.allclose(our_weights[name], weight, rtol=1e-5, atol=1e-6), name
        assert torch.equal(our_weights[name], switched_weights[name]), name
    assert relative(found, expected) < 1e-5


@table("family", ("wan_animate_2", "scail_2", "seedvr2"))
def test_a_lora_is_merged_into_every_linear_map(
    family: str, tiny_folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of families that diffusers loads no LoRA files for: the parameters are those of the merged weights."""
    folder, generator = tiny_folder_of(family), torch.Generator().manual_seed(0)
    weights = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    lora, merged = {}, dict(weights)
    for name, weight in weights.items():
        module, _, kind = name.rpartition(".")
        # Of the timestep no LoRA is trained, whose files have other names for it.
        if weight.dim() == 2 and kind == "weight" and not module.startswith("emb_in"):
            down = torch.randn(RANK, weight.shape[1], generator=generator)
            up = torch.randn(weight.shape[0], RANK, generator=generator)
            lora |= {f"transformer.{module}.lora_A.weight": down, f"transformer.{module}.lora_B.weight": up}
            merged[name] = weight + SCALE * up @ down
    save_file(lora, tmp_path / "lora.safetensors")
    save_file(merged, tmp_path / "merged.safetensors")
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    expected = load_pipeline(str(folder), transformer_path=str(tmp_path / "merged.safetensors"), **given)
    found = load_pipeline(str(folder), lora=[(str(tmp_path / "lora.safetensors"), SCALE)], **given)
    plain = load_pipeline(str(folder), **given).transformer.state_dict()
    assert isinstance(found, Pipeline)
    assert isinstance(expected, Pipeline)
    changed = 0
    for name, tensor in expected.transformer.state_dict().items():
        torch.testing.assert_close(found.transformer.state_dict()[name], tensor, atol=1e-5, rtol=1e-5)
        changed += not torch.equal(tensor, plain[name])
    assert changed >= 10


@pytest.mark.slow
@pytest.mark.parametrize("family", WRITERS)
def test_loha_and_lokr_change_every_linear_map_of_every_family(family: str, tmp_path: Path) -> None:
    """As the differences do that they stand for, computed here in float64."""
    folder = WRITERS[family](tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    files: list[dict[str, torch.Tensor]] = [{}, {}]
    weights = {
        name: tensor
        for path in sorted((folder / "transformer").glob("*.safetensors"))
        for name, tensor in load_file(path).items()
        if tensor.dim() == 2 and name.endswith(".weight") and tensor.dtype.is_floating_point
    }
    for number, (name, weight) in enumerate(sorted(weights.items())):
        key, (rows, columns) = f"transformer.{name.removesuffix('.weight')}", weight.shape
        if number % 2:
            first, second = (torch.randn(sizes, generator=generator) for sizes in ((2, 1), (rows // 2, columns)))
            if rows % 2:
                continue
            parts, made = {"lokr_w1": first, "lokr_w2": second}, torch.kron(first.double(), second.double())
        else:
            shapes = {"w1_a": (rows, RANK), "w1_b": (RANK, columns), "w2_a": (rows, RANK), "w2_b": (RANK, columns)}
            halves = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
            a, b, c, d = (half.double() for half in halves.values())
            parts, made = {f"hada_{name}": half for name, half in halves.items()}, (a @ b) * (c @ d)
        files[0] |= {
            f"{key}.{part}": 0.1 * tensor if part in ("hada_w1_a", "lokr_w1") else tensor
            for part, tensor in parts.items()
        }
        files[1][f"{key}.diff"] = (0.1 * made).float()
    states = []
    for index, tensors in enumerate(files):
        save_file(tensors, tmp_path / f"{index}.safetensors")
        pipeline = load_pipeline(
            str(folder), device="cpu", dtype="float32", lora=[str(tmp_path / f"{index}.safetensors")]
        )
        states.append(pipeline.transformer.state_dict())
    plain = load_pipeline(str(folder), device="cpu", dtype="float32").transformer.state_dict()
    changed = [name for name, value in plain.items() if not torch.equal(value, states[0][name])]
    assert changed
    for name, value in states[0].items():
        assert torch.allclose(value, states[1][name], rtol=1e-6, atol=1e-6), name
