"""Packages that are installed and broken: a refusal with the reason, and no listing that stumbles over them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
from diffusion_runtime.attention import list_backends, select_backend
from diffusion_runtime.errors import BackendUnavailableError
from diffusion_runtime.hardware import Hardware, installed_packages
hopper = Hardware("cuda", "NVIDIA H200", (9, 0), (9, 15), "2.13.0", installed_packages(), is_here=True)
question = dict(head_dim=64, dtype="bfloat16", num_heads=4)
elsewhere = dataclasses.replace(hopper, is_here=False)
said = {"elsewhere": select_backend(device=elsewhere, **question).backend}
said["imported before it is chosen"] = "flash_attn" in sys.modules
for name in ("fa4", "fa"):
    try:
        select_backend(device=hopper, config=name, **question)
    except BackendUnavailableError as error:
        said[name] = [error.exit_code, *(reason for _, reason in error.reasons)]
        said["suggested"] = str(error).splitlines()[-1]
default = select_backend(device=hopper, **question)
said["default"] = [default.backend, *(reason for _, reason in default.rejected)]
said["preferred"] = select_backend(device=hopper, config="fa4,cudnn_attn", **question).backend
said["listed"] = [info.name for info in list_backends(hopper)]
print(json.dumps(said))
"""


def install(folder: Path, distribution: str, version: str, module: str, text: str) -> None:
    """A package as pip leaves it: its metadata, and a module with this text."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    path = folder.joinpath(*module.split("."))
    path.mkdir(parents=True)
    (path / "__init__.py").write_text(text)


def ask(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "OSError: libcudart.so.13: cannot open"),
        ("import a_module_that_nobody_has", "ModuleNotFoundError: No module named 'a_module_that_nobody_has'"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two"),
        ("assert False", "AssertionError"),
        ("def", "SyntaxError: invalid syntax"),
    ],
)
def test_a_broken_package_is_refused_with_what_it_says(tmp_path: Path, text: str, error: str) -> None:
    install(tmp_path, "flash-attn-4", "4.0.0b36", "flash_attn.cute", text)
    said = ask(tmp_path)
    assert {"fa4", "torch_sdpa"} <= set(said["listed"])
    # A Hardware made by hand is some other machine, whose packages are not here to be imported.
    assert said["elsewhere"] == "fa"
    assert said["imported before it is chosen"] is False
    for name in ("fa4", "fa"):
        code, reason = said[name]
        assert code == 3
        assert reason.startswith("package 'flash-attn-4' 4.0.0b36 is installed and cannot be imported: " + error)
        assert "fix: install it again" in reason
    assert "cudnn_attn" in said["suggested"]
    assert "fa4" not in said["suggested"]
    assert said["default"][0] == "torch_sdpa"
    assert error in said["default"][1]
    assert said["preferred"] == "cudnn_attn"


def test_a_package_that_imports_is_taken(tmp_path: Path) -> None:
    install(tmp_path, "flash-attn-4", "4.0.0b36", "flash_attn.cute", "def flash_attn_func(): ...")
    said = ask(tmp_path)
    assert said["default"] == ["fa"]
    assert "fa4" not in said
    assert said["preferred"] == "fa4"
