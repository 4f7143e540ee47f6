"""The machine as plain values."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tables import table

from diffusion_runtime.core.hardware import (
    Hardware,
    detect_hardware,
    found_programs,
    installed_packages,
    resolve_device,
    resolve_dtype,
)
from diffusion_runtime.errors import ConfigError, did_you_mean, nearest


def test_the_cpu_is_described_by_its_versions() -> None:
    hardware = detect_hardware("cpu")
    assert hardware.platform == "cpu"
    assert hardware.capability is None
    assert hardware.describe() == f"cpu, torch {torch.__version__.partition('+')[0]}"


def test_a_gpu_is_described_by_its_chip() -> None:
    assert Hardware("cuda", "NVIDIA H200", (9, 0), (9, 15), "2.11.0").describe() == "cuda sm_90, torch 2.11.0"


def test_auto_finds_a_device_and_its_dtype() -> None:
    device = resolve_device("auto")
    assert resolve_dtype("auto", device) == (torch.float32 if device.type == "cpu" else torch.bfloat16)
    assert resolve_dtype("float16", device) == torch.float16


@table("device", ["gpu", "cpu:x", ""])
def test_a_device_that_is_not_one(device: str) -> None:
    with pytest.raises(ConfigError, match="device: expected auto"):
        resolve_device(device)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"write --device auto|of them, counted from 0"):
        resolve_device("cuda:99")


def test_an_unknown_dtype() -> None:
    with pytest.raises(ConfigError, match="dtype: expected auto"):
        resolve_dtype("fp8", torch.device("cpu"))


def test_packages_are_found_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "xformers-0.0.35.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xformers\nVersion: 0.0.35\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_packages()["xformers"] == "0.0.35"
    assert "xformers" not in sys.modules


def test_nearest_names() -> None:
    assert nearest("torch_spda", ["torch_sdpa", "fa"]) == " Did you mean 'torch_sdpa'?"
    assert nearest("zzz", ["b", "a"]) == " Known: a, b."
    # The beginning or a part of one or two names, which as a whole are not like it.
    names = ["fp8_attn", "_sage_qk_int8_pv_fp8_cuda", "video_sparse_attn", "vmoba_attn", "sparse_video_gen_2_attn"]
    assert nearest("fp8", names) == " Did you mean 'fp8_attn'?"
    assert nearest("int8", names) == " Did you mean '_sage_qk_int8_pv_fp8_cuda'?"
    assert nearest("video", names) == " Did you mean 'video_sparse_attn'?"
    assert did_you_mean("_video", names) == " Did you mean 'sparse_video_gen_2_attn'?"
    assert did_you_mean("_at", names) == did_you_mean("vm", names) == ""


def test_programs_are_those_that_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name in (("path", "g++"), ("toolkit/bin", "nvcc")):
        program = tmp_path / folder / name
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert found_programs() == {"g++", "nvcc"}
    (tmp_path / "path" / "g++").chmod(0o644)
    assert found_programs() == {"nvcc"}


def test_only_the_machine_of_this_process_is_here() -> None:
    detected = detect_hardware("cpu")
    assert detected.is_here
    assert detected.programs == found_programs()
    assert not Hardware("cuda", "NVIDIA H200", (9, 0), (9, 15), "2.11.0").is_here
