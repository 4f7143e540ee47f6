"""The json of published model folders, out of published_folders.yaml: real sizes, known without the network."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from diffusion_runtime.untrusted.yaml_text import read_yaml_file

FOLDERS_FILE = Path(__file__).with_name("published_folders.yaml")

# File of a model folder, such as transformer/config.json -> what it holds.
FolderFiles: TypeAlias = Mapping[str, Mapping[str, Any]]


@functools.cache
def published_folders() -> Mapping[str, FolderFiles]:
    """By the last part of a hub id, such as `FLUX.1-dev`: every json file of its folder."""
    folders: Mapping[str, FolderFiles] = read_yaml_file(FOLDERS_FILE)
    return folders


def write_folder(folder: Path, files: FolderFiles) -> Path:
    """Write the json files of a model folder; returns `folder`. Raises OSError."""
    for name, values in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dict(values)))
    return folder
