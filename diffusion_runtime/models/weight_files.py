"""Which safetensors files hold a component's weights, and whether they are whole."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.folder import LFS_PREFIX, read_json

# Names listed in a message before it says how many more there are.
_NUM_LISTED = 10

# Where only variants of a checkpoint are there, the first of these wins, then the first in alphabetical order.
_VARIANTS = ("fp32", "bf16", "fp16")

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def find_weight_files(folder: Path, stem: str) -> list[Path]:
    """The safetensors files that hold a component, all of them present. Raises ModelLoadError."""
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is missing; copy or download the whole model folder")
    for variant in ("", *_variants(folder, stem)):
        index = folder / f"{stem}.safetensors.index{variant}.json"
        if index.exists():
            return _shards(index)
        single = folder / f"{stem}{variant}.safetensors"
        if single.exists():
            return [single]
    names = sorted(path.name for path in folder.iterdir())
    expected = f"{folder}: expected {stem}.safetensors, or {stem}.safetensors.index.json with its shards"
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise ModelLoadError(
            f"{expected}, found {listed(pickles)}: pickled weights can run code and are never read; use a checkpoint "
            "in safetensors, or convert it with save_pretrained(..., safe_serialization=True)"
        )
    if any(re.fullmatch(rf"{re.escape(stem)}.*-\d+-of-\d+.*\.safetensors", name) for name in names):
        raise ModelLoadError(f"{expected}; shards are there and their index is not: copy or download it too")
    found = f"found {listed(names)}" if names else "the folder is empty"
    raise ModelLoadError(f"{expected}; {found}: copy or download the whole model folder")


def check_whole(path: Path) -> None:
    """Raises ModelLoadError for a Git-LFS pointer, and for a file too short for what its own header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(max(8, len(LFS_PREFIX)))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if start.startswith(LFS_PREFIX):
        raise ModelLoadError(
            f"{path} is a Git-LFS pointer of {size} bytes, not the weights; run `git lfs pull` in the model folder"
        )
    if size < 8 or 8 + int.from_bytes(start[:8], "little") > size:
        raise ModelLoadError(f"{path} is cut off after {size} bytes; copy or download it again")


def _variants(folder: Path, stem: str) -> list[str]:
    """`.fp16` and the like, of which there are files; the preferred first."""
    single = re.compile(rf"{re.escape(stem)}\.([^.]+)\.safetensors")
    index = re.compile(rf"{re.escape(stem)}\.safetensors\.index\.([^.]+)\.json")
    matches = (single.fullmatch(path.name) or index.fullmatch(path.name) for path in folder.iterdir())
    found = {match[1] for match in matches if match and not re.search(r"-\d+-of-\d+", match[1])}
    order = {name: place for place, name in enumerate(_VARIANTS)}
    return [f".{name}" for name in sorted(found, key=lambda name: (order.get(name, len(order)), name))]


def _shards(index: Path) -> list[Path]:
    """The shards that an index names, all of them present."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: key 'weight_map': expected tensor names with their files, got {weight_map!r}")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelLoadError(f"{index}: key 'weight_map': expected files of this folder, got {listed(outside)}")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"{index.parent}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing)}; copy or "
            "download them"
        )
    return [index.parent / name for name in names]


def listed(names: Iterable[Any]) -> str:
    shown = [str(name) for name in names]
    rest = len(shown) - _NUM_LISTED
    return ", ".join(shown[:_NUM_LISTED]) + (f" and {rest} more" if rest > 0 else "")
