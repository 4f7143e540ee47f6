"""--lora, --lora-path and --lora-scale; `info` of a LoRA file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_support import Command
from safetensors.torch import save_file
from tiny_flux1 import write_tiny_flux1

from diffusion_runtime.cli.lora_flags import pair_loras, parse_lora
from diffusion_runtime.errors import UsageError


def test_scales_go_with_the_files_in_their_order() -> None:
    assert pair_loras(["a", "b"], [0.5]) == [{"path": "a", "scale": 0.5}, {"path": "b", "scale": 1.0}]
    assert pair_loras([], []) is None


def test_a_scale_without_a_file_is_an_error() -> None:
    with pytest.raises(UsageError, match="--lora-scale is given 2 times for 1 --lora-path"):
        pair_loras(["a"], [1.0, 2.0])


def test_a_file_with_its_strength_and_transformer() -> None:
    for text, expected in {
        "a.safetensors": {"path": "a.safetensors"},
        "a.safetensors@0.8": {"path": "a.safetensors", "scale": 0.8},
        "transformer_2=low.safetensors@-1": {"path": "low.safetensors", "scale": -1.0, "component": "transformer_2"},
        "both=a": {"path": "a", "component": "both"},
        # Names of files.
        "rank=64.safetensors": {"path": "rank=64.safetensors"},
        "me@home/a.safetensors": {"path": "me@home/a.safetensors"},
        "@0.5": {"path": "@0.5"},
    }.items():
        assert parse_lora(text) == expected, text
    assert pair_loras(["a"], [0.5], ["b@2"]) == [{"path": "a", "scale": 0.5}, {"path": "b", "scale": 2.0}]


def lora_file(folder: Path) -> str:
    key = "diffusion_model.blocks.0.self_attn.q"
    tensors = {f"{key}.lora_down.weight": torch.zeros(4, 64), f"{key}.lora_up.weight": torch.zeros(64, 4)}
    tensors |= {f"{key}.alpha": torch.tensor(2.0), "diffusion_model.img_emb.proj.0.diff": torch.zeros(64)}
    path = folder / "wan_lightning_4step.safetensors"
    save_file(tensors, path)
    return str(path)


def test_info_says_what_a_lora_file_is_and_how_much_of_it_applies(
    command: Command, tmp_path: Path, tiny_wan_folder: Path
) -> None:
    path = lora_file(tmp_path)
    shown = command("info", path)
    assert shown.code == 0
    text = " ".join(shown.out.split())
    for told in (
        "original names (ComfyUI)",
        "low rank, whole differences",
        "family Wan",
        "rank 4",
        "keys 4",
        "4 steps",
    ):
        assert told in text, told
    values = command("info", path, "--model-path", tiny_wan_folder, "--json").json
    assert values["schema"] == "diffusion_runtime.lora/1"
    assert (values["families"], values["num_applied"], values["num_keys"]) == (["Wan"], 3, 4)
    assert "1 of its 4 keys were not applied" in values["remarks"][0]


def test_info_of_a_file_for_another_model_is_an_error(command: Command, tmp_path: Path) -> None:
    refused = command("info", lora_file(tmp_path), "--model-path", write_tiny_flux1(tmp_path / "model"))
    assert refused.code == 1
    assert "this LoRA is for Wan, and the model is FLUX.1" in refused.said
    assert command("info", "a.mp4", "--model-path", "shapes").code == 2


def test_a_lora_flag_reaches_the_recipe(command: Command, tmp_path: Path, tiny_wan_folder: Path) -> None:
    path = lora_file(tmp_path)
    done = command(
        "generate", "a ring", "--model-path", tiny_wan_folder, "--lora", f"{path}@0.5", "--dry-run", "--json"
    )
    assert done.code == 0, done.err
    assert f'"path": "{path}"' in done.out
    assert '"scale": 0.5' in done.out
