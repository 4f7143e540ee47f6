"""Hugging Face hub: the files of a repository that are downloaded, download and resume, revisions and commits, its
cache.

Everything is huggingface_hub's own: its cache, its endpoint (HF_ENDPOINT), its tokens. Only files that a load reads are
taken: never a pickle, and one variant of weights that exist in several.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_runtime.core.model_folder import (
    INDEX_FILE,
    MODULAR_CONFIG_FILE,
    MODULAR_INDEX_FILE,
    HubPart,
    check_model_files,
    read_json,
)
from diffusion_runtime.errors import ModelLoadError, first_line, shown
from diffusion_runtime.models.registry import family_of_class, is_supported
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.weights.cached_folder import COMMIT, SNAPSHOTS, commit_of, commits_in, read_ref
from diffusion_runtime.weights.weight_files import VARIANTS, check_component_files

if TYPE_CHECKING:
    from huggingface_hub import CachedRevisionInfo

    from diffusion_runtime.models.family import ModelFamily

# Only files of components: many repositories hold a second, single-file copy of the weights at the top.
_JSON_FILES = (
    INDEX_FILE,
    MODULAR_INDEX_FILE,
    MODULAR_CONFIG_FILE,
    "generation.json",
    "*/*.json",
    "*/*.txt",
    "*/*.model",
    "*/*.jinja",
)
_WEIGHT_FILES = ("*/*.safetensors",)
# A text encoder's weights are model*.safetensors; some folders hold them a second time under the name of diffusers'
# components, which nothing reads.
_COPIES = ("text_encoder*/diffusion_pytorch_model*.safetensors",)
# COMPONENT/STEM[.VARIANT][-00001-of-00002].safetensors, and indexes of shards.
_WEIGHTS = re.compile(r"([^/]+)/(?:model|diffusion_pytorch_model)(?:\.([a-zA-Z0-9_]+))?(?:-\d+-of-\d+)?\.safetensors")


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. num_bytes: its size there; is_here: whether the cache has all of it."""

    name: str
    num_bytes: int
    is_here: bool


@dataclass(frozen=True)
class CachedModel:
    """A revision of a model in the hub's cache. refs: branches and tags that mean this commit. pipeline: the class that
    its model_index.json names, None for a repository that is no diffusers folder. is_native: whether one of our
    transformers loads it. lacks: files that a load would miss, None where all are there."""

    hub_id: str
    commit: str
    refs: tuple[str, ...]
    num_bytes: int
    folder: Path
    pipeline: str | None
    is_native: bool
    lacks: str | None


def needed_files(
    names: Iterable[str], *, weights: bool = True, elsewhere: Sequence[str] = (), variant: str | None = None
) -> list[str]:
    """Return the files of a repository that a load reads. weights: False for the json alone. elsewhere: components
    whose weights come from other files. variant: of a component's weights where it has several, such as `fp16`; without
    it, or where a component lacks it, those without a variant, else the first of VARIANTS."""
    wanted = [*_JSON_FILES, *(_WEIGHT_FILES if weights else ())]
    left_out = [*_COPIES, *(f"{glob.escape(component)}/*.safetensors" for component in elsewhere)]
    found = [name for name in names if _matches(name, wanted) and not _matches(name, left_out)]
    variants: dict[str, set[str]] = {}
    for name in found:
        if match := _WEIGHTS.fullmatch(name):
            variants.setdefault(match[1], set()).add(match[2] or "")
    chosen = {component: _chosen(there, variant) for component, there in variants.items()}
    return [
        name for name in found if (match := _WEIGHTS.fullmatch(name)) is None or (match[2] or "") == chosen[match[1]]
    ]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _chosen(variants: set[str], wanted: str | None) -> str:
    if wanted in variants:
        return str(wanted)
    order = ["", *VARIANTS]
    return min(variants, key=lambda name: (order.index(name) if name in order else len(order), name))


def list_files(hub_id: str, revision: str | None = None) -> tuple[str, list[HubFile]]:
    """Ask the hub for the commit that a revision is now, and every file of it. Raises ModelLoadError."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.hf_api import RepoFile

    try:
        api = HfApi()
        is_commit = revision is not None and COMMIT.fullmatch(revision)
        commit = str(revision) if is_commit else str(api.model_info(hub_id, revision=revision).sha)
        entries = api.list_repo_tree(hub_id, recursive=True, revision=commit)
        files = [
            HubFile(
                entry.path, entry.size, isinstance(try_to_load_from_cache(hub_id, entry.path, revision=commit), str)
            )
            for entry in entries
            if isinstance(entry, RepoFile)
        ]
    except Exception as error:  # whatever the hub's transport raises
        raise hub_error(error, hub_id, revision) from error
    return commit, files


def download(
    hub_id: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    weights: bool = True,
    elsewhere: Sequence[str] = (),
    variant: str | None = None,
) -> Path:
    """Download the files that a load reads into the hub's cache, updating it when there is a network; return the
    folder.

    offline: from the cache alone. Other arguments are needed_files'. Raises ModelLoadError with what to type.
    """
    from huggingface_hub import snapshot_download

    _keep_logs_quiet()

    def select(names: Iterable[str]) -> list[str]:
        return needed_files(names, weights=weights, elsewhere=elsewhere, variant=variant)

    def fetch(patterns: Sequence[str], *, local: bool) -> Path:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(patterns), local_files_only=local))

    if revision is None and (offline or is_offline()):
        revision = _only_commit(hub_id)
    try:
        # The json does not list single files and variants; the hub's list does.
        folder = fetch(_JSON_FILES, local=offline)
        if weights:
            names = select(_names(hub_id, folder, offline=offline))
            # Without a network the list is what the cache holds.
            patterns = list(map(glob.escape, names)) if any(map(_WEIGHTS.fullmatch, names)) else _WEIGHT_FILES
            folder = fetch(patterns, local=offline)
    except Exception as error:  # whatever the hub's transport raises: broken connections, a full disk, bad answers
        raise hub_error(error, hub_id, revision, offline=offline) from error
    check_model_files(folder)
    return folder


def component_files(
    part: HubPart, *, offline: bool = False, weights: bool = True, variant: str | None = None
) -> tuple[str, list[HubFile]]:
    """Return the commit and the files of one component of a repository, in a folder of it or at its top. Other
    arguments are needed_files'. Raises ModelLoadError."""
    commit, files = repository_files(part.hub_id, part.revision, offline=offline)
    start = f"{part.subfolder}/" if part.subfolder else ""
    inside = {each.name.removeprefix(start): each for each in files if each.name.startswith(start)}
    # needed_files knows files by their component's folder.
    wanted = variant or part.variant
    names = needed_files((f"c/{name}" for name in inside if "/" not in name), weights=weights, variant=wanted)
    if not names:
        raise ModelLoadError(f"{part.hub_id}, commit {commit}: there is no component in {shown(part.subfolder or '.')}")
    return commit, [inside[name.removeprefix("c/")] for name in names]


def download_component(
    part: HubPart, *, offline: bool = False, weights: bool = True, variant: str | None = None
) -> Path:
    """Download the files of one component into the hub's cache; return their folder. Arguments are component_files'.
    Raises ModelLoadError."""
    commit, files = component_files(part, offline=offline, weights=weights, variant=variant)
    # By the name of its revision, which the cache then knows.
    named = part.revision or "main"
    places = [
        download_file(part.hub_id, each.name, commit if each.is_here else named, offline=offline) for each in files
    ]
    return places[0].parent


def repository_files(hub_id: str, revision: str | None, *, offline: bool) -> tuple[str, list[HubFile]]:
    """Return the commit that a revision is now and the files of it, of a repository of any kind; those of the cache
    with `offline`, or where the hub cannot be reached. Raises ModelLoadError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    folder = cache_path() / f"models--{hub_id.replace('/', '--')}"
    commit = revision if revision is not None and COMMIT.fullmatch(revision) else read_ref(folder, revision or "main")
    if commit is None and revision is None:
        commit = _only_commit(hub_id)
    here = {} if commit is None else _files_in(folder / SNAPSHOTS / commit)
    reason: Exception | None = None
    if not offline and not is_offline():
        try:
            # Asked once, as in _names.
            found = HfApi().model_info(hub_id, revision=revision, files_metadata=True)
        except HfHubHTTPError as error:
            raise hub_error(error, hub_id, revision) from error
        except Exception as error:  # whatever the transport raises: the cache is asked
            reason = error
        else:
            there = _files_in(folder / SNAPSHOTS / str(found.sha))
            files = [(file.rfilename, file.size or 0) for file in found.siblings or ()]
            return str(found.sha), [HubFile(name, size, name in there) for name, size in files]
    if commit is None or not here:
        named = hub_id if revision is None else f"{hub_id}@{revision}"
        raise ModelLoadError(
            f"{named} is not in the hub's cache, and {_why_alone(offline)}; run once with a network, or give the path "
            "of a copy"
        ) from reason
    return commit, [HubFile(name, size, is_here=True) for name, size in here.items()]


def _files_in(folder: Path) -> dict[str, int]:
    """Return the sizes of the files below a folder by their names."""
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def download_file(hub_id: str, name: str, revision: str, *, offline: bool = False) -> Path:
    """Download one file into the hub's cache and return its path there; an interrupted download resumes where it
    stopped. offline: from the cache alone. Raises ModelLoadError."""
    from huggingface_hub import hf_hub_download

    _keep_logs_quiet()
    try:
        return Path(hf_hub_download(hub_id, name, revision=revision, local_files_only=offline))
    except Exception as error:  # as above
        raise hub_error(error, hub_id, revision, offline=offline) from error


def _keep_logs_quiet() -> None:
    """Leave out the library's progress bars where standard error is a file."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()


def _names(hub_id: str, folder: Path, *, offline: bool) -> list[str]:
    """Return the files of `folder`'s commit: by the hub's list, or those that are here without a network."""
    commit = commit_of(folder)
    if not offline and commit is not None:
        from huggingface_hub import HfApi

        # Asked once. The list of a tree, which has sizes too, is retried for 20 s where there is no network.
        with contextlib.suppress(Exception):  # whatever the hub's transport raises
            return [file.rfilename for file in HfApi().model_info(hub_id, revision=commit).siblings or ()]
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def cached_folder(hub_id: str, revision: str | None = None) -> Path | None:
    """Return the folder of a model in the hub's cache, complete or not; None without one. Uses no network."""
    # snapshot_download does the same, and imports the hub's whole interface: 0.3 of the 3.4 s of `explain`.
    from huggingface_hub.file_download import try_to_load_from_cache

    for name in (INDEX_FILE, MODULAR_INDEX_FILE):
        try:
            found = try_to_load_from_cache(hub_id, name, revision=revision or _only_commit(hub_id))
        except (OSError, ValueError):
            # A cache that cannot be read; a name that the hub's library refuses.
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def cached_file(hub_id: str, name: str) -> Path | None:
    """Return a file of a repository in the hub's cache; None without one. Uses no network."""
    from huggingface_hub.file_download import try_to_load_from_cache

    with contextlib.suppress(OSError, ValueError):
        found = try_to_load_from_cache(hub_id, name, revision=_only_commit(hub_id))
        return Path(found) if isinstance(found, str) else None
    return None


def _only_commit(hub_id: str) -> str | None:
    """Return the one commit of a cached model that has no refs/main, such as a copy; None for any other model."""
    folder = cache_path() / f"models--{hub_id.replace('/', '--')}"
    found = commits_in(folder)
    return found[0] if len(found) == 1 and read_ref(folder, "main") is None else None


def cache_path() -> Path:
    """Return the path of the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def is_offline() -> bool:
    """Return whether the environment forbids access to the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def cached_models() -> tuple[list[CachedModel], list[str]]:
    """Return every revision of every model in the hub's cache, and what is damaged in it. Uses no network."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(cache_path())
    except CacheNotFound:
        return [], []
    models = [
        _cached_model(repository.repo_id, revision)
        for repository in cache.repos
        if repository.repo_type == "model"
        for revision in repository.revisions
    ]
    return sorted(models, key=lambda model: (model.hub_id, model.commit)), [first_line(each) for each in cache.warnings]


def _cached_model(hub_id: str, revision: CachedRevisionInfo) -> CachedModel:
    folder = Path(revision.snapshot_path)
    pipeline, is_native, lacks = None, False, None
    place = next((folder / name for name in (INDEX_FILE, MODULAR_INDEX_FILE) if (folder / name).is_file()), None)
    if place is not None:
        try:
            index = read_json(place)
            pipeline = str(index.get("_class_name"))
            family = native_family(folder)
            is_native = family is not None
            if place.name == INDEX_FILE:
                check_component_files(folder, () if family is None else family.unread_components(None))
        except (ModelLoadError, DocumentError) as error:
            # The folder is known.
            lacks = str(error).removeprefix(f"{folder}/")
    refs = tuple(sorted(revision.refs))
    return CachedModel(hub_id, revision.commit_hash, refs, revision.size_on_disk, folder, pipeline, is_native, lacks)


def native_family(folder: Path) -> ModelFamily[Any, Any] | None:
    """Return the family that loads a repository, by its index in `folder`; None where none does. Raises ModelLoadError
    and DocumentError."""
    place = next((folder / name for name in (INDEX_FILE, MODULAR_INDEX_FILE) if (folder / name).is_file()), None)
    entry: Any = None if place is None else read_json(place).get("transformer")
    is_native = isinstance(entry, list) and len(entry) in (2, 3) and is_supported(str(entry[1]))
    return family_of_class(entry[1]) if is_native else None


def hub_error(error: Exception, hub_id: str, revision: str | None = None, *, offline: bool = False) -> ModelLoadError:
    """Convert an error of the hub's library to one that tells what to type."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, ModelLoadError):
        return error
    instead = "or give the path of a copy, or 'emoji' for the embedded model, which needs no network"
    named = hub_id if revision is None else f"{hub_id}@{revision}"
    if isinstance(error, GatedRepoError):
        return ModelLoadError(
            f"{hub_id}: its terms must be accepted first, at https://huggingface.co/{hub_id}; then `hf auth login`"
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelLoadError(
            f"there is no folder {hub_id} here and no such model on the hub, or it is private: check the spelling, or "
            f"`hf auth login`; {instead}"
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelLoadError(
            f"{hub_id} has no revision {revision} on the hub: give one of its branches, tags or commits by --revision, "
            "or leave it out for the main branch"
        )
    if isinstance(error, LocalEntryNotFoundError):
        why = _why_alone(offline)
        if offline:
            why += f", or `diffusion-runtime models download {named}` with a network"
        here = commits_in(cache_path() / f"models--{hub_id.replace('/', '--')}")
        if here and revision is None:
            return ModelLoadError(
                f"{named}: the hub's cache says no commit of its main branch that is whole, and {why}; a snapshot of "
                f"it is there: write --model-path {hub_id}@{here[0]} --offline"
            )
        return ModelLoadError(f"{named} is neither a folder here nor whole in the hub's cache, and {why}; {instead}")
    return ModelLoadError(f"{named} cannot be downloaded ({first_line(error)}); try again: it goes on where it stopped")


def _why_alone(offline: bool) -> str:
    """Return why the hub is not asked, and what to do about it."""
    if offline:
        return "--offline is given: leave it out"
    return "HF_HUB_OFFLINE is set: unset it" if is_offline() else "the hub cannot be reached: check the network"
