"""`backends`: a table for people, an object for programs, quickly, and whatever is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from broken_packages import install_broken_sage, publish_backends
from cli_support import REPOSITORY, Command, command_process, process_environment

from diffusion_runtime.attention.catalogue import list_backends, missing_names, platform_default
from diffusion_runtime.cli.backends import Listing, show
from diffusion_runtime.core.hardware import Hardware

NAMES = {"torch_sdpa", "reference", "fa", "fa4", "cudnn_attn", "sliding_tile_attn", "video_sparse_attn", "vmoba_attn"}


@pytest.fixture(autouse=True)
def no_choice_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIFFUSION_ATTENTION_BACKEND", raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def test_the_table_of_a_cpu(command: Command) -> None:
    shown = command("backends", "--device", "cpu")
    assert (shown.code, shown.err) == (0, "")
    assert all(name in shown.out for name in NAMES)
    assert max(map(len, shown.out.splitlines())) <= 80
    usable, unusable = shown.out.split("Not usable here")
    row = next(line for line in usable.splitlines() if " torch_sdpa *" in line)
    assert row.split()[2:5] == [torch.__version__.partition("+")[0], "fp32", "bf16"]
    assert "torch, native, sdpa," in usable
    assert "self-attention only" in usable
    assert "runs on cuda, rocm, not on cpu" in unusable
    assert "* torch_sdpa is the default of cpu, torch" in unusable
    assert "options:" not in shown.out


def test_all_says_what_each_is_and_its_options(command: Command) -> None:
    shown = command("backends", "--device", "cpu", "--all")
    assert max(map(len, shown.out.splitlines())) <= 80
    said = " ".join(shown.out.split())
    assert "options: min_tokens, tail, dense_first_steps, dense_layers, sparsity, VSA_sparsity" in said
    assert "where it runs (cuda, rocm): bf16 fp16; head sizes 8 to 256 by 8" in said


def test_a_gpu_with_packages_there_and_not(capsys: pytest.CaptureFixture[str]) -> None:
    packages = {"triton": "3.6.0", "flash-attn-4": "4.0.0b36"}
    hardware = Hardware("cuda", "NVIDIA H200", (9, 0), (9, 15), "2.11.0", packages)
    default = platform_default(hardware)
    show(Listing(hardware, list_backends(hardware), missing_names(), default, "", "fa3"), show_all=False)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    usable, unusable = out.split("Not usable here")
    assert " fa * " in usable
    assert "4.0.0b36" in usable
    assert "fix: pip install 'diffusion-runtime[xformers]'" in " ".join(unusable.split())
    assert "needs sm_100 or newer, this is cuda sm_90" in " ".join(unusable.split())
    assert "DIFFUSION_ATTENTION_BACKEND is 'fa3', which comes before the default." in unusable


def test_one_object(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", "torch_sdpa")
    shown = command("backends", "--device", "cpu", "--json")
    assert shown.code == 0
    assert shown.json["schema"] == "diffusion_runtime.backends/1"
    assert shown.json["device"]["platform"] == "cpu"
    assert shown.json["default"]["backend"] == "torch_sdpa"
    assert shown.json["environment"] == "torch_sdpa"
    listed = {entry["name"]: entry for entry in shown.json["backends"]}
    assert set(listed) >= NAMES
    assert listed["vmoba_attn"]["capability"]["categories"] == ["self"]
    assert listed["torch_sdpa"]["aliases"] == ["torch", "native", "sdpa", "torch_native"]


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_device_that_is_not_one(arguments: list[str], command: Command) -> None:
    result = command("backends", "--device", "gpu", *arguments)
    assert result.code == 2
    assert "device: expected auto, cpu, cuda" in result.said
    assert not arguments or result.json["schema"] == "diffusion_runtime.backends/1"


def test_a_broken_package_and_a_broken_entry_point_are_only_reported(tmp_path: Path) -> None:
    publish_backends(tmp_path)
    install_broken_sage(tmp_path)
    with (tmp_path / "published_backends-0.3.dist-info" / "entry_points.txt").open("a") as file:
        file.write("\nfaulty = sageattention:Faulty\n")
    path = os.pathsep.join([str(REPOSITORY), str(tmp_path)])
    result = command_process("backends", "--device", "cpu", cwd=tmp_path, PYTHONPATH=path)
    assert result.code == 0, result.err
    usable, unusable = result.out.split("Not usable here")
    assert "wrong_scale" in usable
    assert "on_sage" in unusable
    said = " ".join(unusable.split())
    assert "'sageattention' 1.0.6 is installed and cannot be imported: OSError: libbroken.so" in said
    reason = "entry point 'sageattention:Faulty' of package 'published-backends' cannot be used: OSError: libbroken.so"
    assert reason in result.said
    assert reason in said


def test_it_loads_nothing_heavy_beside_torch(tmp_path: Path) -> None:
    heavy = ("diffusers", "transformers", "triton", "imageio_ffmpeg", "PIL", "torch._dynamo", "torch._inductor")
    code = (
        "import sys; from diffusion_runtime.cli.app import run; assert run(['backends', '--device', 'cpu']) == 0; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=process_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_fits_and_shows_examples(command: Command) -> None:
    shown = command("backends", "--help")
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "\n diffusion-runtime backends --json" in shown.out
