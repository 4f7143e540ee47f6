"""Model sources: the folder behind a model path, a published name or a hub id, downloaded where it is on the hub."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion_runtime.config import split_revision
from diffusion_runtime.core.model_folder import (
    INDEX_FILE,
    MODULAR_INDEX_FILE,
    AnyFolder,
    ModelFolder,
    check_model_files,
    component_class,
)
from diffusion_runtime.errors import ModelLoadError, did_you_mean, nearest, shown
from diffusion_runtime.models import hub
from diffusion_runtime.models.published import model_of_name, published_model_of, published_models
from diffusion_runtime.models.published_folders import packaged_folder, published_folders
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.untrusted.files import check_place, user_path
from diffusion_runtime.untrusted.yaml_text import read_packaged_yaml
from diffusion_runtime.weights.cached_folder import commit_of, snapshot_in
from diffusion_runtime.weights.weight_files import (
    COMPONENT_STEM,
    CONVERT,
    PICKLES,
    STEMS,
    SUFFIXES,
    find_component_files,
    find_weight_files,
    listed,
)

# The models that ship inside the package, and their folders; EMBEDDED is the default, shapes-causal makes videos chunk
# by chunk.
EMBEDDED = "emoji"
_ASSETS = Path(__file__).parents[1] / "assets"
EMBEDDED_FOLDERS = {
    "shapes": _ASSETS / "shapes",
    "shapes-causal": _ASSETS / "shapes_causal",
    EMBEDDED: _ASSETS / "emoji",
}
EMBEDDED_FOLDER = EMBEDDED_FOLDERS[EMBEDDED]

_WELL_KNOWN_FILE = Path(__file__).with_name("well_known_files.yaml")

# owner/name, which no path that starts with a dot, a slash or a tilde is.
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def resolve_model_folder(
    model_path: str,
    *,
    weights: bool = True,
    elsewhere: Sequence[str] = (),
    revision: str | None = None,
    offline: bool = False,
    variant: str | None = None,
) -> Path:
    """Return the folder behind `shapes`, `shapes-causal` or `emoji`, the path of a folder, the name of a published
    model such as `wan2.1-1.3b`, or a hub id such as `Wan-AI/Wan2.1-T2V-1.3B-Diffusers`.

    A model on the hub is downloaded into the hub's own cache, or taken from there: json, txt, model and safetensors
    files, never a pickle. weights: False leaves the safetensors files out, for callers that read the json alone.
    elsewhere: components whose safetensors files are left out. revision: of the hub's; model_path may contain it too
    (`org/name@v1`). offline: no network is used. variant: of weights that exist in several.

    Raises ModelLoadError with what to type instead.
    """
    model_path, revision = _at_revision(model_path, revision)
    embedded = EMBEDDED_FOLDERS.get(model_path)
    if embedded is not None:
        _refuse_revision(model_path, revision)
        if (embedded / INDEX_FILE).is_file():
            return embedded
        raise ModelLoadError(f"the embedded model is not in {embedded}; install diffusion-runtime again")
    path = user_path(model_path, "model_path")
    if path.is_dir():
        if not any((path / name).exists() for name in (INDEX_FILE, MODULAR_INDEX_FILE)):
            if (snapshot := snapshot_in(path, revision)) is not None:
                check_model_files(snapshot)
                return snapshot
            # Imported for this message alone: it reads weights, with torch.
            from diffusion_runtime.models.misplaced_files import advice_for_comfyui

            if (advice := advice_for_comfyui(path)) is not None:
                raise ModelLoadError(f"{path} is no diffusers folder: {advice}")
            for file in sorted(path.iterdir()):
                _refuse_single_file(file)
        _refuse_revision(model_path, revision)
        check_model_files(path)
        return path
    if path.is_file():
        _refuse_single_file(path)
        raise ModelLoadError(f"{model_path} is a file; give the folder that holds {INDEX_FILE}, such as {path.parent}")
    check_place(path, "model_path")
    if path.suffix in SUFFIXES:
        raise ModelLoadError(f"there is no file {model_path}.{_sibling_files(path)}")
    named = model_of_name(model_path)
    if named is not None:
        return _download(named.model_path, weights, elsewhere, revision, offline, variant)
    if not _HUB_ID.fullmatch(model_path):
        embedded_names = " or ".join(f"`{name}`" for name in EMBEDDED_FOLDERS)
        raise ModelLoadError(
            f"there is no model folder {model_path}.{_siblings(path, model_path)} Give {embedded_names} (the embedded "
            "models), a diffusers folder, a name that `diffusion-runtime models` "
            "lists, or a hub id such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
        )
    return _download(model_path, weights, elsewhere, revision, offline, variant)


def current_commit(model_path: str, revision: str | None = None, *, offline: bool = False) -> str | None:
    """Return the commit that a model on the hub is now, for processes that are to load the same; None for a model that
    is here. Raises ModelLoadError."""
    model_path, revision = _at_revision(model_path, revision)
    named = model_of_name(model_path)
    is_here = model_path in EMBEDDED_FOLDERS or user_path(model_path, "model_path").exists()
    if is_here or (named is None and not _HUB_ID.fullmatch(model_path)):
        return None
    commit, _ = hub.repository_files(model_path if named is None else named.model_path, revision, offline=offline)
    return commit


@dataclass(frozen=True)
class ConfigFolder:
    """A folder with the json of a model. downloads_gb, is_packaged: as of ModelFolder."""

    path: Path
    downloads_gb: Mapping[str, float] | None = None
    is_packaged: bool = False


def find_configs(
    model_path: str, *, revision: str | None = None, offline: bool = False, workflow: str | None = None
) -> ConfigFolder:
    """Return the json of a model for callers that read nothing else: for a published model the hub's cached files,
    else those in the package, so that neither the network nor a download is needed. workflow: of RuntimeConfig. Any
    other, and a published model at a revision that is not in the cache, as resolve_model_folder, whose errors it
    raises."""
    model_path, revision = _at_revision(model_path, revision)
    published = published_model_of(model_path, workflow)
    packaged = None if published is None else packaged_folder(published.model_path)
    cached = None if published is None or packaged is None else _cached(published.model_path, revision)
    if published is None or packaged is None or (cached is None and revision is not None):
        return ConfigFolder(resolve_model_folder(model_path, weights=False, revision=revision, offline=offline))
    if cached is None:
        return ConfigFolder(packaged, published.downloads_gb, is_packaged=True)
    # A download that was interrupted, or of the json alone.
    folder = open_workflow(cached, published.workflow)
    missing = {name: size for name, size in published.downloads_gb.items() if not has_weights(folder, name)}
    return ConfigFolder(cached, missing or None)


def open_workflow(path: Path, workflow: str | None) -> AnyFolder:
    """Return a folder opened for a workflow of its family; itself for the first one. Raises ConfigError and
    ModelLoadError."""
    if workflow is None:
        return path
    family = family_for_folder(path)
    return ModelFolder(path).with_workflow(family.files.workflow(workflow, family.name))


def has_weights(folder: AnyFolder, component: str) -> bool:
    """Return whether all weight files of a component are there."""
    try:
        find_weight_files(folder / component, STEMS.get(component_class(folder, component)[0], COMPONENT_STEM))
    except ModelLoadError:
        return False
    return True


def _cached(hub_id: str, revision: str | None) -> Path | None:
    """Return the folder in the hub's cache that has every json file of a published model, None without one; uses no
    network."""
    folder = hub.cached_folder(hub_id, revision)
    if folder is None:
        return None
    wanted = published_folders()[hub_id.rpartition("/")[2]]
    if not all((folder / name).is_file() for name in wanted):
        return None
    check_model_files(folder)
    return folder


def _at_revision(model_path: str, revision: str | None) -> tuple[str, str | None]:
    """Return the path without its revision, and the revision given by either."""
    path, own = split_revision(model_path)
    return path, revision if own is None else own


def _refuse_revision(model_path: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelLoadError(
            f"revision {shown(revision)}: {model_path} is a folder here, and only models of the hub have revisions; "
            "leave it out"
        )


def addresses_of(name: str) -> dict[str, str]:
    """Return where ComfyUI's users get the files of a published model, by component, the transformer first: the first
    known one of each."""
    found: dict[str, str] = {}
    for entry in read_packaged_yaml(_WELL_KNOWN_FILE)["files"]:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in entry["models"]):
            owner, repository, *rest = entry["files"][0].split("/")
            address = f"https://huggingface.co/{owner}/{repository}/resolve/main/{'/'.join(rest)}"
            found |= {part: address for part in entry["parts"] if part not in found}
    return dict(sorted(found.items(), key=lambda each: each[0] != "transformer"))


def fetch_weights(
    model_path: str,
    folder: AnyFolder,
    elsewhere: Sequence[str] = (),
    *,
    offline: bool = False,
    variant: str | None = None,
) -> None:
    """Download the safetensors of a model into `folder`, which resolve_model_folder found with weights=False; a local
    folder has them, and beside the json of this package all weights are other files. elsewhere: components whose
    weights are read from other files, and not downloaded. Raises what resolve_model_folder raises."""
    parts = folder.modular.elsewhere if isinstance(folder, ModelFolder) and folder.modular is not None else {}
    for name, part in parts.items():
        if name not in elsewhere:
            hub.download_component(part, offline=offline, variant=variant)
    if _is_local(model_path) or (isinstance(folder, ModelFolder) and folder.is_packaged):
        return
    # The commit that was opened, whatever its branch is by now.
    path = folder.path if isinstance(folder, ModelFolder) else folder
    commit = commit_of(path)
    on_disk = folder.on_disk(elsewhere) if isinstance(folder, ModelFolder) else elsewhere
    found = resolve_model_folder(
        model_path, elsewhere=[*on_disk, *parts], revision=commit, offline=offline, variant=variant
    )
    if str(found) != str(folder):
        raise ModelLoadError(f"{model_path} has changed on the hub since it was opened ({folder}, {found}): try again")


def check_weights_are_there(
    model_path: str, folder: AnyFolder, elsewhere: Sequence[str] = (), *, offline: bool = False
) -> None:
    """Check that weights are there where `fetch_weights` downloads nothing; reads none of them. elsewhere: see
    fetch_weights. Raises ModelLoadError for a component without weight files."""
    is_in_package = isinstance(folder, ModelFolder) and folder.is_packaged
    if isinstance(folder, ModelFolder) and folder.modular is not None and not (offline or hub.is_offline()):
        # A run downloads what other repositories hold.
        elsewhere = [*elsewhere, *folder.modular.elsewhere]
    if not is_in_package and (_is_local(model_path) or offline or hub.is_offline()):
        find_component_files(folder, elsewhere)


def _is_local(model_path: str) -> bool:
    return model_path in EMBEDDED_FOLDERS or user_path(model_path, "model_path").is_dir()


def _sibling_files(path: Path) -> str:
    """Return the names most like a missing file's among the files of weights beside it; else all."""
    parent = path.absolute().parent
    if not parent.is_dir():
        return f" Its parent {parent} does not exist either."
    names = sorted(entry.name for entry in parent.iterdir() if entry.suffix in SUFFIXES)
    return nearest(path.name, names) if names else f" No file in {parent} holds weights ({', '.join(SUFFIXES)})."


def _siblings(path: Path, typed: str = "") -> str:
    """Return the names most like a missing path's among its siblings; else models like `typed`; else all."""
    parent = path.absolute().parent
    if not parent.is_dir():
        return f" Its parent {parent} does not exist either."
    names = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())
    return (
        did_you_mean(path.name, names)
        or named_alike(typed)
        or f" In {parent} there is: {listed(names) or 'no folder'}."
    )


def named_alike(typed: str) -> str:
    """Return ` Did you mean 'flux.1-dev'?` for a name that is nearly one of `diffusion-runtime models`, or begins one;
    a path is none."""
    if "/" in typed:
        return ""
    known = [*EMBEDDED_FOLDERS, *(model.name for model in published_models())]
    spelled = typed.lower()
    if close := did_you_mean(spelled, known):
        return close
    begun = [name for name in known if len(spelled) > 2 and name.startswith(spelled)]
    return f" Did you mean {' or '.join(map(repr, begun[:3]))}?" if begun else ""


def _download(
    hub_id: str,
    weights: bool,
    elsewhere: Sequence[str] = (),
    revision: str | None = None,
    offline: bool = False,
    variant: str | None = None,
) -> Path:
    """Download `hub_id` into the hub's cache, updating it when there is a network; return the folder."""
    published = published_model_of(hub_id)
    if published is not None and published.files_alone:
        raise ModelLoadError(
            f"{published.name}: its authors publish pickles, which are never read. Download these into one folder, and "
            "give the first by --model-path, the others are found beside it:"
            + "".join(f"\n  {address}" for address in addresses_of(published.name).values())
        )
    try:
        return hub.download(
            hub_id, revision=revision, offline=offline, weights=weights, elsewhere=elsewhere, variant=variant
        )
    except ModelLoadError as error:
        beside = _beside(hub_id)
        if not beside:
            raise
        raise ModelLoadError(f"{error}.{beside}") from error


def _beside(hub_id: str) -> str:
    """Return the siblings in the local folder that a hub id would name, if there is one: it may have been meant."""
    path = Path(hub_id)
    return _siblings(path) if path.parent.is_dir() else ""


def _refuse_single_file(path: Path) -> None:
    """Refuse a checkpoint in one file where the folder of a model should be. Raises ModelLoadError."""
    if path.suffix in SUFFIXES:
        from diffusion_runtime.models.misplaced_files import advice_for_file

        raise ModelLoadError(f"{path} is one file, and a model is a folder: {advice_for_file(path)}")
    if path.suffix in PICKLES:
        raise ModelLoadError(
            f"{path} is a pickled checkpoint, which can run code when it is opened, and is never loaded: "
            f"{CONVERT}; see `diffusion-runtime models convert --help`"
        )
