"""The import rule of ARCHITECTURE.md, as a test: every arrow points down."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "diffusion_runtime"

# Top row first. A module may import rows below its own and its own folder, nothing else.
ROWS = [
    {"cli"},
    {"loading", "quality", "diagnosis", "benchmark"},
    {"description"},
    {"diffusers_bridge"},
    {"pipeline"},
    {"request_rules", "progress"},
    {"models"},
    {"text_encoders", "denoising", "memory"},
    {"layers"},
    {"attention"},
    {"parallel"},
    {"kernels"},
    {"config", "request", "media", "hardware", "device_guard"},
    {"errors"},
]
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}

# A third-party package, and the places that may import it.
HOMES = {
    "diffusers": ("diffusers_bridge", "models", "denoising"),
    "transformers": ("text_encoders",),
    "triton": ("kernels",),
    "flash_attn": ("attention/backends", "kernels"),
    "torch.distributed": ("parallel",),
    "safetensors": ("models/checkpoint.py",),
    "huggingface_hub": ("models/checkpoint.py",),
    "imageio_ffmpeg": ("media/",),
    "typer": ("cli",),
    "matplotlib": ("benchmark/plot.py",),
}
# The two files at the package root that only re-export are exempt; folder __init__ files are not.
EXEMPT = {PACKAGE / "__init__.py", PACKAGE / "__main__.py"}
MODULES = sorted(set(PACKAGE.rglob("*.py")) - EXEMPT)


def imported_names(path: Path) -> list[str]:
    """Every dotted name `path` imports, TYPE_CHECKING blocks and function bodies included."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def unit_of(path: Path) -> str:
    """Folder or file directly under the package: 'attention', 'pipeline', ..."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = unit_of(path)
    for name in imported_names(path):
        package, _, rest = name.partition(".")
        there = rest.partition(".")[0]
        if package != PACKAGE.name or there == here:
            continue
        assert ROW_OF[there] > ROW_OF[here], f"{here} must not import {there}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_third_party_packages_stay_home(path: Path) -> None:
    here = path.relative_to(PACKAGE).as_posix()
    for name in imported_names(path):
        for package, homes in HOMES.items():
            if name == package or name.startswith(f"{package}."):
                assert here.startswith(homes), f"{package} may only be imported in {homes}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_families_are_named_only_in_their_own_folder(path: Path) -> None:
    families = {p.name for p in (PACKAGE / "models").iterdir() if p.is_dir() and p.name[0] != "_"}
    here = path.relative_to(PACKAGE).as_posix()
    if here in {"models/registry.py"}:
        return
    identifiers = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
    words = {word.lower() for name in identifiers for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", name)}
    for family in families:
        if not here.startswith(f"models/{family}/"):
            assert family not in words, f"{family} named in {here}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_reads_pickles_or_runs_text(path: Path) -> None:
    """A model folder, a config or a prompt from a stranger must not be able to run code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        forbidden = {"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "yaml.load", "os.system"}
        assert called not in forbidden, f"{path}:{node.lineno}: {called}"
        shell = [keyword for keyword in node.keywords if keyword.arg == "shell"]
        assert not shell, f"{path}:{node.lineno}: a command through a shell"


FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "base", "misc"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_named_for_what_they_hold(path: Path) -> None:
    assert not FORBIDDEN_NAMES & set(path.relative_to(PACKAGE).with_suffix("").parts)
