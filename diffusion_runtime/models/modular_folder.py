"""Modular repositories of diffusers (modular_model_index.json): components in several repositories, read as one folder.

An entry is [library, class, {pretrained_model_name_or_path, subfolder, type_hint, revision, variant}]. A folder that
stands for an ordinary pipeline of ours is opened as one of those; any other is for diffusers' own ModularPipeline.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusion_runtime.core.model_folder import (
    INDEX_FILE,
    MODULAR_CONFIG_FILE,
    MODULAR_INDEX_FILE,
    HubPart,
    ModelFolder,
    ModularIndex,
    Workflow,
    read_json,
    standing_in,
)
from diffusion_runtime.errors import ModelLoadError, shown
from diffusion_runtime.models import hub
from diffusion_runtime.models.guider import read_guidance_scale
from diffusion_runtime.models.registry import family_for_folder, family_of_class, is_supported
from diffusion_runtime.weights.cached_folder import commit_of, hub_id_of

_logger = logging.getLogger("diffusion_runtime.loading")
_LIBRARIES = ("diffusers", "transformers")
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+")
_SUBFOLDER = re.compile(r"(?!.*\.\.)[\w-][\w.-]*(/[\w-][\w.-]*)*")
# diffusers' modular class -> its ordinary one, where "Modular" is not the only difference.
_ORDINARY = {
    "Flux2KleinBaseModularPipeline": "Flux2KleinPipeline",
    "QwenImage21TurboModularPipeline": "QwenImage21Pipeline",
    "Wan22Image2VideoModularPipeline": "WanImageToVideoPipeline",
    "Wan22ModularPipeline": "WanPipeline",
    "WanImage2VideoModularPipeline": "WanImageToVideoPipeline",
}
# The request field of each guider's scale.
_GUIDERS = {"guider": "guidance_scale", "guider_2": "guidance_scale_2"}


def is_modular(folder: Path) -> bool:
    """Return whether the modular index of a folder counts: where it has no other, or one that is for a modular class
    as well. Raises ModelLoadError."""
    if not (folder / MODULAR_INDEX_FILE).is_file():
        return False
    ordinary = folder / INDEX_FILE
    return not ordinary.is_file() or _is_modular_class(read_json(ordinary).get("_class_name"))


def open_folder(
    folder: ModelFolder, *, backend: str = "auto", offline: bool = False, workflow: str | None = None
) -> ModelFolder:
    """Return a folder with the components of its modular index, each from its own repository, whose json is downloaded;
    a folder without one as it is. backend: of RuntimeConfig; `native` refuses what no family stands for. workflow: of
    RuntimeConfig, where a native model runs.

    Raises ConfigError for a workflow that the family does not have, and ModelLoadError for code that comes with the
    folder, a component that leaves its repository or names a place of this machine from the hub, and what is missing.
    """
    has_both = all((folder.path / name).is_file() for name in (INDEX_FILE, MODULAR_INDEX_FILE))
    if not is_modular(folder.path):
        if has_both:
            _logger.info("%s: %s is ignored, %s is used", folder, MODULAR_INDEX_FILE, INDEX_FILE)
        if workflow is None or backend == "diffusers":
            return folder
        family = family_for_folder(folder)
        return folder.with_workflow(family.files.workflow(workflow, family.name))
    if has_both:
        _logger.info("%s: %s is ignored, %s is used", folder, INDEX_FILE, MODULAR_INDEX_FILE)
    index = folder.read_json(MODULAR_INDEX_FILE)
    name = index.get("_class_name")
    where = folder.path / MODULAR_INDEX_FILE
    if not isinstance(name, str) or not _is_modular_class(name):
        raise ModelLoadError(f"{where}: key '_class_name': expected a modular pipeline of diffusers, got {shown(name)}")
    _refuse_code(folder.path, index)
    specifications = _specifications(where, index)
    for component, value in index.items():
        if _is_entry(value) and component not in specifications and value[2].get("pretrained_model_name_or_path"):
            _logger.info("%s: %s is left out: the index names no class of it", folder, component)
    blocks = index.get("_blocks_class_name")
    if not isinstance(blocks, str | None):
        raise ModelLoadError(f"{where}: key '_blocks_class_name': expected a class of diffusers, got {shown(blocks)}")
    settings = {key: value for key, value in index.items() if not key.startswith("_") and not _is_entry(value)}
    why = _not_native(_opened(folder, name, settings, specifications, {}, {}), name, blocks)
    if why is not None and backend == "native":
        raise ModelLoadError(f"{where}: {why}; `--backend diffusers` runs the folder")
    is_native = why is None and backend != "diffusers"
    chosen: Workflow | None = None
    if is_native and workflow is not None:
        family = family_of_class(specifications["transformer"][0][1])
        chosen = family.files.workflow(workflow, family.name)
        specifications = standing_in(chosen, specifications)
    if is_native:
        for component in _left_out(specifications):
            del specifications[component]
            _logger.info("%s: %s is left out, which the native model has no use for", folder, component)
    parts: dict[str, Path] = {}
    elsewhere: dict[str, HubPart] = {}
    for component, (_, spec) in specifications.items():
        found = _located(folder.path, component, spec)
        if isinstance(found, HubPart):
            place = hub.download_component(found, offline=offline, weights=False)
            commit = next(each for each in map(commit_of, (place, *place.parents)) if each is not None)
            elsewhere[component] = dataclasses.replace(found, revision=commit)
            _logger.info("%s: %s comes from %s, commit %s", folder, component, found.hub_id, commit)
            found = place
        elif found.parent != folder.path or found.name != component:
            _logger.info("%s: %s comes from %s", folder, component, found)
        parts[component] = found
    if is_native:
        opened = _with_guidance(_opened(folder, name, settings, specifications, parts, elsewhere), parts)
        return opened if chosen is None else opened.with_workflow(chosen)
    if backend == "auto":
        _logger.info("%s: %s; diffusers' own %s runs it", folder, why, name)
    components = {component: pair for component, (pair, _) in specifications.items()}
    own = ModularIndex(name, {"_class_name": name, **settings, **components}, elsewhere, blocks)
    return folder.with_modular(own, parts)


def _opened(
    folder: ModelFolder,
    name: str,
    settings: Mapping[str, Any],
    specifications: Mapping[str, tuple[list[str], Mapping[str, Any]]],
    parts: Mapping[str, Path],
    elsewhere: Mapping[str, HubPart],
) -> ModelFolder:
    """Return a folder as that of the ordinary pipeline which a modular one of this name stands for."""
    components = {component: pair for component, (pair, _) in specifications.items()}
    index = {"_class_name": _ordinary(name), **settings, **components}
    return folder.with_modular(ModularIndex(name, index, elsewhere), parts)


def _left_out(specifications: Mapping[str, tuple[list[str], Mapping[str, Any]]]) -> list[str]:
    """Return the components that the family of the transformer has no use for."""
    names = [pair[1] for component, (pair, _) in specifications.items() if component == "transformer"]
    unused = [each for name in names if is_supported(name) for each in family_of_class(name).files.left_out]
    return [component for component in specifications if component in unused]


def read_places(folder: Path) -> tuple[str, dict[str, tuple[str, Path | HubPart]]]:
    """Return the class of a modular folder, and of every component its class and its place, by the index alone. Raises
    ModelLoadError."""
    where = folder / MODULAR_INDEX_FILE
    index = read_json(where)
    found = _specifications(where, index).items()
    places = {name: (f"{pair[0]} {pair[1]}", _located(folder, name, spec)) for name, (pair, spec) in found}
    return str(index.get("_class_name")), places


def parts_elsewhere(folder: Path) -> dict[str, HubPart]:
    """Return the components of a modular folder that other repositories hold and its family reads, by its index alone;
    none for any other folder. Raises ModelLoadError."""
    if not is_modular(folder):
        return {}
    where = folder / MODULAR_INDEX_FILE
    specifications = _specifications(where, read_json(where))
    left_out = _left_out(specifications)
    places = {name: _located(folder, name, spec) for name, (_, spec) in specifications.items() if name not in left_out}
    return {name: place for name, place in places.items() if isinstance(place, HubPart)}


def _specifications(where: Path, index: Mapping[str, Any]) -> dict[str, tuple[list[str], Mapping[str, Any]]]:
    """Return ([library, class], where to load it from) of every component that the pipeline has."""
    return {key: both for key, value in index.items() if (both := _specification(where, key, value))}


def _is_modular_class(name: object) -> bool:
    return isinstance(name, str) and name.endswith("ModularPipeline")


def _ordinary(name: str) -> str:
    return _ORDINARY.get(name, name.replace("Modular", ""))


def _is_entry(value: object) -> bool:
    """Return whether a value of the index is a component: [library, class, {...}]."""
    return isinstance(value, list) and len(value) == 3 and isinstance(value[2], dict)


def _refuse_code(folder: Path, index: Mapping[str, Any]) -> None:
    """Check that no code comes with a folder, which would have to run to open it. Raises ModelLoadError."""
    custom = folder / MODULAR_CONFIG_FILE
    has_code = "auto_map" in index or (custom.is_file() and "auto_map" in read_json(custom))
    if has_code:
        raise ModelLoadError(
            f"{folder}: its blocks are code that comes with the folder (auto_map), and no such code is run; use a "
            "folder whose blocks are diffusers' own"
        )


def _specification(where: Path, key: str, value: object) -> tuple[list[str], Mapping[str, Any]] | None:
    """Return ([library, class], where to load it from) of an entry; None for a value that is none, for a component that
    the pipeline is without, and for one without a class, which diffusers cannot load either. Raises ModelLoadError."""
    if key.startswith("_") or not isinstance(value, list) or not _is_entry(value):
        return None
    spec = value[2]
    hint = spec.get("type_hint")
    pair = list(value[:2]) if value[1] is not None else hint
    has_class = any(value[:2]) or (isinstance(pair, list) and any(pair))
    if spec.get("pretrained_model_name_or_path") is None or not has_class:
        return None
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(each, str) for each in pair):
        raise ModelLoadError(f"{where}: key {shown(key)}: expected [library, class name, ...], got {shown(value)}")
    if pair[0] not in _LIBRARIES and not _is_of_pipeline(pair[0]):
        raise ModelLoadError(
            f"{where}: key {shown(key)}: {shown(pair[0])} is code that comes with the folder; only classes of "
            f"{' and '.join(_LIBRARIES)} are loaded"
        )
    known = ("type_hint", "pretrained_model_name_or_path", "subfolder", "revision", "variant")
    for name, given in spec.items():
        if name not in known or (name != "type_hint" and not isinstance(given, str | None)):
            raise ModelLoadError(f"{where}: key {shown(key)}: {shown(name)}: {shown(given)} is unknown here")
    return pair, spec


def _is_of_pipeline(library: str) -> bool:
    """Return whether an index means classes in the folder of one of diffusers' pipelines, as of LTX-2's connectors."""
    import diffusers

    return library.isidentifier() and hasattr(getattr(diffusers.pipelines, library, None), "__path__")


def _located(folder: Path, component: str, spec: Mapping[str, Any]) -> Path | HubPart:
    """Return where a component is. Raises ModelLoadError."""
    where = f"{folder / MODULAR_INDEX_FILE}: key {shown(component)}"
    source, subfolder = str(spec["pretrained_model_name_or_path"]), spec.get("subfolder") or ""
    revision, variant = spec.get("revision"), spec.get("variant")
    if subfolder and not _SUBFOLDER.fullmatch(subfolder):
        raise ModelLoadError(f"{where}: 'subfolder': expected a folder inside the repository, got {shown(subfolder)}")
    commit = commit_of(folder)
    inside = folder / subfolder
    if commit is not None and source == hub_id_of(folder.parent.parent) and revision in (None, commit):
        return inside
    # As diffusers does: a local copy of a repository keeps the index, which names the hub.
    if commit is None and subfolder and inside.is_dir():
        return inside
    if _HUB_ID.fullmatch(source) and (commit is not None or not (folder / source).is_dir()):
        return HubPart(source, subfolder, revision, variant)
    if commit is not None:
        raise ModelLoadError(
            f"{where}: expected a repository of the hub, ORG/NAME, got {shown(source)}: one repository of the hub may "
            "not name a place of this machine"
        )
    # A path; the folder is the user's own.
    place = folder / source / subfolder
    if not place.is_dir():
        raise ModelLoadError(f"{where}: {place} is no folder; copy or download the component, or correct the path")
    return place


def _not_native(folder: ModelFolder, name: str, blocks: object) -> str | None:
    """Return why no family of ours stands for a modular folder; None where one does."""
    import diffusers

    entry = folder.read_json(INDEX_FILE).get("transformer")
    transformer = entry[1] if isinstance(entry, list) else None
    if transformer is None or not is_supported(transformer):
        return f"there is no native model for {shown(transformer)}"
    if _ordinary(name) not in family_for_folder(folder).files.pipeline_classes:
        return f"there is no native model for what {name} does"
    theirs: Any = getattr(diffusers, name, None)
    known = (None, "SequentialPipelineBlocks", getattr(theirs, "default_blocks_name", None))
    return None if blocks in known else f"its blocks are {shown(blocks)}, which no native model is"


def _with_guidance(folder: ModelFolder, parts: Mapping[str, Path]) -> ModelFolder:
    """Return a native folder with the scales of its guiders as request defaults, in place of the guiders. Raises
    ModelLoadError for a guider that has no counterpart."""
    assert folder.modular is not None
    index, offset = dict(folder.modular.index), family_for_folder(folder).requests.guidance_offset
    defaults: dict[str, Any] = {}
    for component, field in _GUIDERS.items():
        scale = read_guidance_scale(folder, component)
        if scale is not None:
            defaults[field] = scale - offset
        index.pop(component, None)
    return folder.with_modular(dataclasses.replace(folder.modular, index=index, defaults=defaults), parts)
