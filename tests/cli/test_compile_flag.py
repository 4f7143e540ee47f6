"""`--compile` on the command line and in Python: where it is recorded, what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_support import Command

from diffusion_runtime import RuntimeConfig
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.diffusers_bridge import compilation
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.loading import inspect_pipeline


def test_the_flag_and_what_it_cannot_be_combined_with(
    command: Command, tiny_wan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    native = ("generate", "a star", "--model-path", str(tiny_wan_folder), "--dry-run", "--device", "cpu")
    refused = " ".join(command(*native, "--compile", "regional").said.split())
    assert "compile: regional: this model's blocks have fused kernels" in refused
    assert "leave out --compile" in refused
    generate = (*native, "--backend", "diffusers")
    assert command(*generate, "--json").json["runtime"]["compile"] == "off"
    assert command(*generate, "--compile", "regional", "--json").json["runtime"]["compile"] == "regional"
    for written, read in (("regional", "regional"), ("off", "off"), ('"off"', "off")):
        config = tmp_path / "config.yaml"
        config.write_text(f"runtime:\n  compile: {written}\n")
        assert command(*generate, "--config", str(config), "--json").json["runtime"]["compile"] == read
    shown = command(*generate, "--compile", "regional")
    assert "compile" in shown.said
    assert "regional" in shown.said
    result = command(*generate, "--compile", "whole")
    assert result.code != 0
    assert "compile: unknown value 'whole'" in " ".join(result.said.split()), result.said


def test_machines_that_cannot_compile(tiny_wan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RuntimeConfig(str(tiny_wan_folder), device="cpu", backend="diffusers", compile="regional")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        ConfigError, match=r"needs a C\+\+ compiler, and none was found; install g\+\+, or name one by CXX"
    ):
        inspect_pipeline(config)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="CXX names 'no-such-compiler', which cannot be started"):
        inspect_pipeline(config)
    for hardware, said in (
        (Hardware("mps"), "needs a CPU or a CUDA or ROCm GPU, got mps"),
        (Hardware("cuda", capability=(9, 0)), "needs Triton, which is not installed"),
    ):
        monkeypatch.setattr(compilation, "detect_hardware", lambda _, hardware=hardware: hardware)
        with pytest.raises(ConfigError, match=said):
            compilation.check_compilation(config, torch.device("cpu"))
    monkeypatch.setattr(compilation, "detect_hardware", lambda _: Hardware("cuda", packages={"triton": "3"}))
    compilation.check_compilation(config, torch.device("cpu"))


def test_artefacts_are_kept_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = compilation.ARTEFACTS_VARIABLE
    monkeypatch.setenv("DIFFUSION_RUNTIME_CACHE", str(tmp_path))
    # As it is set, and taken away again when the test ends.
    monkeypatch.setenv(variable, "of the user")
    compilation.keep_artefacts(torch.device("cpu"), "a model")
    assert compilation.os.environ[variable] == "of the user"
    monkeypatch.delenv(variable)
    compilation.keep_artefacts(torch.device("cpu"), "a model")
    chosen = Path(compilation.os.environ[variable])
    assert chosen.is_dir()
    assert chosen.parent == tmp_path / "compiled"
    other = {
        compilation.artefact_folder(Hardware("cuda", name), model) for name in ("A", "B") for model in ("a model", "b")
    }
    assert len(other | {chosen}) == 5
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("DIFFUSION_RUNTIME_CACHE", str(blocked))
    monkeypatch.delenv(variable)
    compilation.keep_artefacts(torch.device("cpu"), "a model")
    assert variable not in compilation.os.environ
