"""ComfyUI's folders of models: their names, and the files of weights in them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.errors import ConfigError, ModelLoadError, nearest, shown
from diffusion_runtime.untrusted.files import user_path
from diffusion_runtime.weights.weight_files import SUFFIXES, listed

_logger = logging.getLogger("diffusion_runtime.loading")

# Of transformers, of one part each, of whole checkpoints.
TRANSFORMERS = ("diffusion_models", "unet", "SEEDVR2")
PARTS = ("vae", "text_encoders", "clip", "clip_vision", "SEEDVR2")
CHECKPOINTS = ("checkpoints",)
LORAS = "loras"
UPSAMPLERS = "latent_upscale_models"
_KNOWN = (*TRANSFORMERS, *PARTS, *CHECKPOINTS, LORAS, UPSAMPLERS)
# Folders of models, as many as PATH has of programs.
VARIABLE = "DIFFUSION_RUNTIME_MODELS"
# Levels of folders below one of these, and files that are looked at.
MAX_DEPTH = 3
_MAX_FILES = 5000


def known_root(path: Path) -> Path | None:
    """Return the folder that holds ComfyUI's folders, in one of which a file is; None without one."""
    parents = path.absolute().parents
    return next((each.parent for each in list(parents)[: MAX_DEPTH + 1] if each.name in _KNOWN), None)


def model_roots(file: Path | None, models_dir: Sequence[str]) -> list[Path]:
    """Return the folders that hold ComfyUI's: the one around a model's file, those of --models-dir, and those of the
    environment. Raises ConfigError for one that is none."""
    own = None if file is None else known_root(file)
    roots = [] if own is None else [own]
    for text in (*models_dir, *filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))):
        folder = user_path(text, "models_dir")
        if not folder.is_dir():
            raise ConfigError(f"models_dir: {folder}: expected a folder of models, such as ComfyUI's `models`")
        roots.append(folder / "models" if (folder / "models").is_dir() else folder)
    return roots


def named_file(text: str, key: str, roots: Sequence[Path], folder: str, *, is_sure: bool = True) -> Path | None:
    """Return the file that is named as ComfyUI names it, by its place in one of its folders or by name alone; None for
    the path of a file, and without roots. key: of the config, for messages. roots: of folders that hold ComfyUI's;
    is_sure: whether it can be nothing else. Raises ConfigError where several files have the name, ModelLoadError where
    none has."""
    name = Path(text)
    is_path = not text.endswith(SUFFIXES) or text.startswith(("~", "/", ".")) or ".." in name.parts
    if not roots or is_path or os.path.lexists(user_path(name, key)):
        return None
    places = [root / folder for root in roots]
    files = files_in(places, MAX_DEPTH)
    found = {path.resolve(): path for path in files if path.parts[-len(name.parts) :] == name.parts}
    if len(found) == 1:
        (path,) = found.values()
        _logger.info("%s: %s, %s (found in %s)", key, path, size_text(path.stat().st_size), folder)
        return path
    if found:
        raise ConfigError(
            f"{key}: {len(found)} files are named {shown(text)}: {listed(found.values())}; give the path of one"
        )
    if not is_sure:
        return None
    there = nearest(text, [path.name for path in files[:50]]) if files else f" {places[0]} has none"
    raise ModelLoadError(
        f"{key}: there is no {shown(text)} here, and none in {listed(places)}; put it into {places[0]}, or give its "
        f"path.{there}"
    )


def files_in(folders: Sequence[Path], depth: int) -> list[Path]:
    """Return the weight files in folders and `depth` levels below, in their order. Raises ConfigError for too many."""
    found: list[Path] = []
    seen: set[str] = set()
    for folder in folders:
        for path in _walk(folder, depth, seen):
            found.append(path)
            if len(found) > _MAX_FILES:
                raise ConfigError(
                    f"models_dir: {folder}: more than {_MAX_FILES} files of weights; name the parts by their flags, or "
                    "give a smaller folder"
                )
    return found


def _walk(folder: Path, depth: int, seen: set[str]) -> Iterator[Path]:
    """Yield the weight files of a folder, then those below. seen: folders, each of which is entered once, as links may
    lead back to it."""
    real = os.path.realpath(folder)
    if real in seen:
        return
    seen.add(real)
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    below = []
    for entry in entries:
        try:
            is_folder, is_file = entry.is_dir(), entry.is_file()
        except OSError:
            # A link to itself.
            continue
        if is_file and entry.name.endswith(SUFFIXES):
            yield Path(entry.path)
        elif is_folder and depth and not entry.name.startswith("."):
            below.append(Path(entry.path))
    for place in below:
        yield from _walk(place, depth - 1, seen)
