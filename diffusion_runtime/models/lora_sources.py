"""LoRA files of the hub: the file of a repository behind `ORG/NAME[/FILE]`, downloaded into the hub's cache.

A located LoraConfig has the file on this machine as its path, and keeps the revision that was asked for; a recipe holds
the hub's names again.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from diffusion_runtime.config import LoraConfig
from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.errors import ConfigError, ModelLoadError, nearest, shown
from diffusion_runtime.models import hub
from diffusion_runtime.models.comfyui_folders import LORAS, named_file
from diffusion_runtime.untrusted.files import user_path
from diffusion_runtime.weights.cached_folder import SNAPSHOTS, commit_of, hub_id_of
from diffusion_runtime.weights.lora.settings import CONFIG_FILE, FILES_IN_FOLDERS
from diffusion_runtime.weights.lora.shipped import SHIPPED_LORAS
from diffusion_runtime.weights.weight_files import CONVERT, PICKLES, SAFETENSORS, listed

_logger = logging.getLogger("diffusion_runtime.loading")
_HUB = "hf://"
MAIN = "main"
_HUB_PATH = re.compile(r"([A-Za-z0-9_][\w.-]*/[\w.-]+)(?:/(.+))?")


def located(loras: Iterable[LoraConfig], *, offline: bool = False, is_dry_run: bool = False) -> tuple[LoraConfig, ...]:
    """Return LoRA configs with the files of this machine as their paths; those of the hub are downloaded into its
    cache, or taken from there. offline: no network is used. is_dry_run: nothing is downloaded; what is not here keeps
    the hub's name (`waits_on_hub`). What exists here comes before the hub's repository of that name.

    Raises ConfigError for a revision of a file here and for a name that cannot be the hub's, ModelLoadError for what
    the hub does not have, and for a repository of several files of which none is named, with their names.
    """
    return tuple(_located(lora, offline, is_dry_run) for lora in loras)


def with_loras_in(roots: Sequence[Path], loras: Sequence[LoraConfig]) -> tuple[LoraConfig, ...]:
    """Return LoRA configs with the paths of files that are named as ComfyUI names them and are not here. roots: of
    folders that hold ComfyUI's. Raises what `named_file` raises."""
    return tuple(_in_folders(lora, roots) for lora in loras)


def _in_folders(lora: LoraConfig, roots: Sequence[Path]) -> LoraConfig:
    if lora.revision is not None or lora.path.startswith(_HUB):
        return lora
    # Of more parts, perhaps a file of the hub's.
    path = named_file(lora.path, "lora.path", roots, LORAS, is_sure=len(Path(lora.path).parts) <= 2)
    return lora if path is None else dataclasses.replace(lora, path=str(path))


def waits_on_hub(lora: LoraConfig) -> bool:
    """Return whether a located LoRA is not here, in a dry run."""
    return lora.revision is not None and not os.path.exists(lora.path)


def at_commit(lora: LoraConfig, *, offline: bool = False) -> LoraConfig:
    """Return a LoRA of the hub at the commit that it is now, for processes that are to load the same, and any other as
    it is. Raises ModelLoadError."""
    name = lora.path.removeprefix(_HUB)
    match = _HUB_PATH.fullmatch(name)
    is_here = name == lora.path and (name in SHIPPED_LORAS or os.path.lexists(user_path(name, "lora.path")))
    if match is None or is_here or (match[2] is None and name.endswith((*SAFETENSORS, *PICKLES))):
        return lora
    commit, _ = hub.repository_files(match[1], lora.revision, offline=offline)
    return dataclasses.replace(lora, revision=commit)


def recorded_loras(loras: Iterable[LoraConfig]) -> list[dict[str, Any]]:
    """Return LoRA configs as recipes hold them: a located one by the hub's names, others as they are."""
    recorded = []
    for lora in loras:
        values = {
            name: value for name, value in dataclasses.asdict(lora).items() if (name, value) != ("revision", None)
        }
        recorded.append({**values, "path": _hub_name(lora)})
    return recorded


def commits_of(loras: Sequence[LoraConfig]) -> list[str | None]:
    """Return the commit of each located LoRA, None for one that is not of the hub."""
    snapshots = [_snapshot(lora) for lora in loras]
    return [None if snapshot is None else commit_of(snapshot) for snapshot in snapshots]


def _hub_name(lora: LoraConfig) -> str:
    snapshot = _snapshot(lora)
    if snapshot is None:
        return lora.path
    file = Path(lora.path).relative_to(snapshot).as_posix()
    return f"{hub_id_of(snapshot.parent.parent)}{'' if file == '.' else f'/{file}'}"


def _snapshot(lora: LoraConfig) -> Path | None:
    """Return the snapshot in the hub's cache that holds a located LoRA; None for a file that was given by its path."""
    if lora.revision is None:
        return None
    path = Path(lora.path)
    return next((folder for folder in (path, *path.parents) if folder.parent.name == SNAPSHOTS), None)


def _located(lora: LoraConfig, offline: bool, is_dry_run: bool) -> LoraConfig:
    name = lora.path.removeprefix(_HUB)
    match = _HUB_PATH.fullmatch(name)
    if name == lora.path:
        if name in SHIPPED_LORAS or os.path.lexists(user_path(name, "lora.path")):
            if _snapshot(lora) is not None:
                return lora
            if lora.revision is not None:
                raise ConfigError(
                    f"lora.revision: {shown(lora.revision)}: {name} is here, and only files of the hub have revisions; "
                    f"leave it out, or write {_HUB}{name}"
                )
            if match is not None:
                _logger.info("lora: %s is what is here; the hub's of that name is %s%s", name, _HUB, name)
            return lora
        # No repository has such a name: a file here was meant, which reading it will say.
        if match is None or (match[2] is None and name.endswith((*SAFETENSORS, *PICKLES))):
            return lora
    if match is None or (match[2] is not None and ".." in match[2].split("/")):
        raise ConfigError(f"lora.path: expected {_HUB}ORG/NAME or {_HUB}ORG/NAME/FILE@REVISION, got {shown(lora.path)}")
    hub_id, file = match[1], match[2]
    if file is not None and file.endswith(PICKLES):
        raise ConfigError(f"lora.path: {shown(file)} of {hub_id} is a pickle, which is never loaded: {CONVERT}")
    try:
        return _of_hub(lora, hub_id, file, offline, is_dry_run)
    except ModelLoadError as error:
        if name != lora.path:
            raise
        raise ModelLoadError(f"lora.path: there is no {name} here, and of the hub: {error}") from error


def _of_hub(lora: LoraConfig, hub_id: str, file: str | None, offline: bool, is_dry_run: bool) -> LoraConfig:
    commit, files = hub.repository_files(hub_id, lora.revision, offline=offline)
    by_name = {each.name: each for each in files}
    chosen = by_name[_chosen(hub_id, file, list(by_name))]
    revision = lora.revision or MAIN
    if is_dry_run and not chosen.is_here:
        _logger.info(
            "lora: %s/%s, commit %s: a run downloads %s from the hub; what it changes is checked then",
            *(hub_id, chosen.name, commit, size_text(chosen.num_bytes)),
        )
        return dataclasses.replace(lora, path=f"{hub_id}/{chosen.name}", revision=revision)
    place = hub.download_file(hub_id, chosen.name, commit if chosen.is_here else revision, offline=offline)
    # Its settings, where peft wrote them beside it; of a file with another name than peft's they count for its folder.
    settings = (Path(chosen.name).parent / CONFIG_FILE).as_posix()
    if settings in by_name:
        hub.download_file(hub_id, settings, commit, offline=offline)
        if file is None and chosen.name not in FILES_IN_FOLDERS:
            place = place.parent
    return dataclasses.replace(lora, path=str(place), revision=revision)


def _chosen(hub_id: str, file: str | None, names: Sequence[str]) -> str:
    """Return the name of the LoRA file in a repository. Raises ModelLoadError."""
    found = sorted(name for name in names if name.endswith(SAFETENSORS))
    if file is not None:
        if file in found:
            return file
        raise ModelLoadError(f"{hub_id} has no safetensors file {shown(file)}.{nearest(file, found) or _has(found)}")
    known = next((name for name in FILES_IN_FOLDERS if name in found), None)
    if known is not None or len(found) == 1:
        return known or found[0]
    if not found:
        pickles = [name for name in names if name.endswith(PICKLES)]
        raise ModelLoadError(
            f"{hub_id} has no safetensors file{f'; {listed(pickles)} is never loaded: {CONVERT}' if pickles else ''}"
        )
    raise ModelLoadError(
        f"{hub_id} has {len(found)} safetensors files; give one of them, such as --lora {hub_id}/"
        f"{found[0]}: {listed(found)}"
    )


def _has(found: Sequence[str]) -> str:
    return f" It has {listed(found) or 'none'}"
