"""Packages that are installed and broken: a refusal with the reason, and no listing that stumbles over them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tables import table
from warm_python import run_python

SCRIPT = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
from diffusion_runtime.attention import list_backends, select_backend
from diffusion_runtime.errors import BackendUnavailableError
from diffusion_runtime.core.hardware import Hardware, installed_packages
hopper = Hardware("cuda", "NVIDIA H200", (9, 0), (9, 15), "2.13.0", installed_packages(), is_here=True)
requirements = dict(head_dim=64, dtype="bfloat16", num_heads=4)
elsewhere = dataclasses.replace(hopper, is_here=False)
said = {"elsewhere": select_backend(device=elsewhere, **requirements).backend}
said["imported before it is chosen"] = "flash_attn" in sys.modules
for name in ("fa4", "fa"):
    try:
        select_backend(device=hopper, config=name, **requirements)
    except BackendUnavailableError as error:
        said[name] = [error.exit_code, *(reason for _, reason in error.reasons)]
        said["suggested"] = str(error).splitlines()[-1]
default = select_backend(device=hopper, **requirements)
said["default"] = [default.backend, *(reason for _, reason in default.rejected)]
said["preferred"] = select_backend(device=hopper, config="fa4,cudnn_attn", **requirements).backend
said["listed"] = [info.name for info in list_backends(hopper)]
print(json.dumps(said))
"""


# What backends take of a FlashAttention package.
FLASH = "def flash_attn_func(): ...\ndef flash_attn_varlen_func(): ...\n"


def install(folder: Path, distribution: str, version: str, module: str, text: str) -> None:
    """A package as pip leaves it: its metadata, and a module with this text."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    path = folder.joinpath(*module.split("."))
    path.mkdir(parents=True)
    (path / "__init__.py").write_text(text)


def with_own_cache(folder: Path) -> dict[str, str]:
    """An environment in which nothing is remembered of imports, but by earlier programs of the same test."""
    return {**os.environ, "DIFFUSION_RUNTIME_CACHE": str(folder / "cache")}


def ask(folder: Path) -> dict[str, Any]:
    done = run_python("-c", SCRIPT, folder, env=with_own_cache(folder))
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@table(
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


GENERATIONS = """
import json, logging, sys
sys.path.insert(0, sys.argv[1])
logging.basicConfig(format="%(message)s")
from diffusion_runtime.attention import list_backends, select_backend
from diffusion_runtime.attention.backends.fa import fastest_generation
from diffusion_runtime.errors import BackendUnavailableError
from diffusion_runtime.core.hardware import Hardware, installed_packages
chip, head_dim = tuple(json.loads(sys.argv[2])), int(sys.argv[3])
here = Hardware("cuda", "a GPU", chip, (9, 15), "2.13.0", installed_packages(), is_here=True)
said = {}
for name in ("fa", "fa2", "fa4"):
    try:
        said[name] = select_backend(head_dim=head_dim, dtype="bfloat16", num_heads=4, device=here, config=name).backend
    except BackendUnavailableError as error:
        said[name] = [reason for _, reason in error.reasons]
serves = fastest_generation(here, head_dim)
said["serves"] = None if serves is None else serves.name
(listed,) = [info for info in list_backends(here) if info.name == "fa"]
said["listed"] = listed.version
default = select_backend(head_dim=head_dim, dtype="bfloat16", num_heads=4, device=here)
said["default"] = [default.backend, default.log_line("self", here)]
print(json.dumps(said))
"""


def run(script: str, folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """What a script says in a process of its own, and what it logs."""
    done = run_python("-c", script, folder, *arguments, env=with_own_cache(folder))
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said, done.stderr


def install_flash_2(folder: Path, text: str) -> None:
    install(folder, "flash-attn", "2.8.3", "flash_attn.flash_attn_interface", text)


def test_fa_passes_over_a_broken_generation_and_says_so(tmp_path: Path) -> None:
    install(tmp_path, "flash-attn-4", "4.0.0b36", "flash_attn.cute", "raise OSError('no CUDA 13')")
    install_flash_2(tmp_path, FLASH)
    said, log = run(GENERATIONS, tmp_path, "[9, 0]", "64")
    assert (said["fa"], said["fa2"], said["serves"], said["listed"]) == ("fa", "fa2", "fa2", "fa2 2.8.3")
    assert "OSError: no CUDA 13" in said["fa4"][0]
    assert said["default"][0] == "fa"
    assert said["default"][1].endswith("(Hopper, cuda sm_90, torch 2.13.0, flash-attn 2.8.3)")
    what = "package 'flash-attn-4' 4.0.0b36 is installed and cannot be imported: OSError: no CUDA 13"
    assert log.count(f"fa takes fa2 and passes over fa4: {what}") == 1


def test_fa_asks_the_generation_that_will_serve(tmp_path: Path) -> None:
    """Heads of 160 on sm_100 are FA2's, although FA4 is there and imports."""
    install(tmp_path, "flash-attn-4", "4.0.0b36", "flash_attn.cute", FLASH)
    install_flash_2(tmp_path, "raise OSError('no flash_attn_2_cuda')")
    said, _ = run(GENERATIONS, tmp_path, "[10, 0]", "160")
    for name in ("fa", "fa2"):
        (reason,) = said[name]
        assert reason.startswith("package 'flash-attn' 2.8.3 is installed and cannot be imported: OSError: no flash_at")
    assert (said["serves"], said["listed"]) == (None, "fa4 4.0.0b36")


def test_a_package_without_what_is_called_of_it_is_refused(tmp_path: Path) -> None:
    """As xformers will be, whose next release swallows the error of its attention's import."""
    install(tmp_path, "flash-attn-4", "4.0.0b36", "flash_attn.cute", "def flash_attn_func(): ...")
    said, _ = run(GENERATIONS, tmp_path, "[9, 0]", "64")
    assert "cannot be imported: module 'flash_attn.cute' has no 'flash_attn_varlen_func'" in said["fa4"][0]


SPARSE = """
import json, logging, sys
sys.path.insert(0, sys.argv[1])
logging.basicConfig(format="%(message)s")
from diffusion_runtime.attention import select_backend
from diffusion_runtime.core.hardware import Hardware, installed_packages
packages = {**installed_packages(), "triton": "3.6.0"}
hopper = Hardware("cuda", "NVIDIA H200", (9, 0), (9, 15), "2.13.0", packages, is_here=True)
requirements = dict(head_dim=64, dtype="bfloat16", num_heads=4, device=hopper)
chosen = [select_backend(config=name, **requirements).backend for name in ("video_sparse_attn", "sliding_tile_attn")]

# The kernel's own choice, on a tensor that says it is on that chip.
import torch
from diffusion_runtime.kernels.block_sparse import api, flash4, gluon, triton
from diffusion_runtime.attention import LayerInfo, StepInfo, TokenLayout, plan_attention
q = torch.zeros(1, 512, 2, 64, dtype=torch.bfloat16)
plan = plan_attention(
    q, q, backend="video_sparse_attn", layout=TokenLayout((8, 8, 8)), options={"tile_size": [4, 4, 8], "sparsity": 0.5}
)
class OnHopper(torch.Tensor):
    is_cuda = True
flash4.detect_hardware = gluon.detect_hardware = triton.detect_hardware = lambda device: hopper
there = q.as_subclass(OnHopper)
auto = api._choose("auto", there, plan, False)
print(json.dumps({"chosen": chosen, "flash4": flash4.refusal(there, plan), "auto": auto}))
"""


@table(
    ("text", "reason", "taken"),
    [
        ("raise OSError('no CUDA 13')", "is installed and cannot be imported: OSError: no CUDA 13", "triton"),
        (
            FLASH + "import sys, types\n" + "m = types.ModuleType('flash_attn.cute.block_sparsity')\n"
            "m.BlockSparseTensorsTorch = tuple\nsys.modules[m.__name__] = m\n",
            None,
            "flash4",
        ),
    ],
)
def test_sparse_attention_runs_on_triton_where_flash_attn_4_is_broken(
    tmp_path: Path, text: str | None, reason: str | None, taken: str
) -> None:
    if text is not None:
        install(tmp_path, "flash-attn-4", "4.0.0b36", "flash_attn.cute", text)
    said, log = run(SPARSE, tmp_path, "")
    assert said["chosen"] == ["video_sparse_attn", "sliding_tile_attn"]
    assert said["auto"] == taken
    if reason is None:
        assert said["flash4"] is None
    else:
        assert reason in said["flash4"]
    # Said when the choice settles, once, and only of what is there and broken.
    broken = text is not None and reason is not None
    assert log.count("block-sparse attention runs on Triton: flash-attn-4 is installed and cannot be") == int(broken)


def test_a_package_that_imports_is_taken(tmp_path: Path) -> None:
    install(
        tmp_path,
        "flash-attn-4",
        "4.0.0b36",
        "flash_attn.cute",
        "def flash_attn_func(): ...\ndef flash_attn_varlen_func(): ...",
    )
    said = ask(tmp_path)
    assert said["default"] == ["fa"]
    assert "fa4" not in said
    assert said["preferred"] == "fa4"
