"""`--transformer-path` on the command line; `info` of a file of weights."""

from __future__ import annotations

from pathlib import Path

import fp8_files
import torch
from cli_support import Command
from gguf_files import write_gguf
from original_names import original_tensors
from safetensors.torch import load_file, save_file


def test_the_path_reaches_the_recipe_and_what_cannot_run_is_refused(command: Command, tiny_wan_folder: Path) -> None:
    generate = ("generate", "a star", "--model-path", str(tiny_wan_folder), "--dry-run")
    weights = str(tiny_wan_folder / "transformer")
    planned = command(*generate, "--transformer-path", weights, "--json").json
    assert planned["runtime"]["transformer_path"] == weights
    # A long path is broken at the end of a line.
    assert f"transformer_path{weights}" in "".join(command(*generate, "--transformer-path", weights).said.split())
    for flags, said in (
        (("--transformer-path", "lost.safetensors"), "transformer_path: lost.safetensors: no such file"),
        (("--transformer-path", str(tiny_wan_folder)), "is the folder of a whole model"),
        (("--transformer-2-path", weights), "the model has one transformer, and no transformer_2"),
        (("--transformer-path", weights, "--backend", "diffusers"), "reads the weights of its folder"),
        (("--vae-path", weights), "holds 'WanTransformer3DModel', expected 'AutoencoderKLWan'"),
        (("--vae-path", "lost.safetensors"), "vae_path: lost.safetensors: no such file or folder"),
        (("--text-encoder-path", f"{weights}/diffusion_pytorch_model.safetensors"), "holds the transformer of Wan"),
        (("--text-encoder-2-path", weights), "the model has no text_encoder_2"),
        (("--variant", "fp16"), "variant: 'fp16': no component of"),
        (("--variant", "../x"), "variant: expected a name such as fp16"),
    ):
        result = command(*generate, *flags)
        assert result.code != 0, flags
        assert said in " ".join(result.said.split()), result.said


def test_info_of_a_components_folder_and_of_other_parts(command: Command, tiny_wan_folder: Path) -> None:
    model = ("--model-path", str(tiny_wan_folder), "--json")
    values = command("info", str(tiny_wan_folder / "transformer"), *model).json
    assert (values["holds"], values["families"], values["fits"]) == (None, ["Wan"], str(tiny_wan_folder))
    assert command("info", str(tiny_wan_folder / "vae"), *model).json["holds"] == "an autoencoder"
    encoder = tiny_wan_folder / "text_encoder" / "model.safetensors"
    assert command("info", str(encoder), *model).json["component"] == "text_encoder"
    shown = " ".join(command("info", str(encoder)).out.split())
    assert "holds a UMT5 text encoder" in shown
    # Of another model, its sizes do not fit.
    refused = command("info", str(encoder), "--model-path", "wan2.1-1.3b")
    assert "expected [256384, 4096] (vocabulary, width)" in refused.said


def test_info_says_what_a_file_of_weights_holds(command: Command, tmp_path: Path, tiny_wan_folder: Path) -> None:
    given = load_file(tiny_wan_folder / "transformer" / "diffusion_pytorch_model.safetensors")
    file = fp8_files.comfy_scaled(given)
    stored = {f"diffusion_model.{name}": tensor for name, tensor in file.stored.items()}
    save_file({**stored, "vae.conv.weight": torch.zeros(1)}, tmp_path / "a.safetensors")
    values = command("info", tmp_path / "a.safetensors", "--model-path", tiny_wan_folder, "--json").json
    assert (values["format"], values["families"], values["fits"]) == ("safetensors", ["Wan"], str(tiny_wan_folder))
    assert (values["num_tensors"], values["num_others"]) == (len(given), 0)
    unread = "what no component here reads"
    assert [(each["prefix"], each["holds"]) for each in values["parts"]] == [
        ("diffusion_model.", None),
        ("vae.", unread),
    ]
    assert values["kinds"]["F8_E4M3"] == sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) - 1
    assert values["scales"] == f"{values['kinds']['F8_E4M3']} per tensor"
    shown = " ".join(command("info", tmp_path / "a.safetensors").out.split())
    assert (
        f"prefix diffusion_model. holds {unread} tensors 1 stored as F32 (1) prefix vae. names vae.conv.weight" in shown
    )
    save_file({**stored, "logit_scale": torch.zeros(1)}, tmp_path / "a.safetensors")
    shown = " ".join(command("info", tmp_path / "a.safetensors").out.split())
    assert "1 tensors, which --transformer-path leaves unread names logit_scale model of no published size" in shown
    save_file({name: each for name, each in given.items() if name != "proj_out.bias"}, tmp_path / "short.safetensors")
    refused = command("info", tmp_path / "short.safetensors", "--model-path", tiny_wan_folder)
    assert refused.code == 1
    said = " ".join(refused.said.split())
    assert "short.safetensors: the weights do not fit config.json" in said
    assert "1 of 69 tensors are missing: proj_out.bias" in said
    write_gguf(tmp_path / "b.gguf", original_tensors("z_image"), lambda _: "Q4_0")
    values = command("info", tmp_path / "b.gguf", "--json").json
    assert (values["format"], values["families"], values["scales"]) == ("GGUF", ["Z-Image"], None)
    refused = command("info", tmp_path / "b.gguf", "--model-path", tiny_wan_folder)
    assert refused.code == 1
    assert "the file is for Z-Image, and the model is Wan" in " ".join(refused.said.split())


def test_a_file_that_changed_is_told_and_its_video_is_not_taken_for_this_one(
    command: Command, tiny_wan_folder: Path, tiny_flags: tuple[str, ...]
) -> None:
    """The head of the file and its size stay the same."""
    tensors = load_file(tiny_wan_folder / "transformer" / "diffusion_pytorch_model.safetensors")
    save_file(tensors, "own.safetensors")
    given = ("generate", "a star", *tiny_flags, "--transformer-path", "own.safetensors", "--format", "npy")
    made = command(*given, "-o", "made/")
    assert made.code == 0, made.said
    assert command(*given, "-o", "made/", "--resume").out == ""
    assert "has changed" not in command("generate", "--from", made.out.strip(), "--dry-run").said
    save_file({name: x * 1.01 for name, x in tensors.items()}, "own.safetensors")
    said = command("generate", "--from", made.out.strip(), "--dry-run").said
    assert "own.safetensors has changed since the file of --from was made; the result will differ" in said
    resumed = command(*given, "-o", "made/", "--resume")
    assert resumed.code == 2
    assert "was not made by this command: a file of weights has changed since" in resumed.said
