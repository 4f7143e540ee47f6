"""The json of published model folders, from published_folders.yaml: real sizes, known without the network."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from diffusion_runtime.untrusted.yaml_text import read_packaged_yaml

FOLDERS_FILE = Path(__file__).with_name("published_folders.yaml")
ENCODERS_FILE = Path(__file__).with_name("published_encoders.yaml")

# File of a model folder, such as transformer/config.json -> what it holds.
FolderFiles: TypeAlias = Mapping[str, Mapping[str, Any]]


@functools.cache
def published_folders() -> Mapping[str, FolderFiles]:
    """Return every json file of each folder, by the last part of a hub id, such as `FLUX.1-dev`."""
    encoders: Mapping[str, Mapping[str, Any]] = read_packaged_yaml(ENCODERS_FILE)
    folders: Mapping[str, FolderFiles] = read_packaged_yaml(FOLDERS_FILE)
    return {
        name: {file: {**encoders.get(str(values.get("model_type")), {}), **values} for file, values in files.items()}
        for name, files in folders.items()
    }


def write_folder(folder: Path, files: FolderFiles) -> Path:
    """Write the json files of a model folder; return `folder`. Raises OSError."""
    for name, values in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dict(values)))
    return folder


@functools.cache
def _temporary_folder(name: str) -> tempfile.TemporaryDirectory[str]:
    """Make a folder that is deleted when the process ends."""
    place = tempfile.TemporaryDirectory(prefix="diffusion_runtime_configs_")
    write_folder(Path(place.name) / name, published_folders()[name])
    return place


def packaged_folder(hub_id: str) -> Path | None:
    """Return a folder of the json that the package has of a published model, without weights and tokenizers; it is
    deleted when the process ends. None for a model that it does not know. Raises OSError."""
    name = hub_id.rpartition("/")[2]
    return Path(_temporary_folder(name).name) / name if name in published_folders() else None
