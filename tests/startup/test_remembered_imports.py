"""Imports that passed are remembered: the next process chooses without importing, and its first call imports."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from warm_python import run_python

SCRIPT = """
import importlib, json, os, sys
folder, cache, *calls = sys.argv[1:]
sys.path.insert(0, folder)
os.environ["DIFFUSION_RUNTIME_CACHE"] = cache
from diffusion_runtime.attention import list_backends, select_backend
from diffusion_runtime.attention.backends.fa4 import FlashAttention4
from diffusion_runtime.errors import BackendUnavailableError
from diffusion_runtime.core.hardware import Hardware, installed_packages
hopper = Hardware("cuda", "NVIDIA H200", (9, 0), (9, 15), "2.13.0", installed_packages(), is_here=True)
said = {}
for call in calls:
    try:
        if call == "list":
            (said[call],) = [info.usable for info in list_backends(hopper) if info.name == "fa4"]
        elif call == "use":
            said[call] = [function.__name__ for function in FlashAttention4().first_call_functions()]
        else:
            said[call] = select_backend(head_dim=64, dtype="bfloat16", num_heads=4, device=hopper, config=call).backend
    except BackendUnavailableError as error:
        said[call] = str(error)
    said[call] = [said[call], "flash_attn.cute" in sys.modules]
print(json.dumps(said))
"""
FLASH = "def flash_attn_func(): ...\ndef flash_attn_varlen_func(): ...\n"


def install(folder: Path, version: str, text: str) -> Path:
    """flash-attn-4 as pip leaves it, in place of any other; its module's file."""
    for old in folder.glob("*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    info = folder / f"flash_attn_4-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash-attn-4\nVersion: {version}\n")
    path = folder / "flash_attn" / "cute" / "__init__.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def ask(tmp_path: Path, *calls: str) -> dict[str, Any]:
    """For each call, in a new process: what came of it, and whether the package is imported by then."""
    done = run_python("-c", SCRIPT, tmp_path / "packages", tmp_path / "cache", *calls)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def remembered(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "imports").glob("*.json"))


def test_what_imported_once_is_imported_by_its_first_call_alone(tmp_path: Path) -> None:
    module = install(tmp_path / "packages", "4.0.0b36", FLASH)
    assert ask(tmp_path, "fa4") == {"fa4": ["fa4", True]}
    (file,) = remembered(tmp_path)
    functions = ["flash_attn_func", "flash_attn_varlen_func"]
    said = ask(tmp_path, "fa4", "fa", "use")
    assert said == {"fa4": ["fa4", False], "fa": ["fa", False], "use": [functions, True]}
    # Whoever lists or examines what a machine has imports it.
    assert ask(tmp_path, "list") == {"list": [True, True]}
    # Another version, another file, an entry that cannot be read: checked anew.
    install(tmp_path / "packages", "4.0.0b37", FLASH)
    assert ask(tmp_path, "fa4") == {"fa4": ["fa4", True]}
    os.utime(module, ns=(1, 1))
    assert ask(tmp_path, "fa4") == {"fa4": ["fa4", True]}
    file.write_text("{")
    assert ask(tmp_path, "fa4") == {"fa4": ["fa4", True]}


@pytest.mark.slow
def test_an_import_that_fails_after_all_is_an_error_and_forgotten(tmp_path: Path) -> None:
    module = install(tmp_path / "packages", "4.0.0b36", FLASH)
    ask(tmp_path, "fa4")
    kept = module.stat()
    # As a library does that the package needs and that is gone: the package itself is as it was.
    module.write_text("import gone".ljust(len(FLASH) - 1) + "\n")
    os.utime(module, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    # Bytecode of a file of that size and time would be taken for its own.
    shutil.rmtree(module.parent / "__pycache__", ignore_errors=True)
    said = ask(tmp_path, "fa4", "use")
    assert said["fa4"] == ["fa4", False]
    assert "attention backend 'fa4' cannot run" in said["use"][0]
    assert "ModuleNotFoundError: No module named 'gone'" in said["use"][0]
    assert remembered(tmp_path) == []
    (refused, imported) = ask(tmp_path, "fa4")["fa4"]
    assert "cannot be imported: ModuleNotFoundError: No module named 'gone'" in refused
    assert not imported
