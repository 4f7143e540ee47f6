"""--lora, --lora-path and --lora-scale; `info` of a LoRA file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_support import Command
from safetensors.torch import save_file
from sample_media import make_media
from tiny_flux1 import write_tiny_flux1

from diffusion_runtime.cli.lora_flags import pair_loras, parse_lora
from diffusion_runtime.errors import UsageError
from diffusion_runtime.weights.lora.shipped import lora_path


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


def test_a_dry_run_says_which_files_are_in_and_what_of_them_is_not_applied(
    command: Command, tmp_path: Path, tiny_wan_folder: Path
) -> None:
    """And what a distilled file is not made for, where no preset is known for it."""
    path = lora_file(tmp_path).replace("lightning", "hyper")
    Path(lora_file(tmp_path)).rename(path)
    dry = ("generate", "a ring", "--model-path", tiny_wan_folder, "--lora", f"{path}@0.5", "--dry-run")
    dry = (*dry, "--num-inference-steps", "30")
    text = "".join(command(*dry).err.split())
    assert f"{path}@0.5" in text
    assert "1ofits4keyswerenotapplied" in text
    assert "lookslikeaLoRAfor4stepswithoutguidance" in text
    remarks = command(*dry, "--json").json["items"][0]["remarks"]
    assert any("1 of its 4 keys were not applied" in remark for remark in remarks)


def test_the_shipped_lora_goes_by_its_name_everywhere(command: Command) -> None:
    values = command("info", "emoji-fast", "--json").json
    assert (values["families"], values["num_modules"]) == (["Wan"], 56)
    missing = command("generate", "a ring", "--dry-run", "--lora", "low_noise=a.safetensors:0.8")
    assert (
        "low_noise=a.safetensors: no such file. Give a file or a folder on this machine, or the hub's ORG/NAME"
        in missing.said
    )
    refused = command("generate", "a ring", "--dry-run", "--lora", "emoji_fast")
    assert (refused.code, "no such file. Did you mean 'emoji-fast'?" in refused.said) == (1, True), refused.said


def test_preset_fast_brings_its_lora_once(command: Command, tiny_wan_folder: Path) -> None:
    dry = ("generate", "a star", "--dry-run", "--preset", "fast")
    folder = str(lora_path("emoji-fast"))
    for given, expected in (
        ((), [("emoji-fast", 1.0)]),
        (("--lora", "emoji-fast@0.5"), [("emoji-fast", 0.5)]),
        (("--lora", folder), [(folder, 1.0)]),
    ):
        found = command(*dry, "--model-path", "emoji", *given, "--json")
        values = found.json
        assert [(lora["path"], lora["scale"]) for lora in values["runtime"]["lora"]] == expected
        request = values["items"][0]["request"]
        # The levels are as they run, whatever shift the model's own schedule has.
        assert (request["sigmas"], request["flow_shift"]) == ([1.0, 0.977, 0.933, 0.824], 1.0)
        assert values["items"][0]["remarks"] == []
        assert "warning" not in found.err
    for elsewhere in (("--model-path", str(tiny_wan_folder)), ("--model-path", "shapes"), ("--backend", "diffusers")):
        refused = command(*dry, *elsewhere)
        assert refused.code == 2
        said = "'fast' is for the embedded model emoji alone (--model-path emoji, native)"
        assert said in refused.said, refused.said
        assert "LoRA" not in refused.said


def test_a_preset_of_a_config_stands_for_itself(command: Command) -> None:
    """No LoRA and no noise levels of the model's own preset of that name."""
    Path("mine.yaml").write_text("presets: {fast: {num_inference_steps: 2}}")
    values = command("generate", "a ring", "--dry-run", "--json", "--preset", "fast", "--config", "mine.yaml").json
    request = values["items"][0]["request"]
    assert (values["runtime"]["lora"], request["num_inference_steps"], request["sigmas"]) == ([], 2, None)


def test_a_recipe_that_comes_before_preset_fast_is_an_error_and_not_a_mixture(command: Command) -> None:
    recipe = {"request": {"prompt": "a ring", "num_inference_steps": 12}, "runtime": {"model_path": "emoji"}}
    make_media(num_frames=1, recipe=recipe).save("x.png")
    refused = command("generate", "--from", "x.png", "--preset", "fast", "--dry-run")
    assert refused.code == 2
    assert "it is for the LoRA emoji-fast, and the recipe of x.png, which comes first, for the model" in refused.said


def test_a_lora_flag_reaches_the_recipe(command: Command, tmp_path: Path, tiny_wan_folder: Path) -> None:
    path = lora_file(tmp_path)
    done = command(
        "generate", "a ring", "--model-path", tiny_wan_folder, "--lora", f"{path}@0.5", "--dry-run", "--json"
    )
    assert done.code == 0, done.err
    assert f'"path": "{path}"' in done.out
    assert '"scale": 0.5' in done.out
