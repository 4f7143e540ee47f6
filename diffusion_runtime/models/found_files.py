"""A model from the files of ComfyUI's folders: one file is given as the model, the others are found by their content.

The result is a RuntimeConfig that names each file by the option of its part, so that nothing behind it differs from one
that was typed in full.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.core.model_folder import AnyFolder, ModelFolder, read_index
from diffusion_runtime.core.runtime_options import flag_name
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, ModelLoadError, first_line, shown
from diffusion_runtime.models.comfyui_folders import (
    CHECKPOINTS,
    MAX_DEPTH,
    PARTS,
    UPSAMPLERS,
    VARIABLE,
    files_in,
    known_root,
    model_roots,
    named_file,
)
from diffusion_runtime.models.lora_sources import with_loras_in
from diffusion_runtime.models.misplaced_files import advice_for_file
from diffusion_runtime.models.model_sources import find_configs, has_weights
from diffusion_runtime.models.part_files import (
    BY_NAMES,
    PART_KEYS,
    PartFile,
    has_tokenizer,
    misfit_of,
    named_components,
    part_files,
    tokenizer_id_of,
    with_parts,
)
from diffusion_runtime.models.recognised_files import fits_transformer, published_of, recognise_transformer
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.untrusted.files import user_path
from diffusion_runtime.untrusted.yaml_text import read_packaged_yaml
from diffusion_runtime.weights.file_kinds import kind_of
from diffusion_runtime.weights.file_parts import parts_of
from diffusion_runtime.weights.transformer_files import TransformerFile
from diffusion_runtime.weights.weight_files import (
    GGUF,
    PICKLES,
    SUFFIXES,
    listed,
    stored_dtypes,
)

_logger = logging.getLogger("diffusion_runtime.loading")

_MAX_MISFITS = 3
# Of a head, where many files are looked at.
_MAX_HEADER_BYTES = 16 * 2**20
_OPTIONS = {"transformer": "transformer_path", "transformer_2": "transformer_2_path"} | {
    component: key for key, component in PART_KEYS.items()
}
_WELL_KNOWN_FILE = Path(__file__).with_name("well_known_files.yaml")


def names_one_file(config: RuntimeConfig) -> bool:
    """Return whether the model of a config is one file of weights rather than a folder or a name."""
    path = user_path(config.model_path, "model_path")
    return path.suffix in SUFFIXES and path.is_file()


def _upsampler_in(roots: Sequence[Path], text: str | None) -> str | None:
    path = None if text is None else named_file(text, "upsampler_path", roots, UPSAMPLERS)
    return text if path is None else str(path)


def with_found_files(config: RuntimeConfig) -> RuntimeConfig:
    """Return a config whose model is one file as one that names the published model that the file is of, or `like`, and
    the file of each part; any other config as it is. LoRA files and an upsampler that are named without their folder
    are those of ComfyUI's folders, for any model.

    Raises ModelLoadError for a file that is no transformer of a known size, and for parts that are not found, which say
    which file is missing; ConfigError where several fit, and for options of this search without such a file.
    """
    is_file = names_one_file(config)
    if config.lora or config.upsampler_path is not None:
        roots = model_roots(user_path(config.model_path, "model_path") if is_file else None, config.models_dir)
        named = dataclasses.replace(
            config, lora=with_loras_in(roots, config.lora), upsampler_path=_upsampler_in(roots, config.upsampler_path)
        )
        is_used = not is_file and named != config
        config = dataclasses.replace(named, models_dir=()) if is_used else named
    if not is_file:
        unused = [name for name in ("like", "models_dir", "download") if getattr(config, name)]
        if unused:
            if Path(config.model_path).suffix in (*SUFFIXES, *PICKLES):
                # Raises for a path that is no file's, and for a pickle.
                find_configs(config.model_path, offline=True)
            flags = ", ".join(map(flag_name, unused))
            raise ConfigError(
                f"{', '.join(unused)}: for a model that is one file (--model-path FILE.safetensors), and "
                f"{shown(config.model_path)} is none; leave out {flags}"
            )
        return config
    path = user_path(config.model_path, "model_path")
    if config.transformer_path is not None and user_path(config.transformer_path, "transformer_path") != path:
        raise ConfigError(
            f"transformer_path: {config.transformer_path}: and model_path names a transformer's file as well: {path}; "
            "give one of them"
        )
    if config.offline and config.download:
        raise ConfigError("download: offline asks no network; leave out --offline or --download")
    like = _published_name(path) if config.like is None else config.like
    offline = not config.download
    try:
        folder = ModelFolder(find_configs(like, revision=config.revision, offline=offline).path)
    except ModelLoadError as error:
        if config.like is None or config.download or user_path(like, "like").exists():
            raise
        raise ModelLoadError(
            f"like: {like}: expected a name of `diffusion-runtime models`, a diffusers folder, or a hub id whose "
            "settings are in the cache; --download takes them from the hub"
        ) from error
    found: dict[str, Any] = dict(_Search(config, path, like, folder).paths())
    return dataclasses.replace(
        config, model_path=like, like=None, models_dir=(), download=False, offline=offline, **found
    )


def is_all_in_files(config: RuntimeConfig) -> bool:
    """Return whether the files that a config names are a whole published model, tokenizers included, beside the json in
    this package: nothing of the hub is needed then, and nothing of it is in the cache."""
    if published_of(config.model_path) is None or config.revision is not None:
        return False
    named = set(named_components(config))
    # Most models are no such files, and are opened once.
    if "transformer" not in named:
        return False
    found = find_configs(config.model_path, offline=config.offline)
    folder = ModelFolder(found.path)
    named |= set(_joined_in(folder, str(config.transformer_path)))
    return found.is_packaged and not (
        set(_components(folder, config.vae_decoder)) - named or _tokenizers_missing(folder, config)
    )


def _published_name(path: Path) -> str:
    """Return the published model of a file, and log what chose it where several fit. Raises ModelLoadError."""
    recognised = recognise_transformer(path)
    if recognised is None:
        raise ModelLoadError(f"{path}: {advice_for_file(path)}")
    if recognised.lacks:
        raise ModelLoadError(
            f"{path}: has the tensors of {recognised.name} and of a model with other settings; expected "
            f"{shown(recognised.lacks)} in its name or metadata. Say which it is: --like {recognised.name}, or --like "
            f"{recognised.name} --preset dev"
        )
    if not recognised.others:
        _logger.info("%s: recognised as %s by its tensors", path, recognised.name)
    elif recognised.told_by:
        _logger.info(
            "%s: recognised as %s by its %s; with the same tensors: %s (--like NAME chooses)",
            path,
            recognised.name,
            recognised.told_by,
            listed(recognised.others),
        )
    else:
        _logger.warning(
            "%s: has the tensors of %s; %s is assumed, as neither its metadata nor its name says which: --like NAME "
            "chooses",
            path,
            listed((recognised.name, *recognised.others)),
            recognised.name,
        )
    return recognised.name


@dataclass(frozen=True)
class _WellKnown:
    """Files that ComfyUI's users have of parts of some models. models: shell patterns of published names. folder: of
    ComfyUI's. files: hub repository and path, the first one to recommend."""

    parts: tuple[str, ...]
    models: tuple[str, ...]
    folder: str
    files: tuple[str, ...]

    def is_of(self, model: str) -> bool:
        return any(fnmatch.fnmatchcase(model, pattern) for pattern in self.models)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(file.rpartition("/")[2] for file in self.files)


@functools.cache
def _well_known() -> tuple[_WellKnown, ...]:
    return tuple(
        _WellKnown(tuple(entry["parts"]), tuple(entry["models"]), entry["folder"], tuple(entry["files"]))
        for entry in read_packaged_yaml(_WELL_KNOWN_FILE)["files"]
    )


@dataclass(frozen=True)
class _Candidate:
    """A file with the names of its tensors; empty for GGUF, whose own reader judges it."""

    path: Path
    names: tuple[str, ...]

    def may_be(self, component: str, model_type: object) -> bool:
        """Return whether a file may hold a component, by names alone."""
        if not self.names:
            return component.startswith("text_encoder")
        parts = parts_of(self.names)
        kinds = [part.kind for part in parts] if parts else [kind_of(self.names)]
        if component in BY_NAMES:
            # Kinds are of images and videos; the names of these are compared one by one.
            if component == "connectors":
                return any(
                    "embeddings_connector." in name or name.startswith("video_connector.") for name in self.names
                )
            return any(kind is None or kind.component in ("vae", component) for kind in kinds)
        wanted = "text_encoder" if component.startswith("text_encoder") else component
        return any(
            kind is not None and kind.component == wanted and (wanted == "vae" or model_type in kind.model_types)
            for kind in kinds
        )


class _Search:
    """The search for the parts of one model. path: of its transformer. like: the model whose settings it has; folder:
    its json."""

    def __init__(self, config: RuntimeConfig, path: Path, like: str, folder: ModelFolder) -> None:
        self.config, self.path, self.like, self.folder = config, path, like, folder
        self.family = family_for_folder(folder)
        published = published_of(like)
        self.name = "" if published is None else published.name
        # In bfloat16, 10 ** 9 bytes.
        self.sizes = {} if published is None else {name: 2 * billions for name, billions in published.parameters}
        self.unread: list[str] = []
        # The text encoder's file.
        self._beside: str | None = None
        # By component, why files that might have been it are not.
        self.misfits: dict[str, list[str]] = {}

    def paths(self) -> dict[str, str]:
        """Return the file of each part by its option. Raises ConfigError and ModelLoadError."""
        self._refuse_unread()
        found = {"transformer_path": str(self.path)}
        joined = _joined_in(self.folder, str(self.path))
        missing: list[str] = []
        # Connectors last: a part of them may lie in the text encoder's file.
        for component in sorted(_components(self.folder, self.config.vae_decoder), key="connectors".__eq__):
            key = _OPTIONS.get(component)
            if component == "text_encoder":
                self._beside = self.config.text_encoder_path
            if component == "transformer":
                self._say(component, self.path, "given")
                continue
            if component in joined:
                self._say(component, self.path, "in the same file")
                continue
            given = None if key is None else getattr(self.config, key)
            if given is not None:
                self._say(component, user_path(given, str(key)), "given")
            elif key is not None and (chosen := self._chosen(component, key)) is not None:
                found[key] = str(chosen)
                self._beside = str(chosen) if component == "text_encoder" else self._beside
            elif has_weights(self.folder.path, component):
                self._say(component, self.folder / component, "of the model's folder")
            elif not self.config.download:
                missing.append(self._missing(component))
            else:
                _logger.info("%s: downloaded from %s", component, self.like)
        if missing:
            raise ModelLoadError("\n".join([f"{self.path}: parts of {self.like} are missing:", *missing, self._ways()]))
        self._check_tokenizers(found)
        return found

    def _refuse_unread(self) -> None:
        """Raises ConfigError for a file whose name says that it is of a component that the model here does not read."""
        for component in sorted(self.family.files.left_out):
            if any(self.path.name in known.names for known in self._known(component)):
                raise ConfigError(
                    f"model_path: {self.path}: by its name it is the {component} of {self.like}, which takes "
                    f"other requests; use the file of the transformer, or give --like the model of that one. To run it "
                    f"as the transformer all the same: --model-path {self.like} --transformer-path FILE"
                )

    def _chosen(self, component: str, key: str) -> Path | None:
        """Return the one file that holds a component; None without one. Raises ConfigError for several."""
        if component == "transformer_2":
            return self._other_expert()
        for where, candidates in self._places():
            fitting = [each.path for each in candidates if self._fits(each, component, key)]
            if not fitting:
                continue
            own = {name for known in self._known(component) for name in known.names}
            # Autoencoders of several models have the same tensors, with other numbers.
            others = [known for known in _well_known() if self.name and candidates[0].path != self.path]
            foreign = {name for known in others if component in known.parts for name in known.names} - own
            fitting = [path for path in fitting if path.name not in foreign]
            by_name = [path for path in fitting if path.name in own]
            if len(fitting) == 1 or len(by_name) == 1:
                chosen = fitting[0] if len(fitting) == 1 else by_name[0]
                by = "" if len(fitting) == 1 else f", by its name among {len(fitting)} that fit"
                self._say(component, chosen, f"{where}{by}")
                return chosen
            if fitting:
                raise ConfigError(
                    f"{key}: {len(fitting)} files fit as the {component} of {self.like}: {listed(fitting)}; choose one "
                    f"by {flag_name(key)}"
                )
        return None

    def _fits(self, candidate: _Candidate, component: str, key: str) -> bool:
        own = self.folder.read_json(component, "config.json")
        if not candidate.may_be(component, own.get("model_type")):
            return False
        part = PartFile(str(candidate.path), key, component, beside=self._beside if component == "connectors" else None)
        error = misfit_of(self.folder, part, self.family.files.diffusers_components)
        if error is not None and component not in BY_NAMES:
            self.misfits.setdefault(component, []).append(first_line(error).removeprefix(f"{key}: "))
        return error is None

    def _other_expert(self) -> Path:
        """Return the file of the second transformer, beside the first. Raises ConfigError and ModelLoadError."""
        noise = _noise_of(self.path)
        ways = f"--model-path {self.like} --transformer-path HIGH --transformer-2-path LOW"
        if noise != "high":
            which = "is of low noise, the second of two" if noise == "low" else "says neither high nor low noise"
            raise ConfigError(
                f"model_path: {self.path}: {self.like} has two transformers, and by its name this one {which}: give "
                f"the one of high noise, or both: {ways}"
            )
        others = [path for path in files_in([self.path.parent], 0) if _noise_of(path) == "low"]
        fitting = [path for path in others if fits_transformer(path, self.folder, "transformer_2")]
        same = re.sub("high", "low", self.path.name, flags=re.IGNORECASE).lower()
        named = [path for path in fitting if path.name.lower() == same]
        chosen = named if len(named) == 1 else fitting
        if len(chosen) == 1:
            self._say("transformer_2", chosen[0], "beside the first")
            return chosen[0]
        if chosen:
            raise ConfigError(
                f"transformer_2_path: {len(chosen)} files fit as the second transformer of {self.like}: "
                f"{listed(chosen)}; choose one by --transformer-2-path"
            )
        raise ModelLoadError(
            f"{self.path}: {self.like} has a second transformer, of low noise, and {self.path.parent} holds no file of "
            f"it: expected one such as {same}; put it there, or give it by --transformer-2-path"
        )

    @functools.cache  # noqa: B019 - the search is as short as a load
    def _places(self) -> tuple[tuple[str, tuple[_Candidate, ...]], ...]:
        """Return what candidates are looked for in, one place after the other, with the candidates."""
        roots = model_roots(self.path, self.config.models_dir)
        flat = [self.path.parent, *roots]
        in_parts = [*files_in(flat, 0), *files_in([root / name for root in roots for name in PARTS], MAX_DEPTH)]
        whole = files_in([root / name for root in roots for name in CHECKPOINTS], MAX_DEPTH)
        seen: set[Path] = set()
        return (
            ("in the same file", self._candidates([self.path], seen)),
            ("found beside it", self._candidates(in_parts, seen)),
            ("found in a checkpoint", self._candidates(whole, seen)),
        )

    def _candidates(self, paths: Sequence[Path], seen: set[Path]) -> tuple[_Candidate, ...]:
        found = []
        for path in paths:
            real = path.resolve()
            if real in seen:
                continue
            seen.add(real)
            try:
                names = () if path.suffix == GGUF else tuple(stored_dtypes(path, max_bytes=_MAX_HEADER_BYTES))
            except (DiffusionRuntimeError, OSError) as error:
                _logger.debug("%s is left out: %s", path, error)
                self.unread.append(path.name)
                continue
            found.append(_Candidate(path, names))
        return tuple(found)

    def _known(self, component: str) -> list[_WellKnown]:
        return [known for known in _well_known() if component in known.parts and known.is_of(self.name)]

    def _missing(self, component: str) -> str:
        """Say which file a component is missing, as one line."""
        size = f", {self.sizes[component]:.1f} GB in bfloat16" if component in self.sizes else ""
        misfits = "".join(f"\n    not {reason}" for reason in self.misfits.get(component, ())[:_MAX_MISFITS])
        known = self._known(component)
        if not known:
            return f"  {component}{size}: the folder {component}/ of {self.like}{misfits}"
        owner, repository, *rest = known[0].files[0].split("/")
        others = f" (or {listed(known[0].names[1:])})" if known[0].names[1:] else ""
        root = known_root(self.path) or Path("FOLDER")
        return (
            f"  {component}{size}: {known[0].names[0]}{others}, from {owner}/{repository} ({'/'.join(rest)}), into "
            f"{root / known[0].folder}{misfits}"
        )

    def _ways(self) -> str:
        keys = [
            _OPTIONS[component]
            for component in _components(self.folder, self.config.vae_decoder)
            if component in _OPTIONS
        ]
        flags = ", ".join(flag_name(key) for key in keys if not key.startswith("transformer"))
        unread = f" Not readable as weights: {listed(self.unread)}." if self.unread else ""
        published = published_of(self.like)
        is_folder = published is not None and not published.files_alone
        download = f"; --download takes what is missing from {self.like}" if is_folder else ""
        return (
            f"Files are looked for beside it, in ComfyUI's folders around it, in --models-dir and ${VARIABLE}, and in "
            f"the hub's cache.{unread} Name one by {flags}{download}"
        )

    def _check_tokenizers(self, found: Mapping[str, str]) -> None:
        """Raises ModelLoadError for a tokenizer that neither a text encoder's file nor the model's folder has."""
        paths: dict[str, Any] = dict(found)
        missing = _tokenizers_missing(self.folder, dataclasses.replace(self.config, **paths))
        if missing and not self.config.download:
            known = ", ".join(filter(None, (tokenizer_id_of(self.folder, each) for each in missing)))
            where = f"the hub's cache (tokenizer.json of {known})" if known else "the hub's cache"
            raise ModelLoadError(
                f"{listed(missing)}: {self.like} needs it, and neither the file of a text encoder nor {where} has it: "
                f"add --download, which takes it and the settings (a few MB) from {self._hub_id()}; or give a "
                "diffusers folder that has it by --like FOLDER"
            )

    def _hub_id(self) -> str:
        published = published_of(self.like)
        return self.like if published is None else published.model_path

    def _say(self, component: str, path: Path, how: str) -> None:
        size = f", {size_text(path.stat().st_size)}" if path.is_file() else ""
        _logger.info("%s: %s%s (%s)", component, path, size, how)


def _joined_in(folder: AnyFolder, path: str) -> tuple[str, ...]:
    """Return the components of a model that are a part of its transformer, and are in the transformer's file. Raises
    ModelLoadError for a file that cannot be read."""
    weights = family_for_folder(folder).describe(folder).weights
    return weights.joined_in(TransformerFile(path, "transformer_path", "transformer"))


def _components(folder: AnyFolder, vae_decoder: str | None) -> list[str]:
    """Return the components whose weights are read; schedulers and tokenizers have no config.json. vae_decoder: of
    RuntimeConfig, which may name one that is not read otherwise."""
    family, entries = family_for_folder(folder), read_index(folder).items()
    unread = family.unread_components(vae_decoder).union(family.files.optional)
    return [
        name
        for name, entry in entries
        if isinstance(entry, list) and name not in unread and (folder / name / "config.json").is_file()
    ]


def _tokenizers_missing(folder: ModelFolder, config: RuntimeConfig) -> list[str]:
    """Return the tokenizers of a model that neither its folder has nor the files of its text encoders that a config
    names, nor the hub's cache. Raises ModelLoadError for such a file that cannot be read."""
    opened, index = with_parts(folder, part_files(config), None, ()), read_index(folder)
    missing = []
    for component, entry in index.items():
        # Bytes need no vocabulary; a processor is a tokenizer where there is no other.
        is_needed = isinstance(entry, list) and not str(entry[-1]).startswith("ByT5")
        is_tokenizer = "tokenizer" in component or (component == "processor" and "tokenizer" not in index)
        if is_tokenizer and is_needed and not has_tokenizer(opened / component):
            missing.append(component)
    return missing


def _noise_of(path: Path) -> str | None:
    """Return `high` or `low`, which expert of two a file's name says that it is; None where it says neither."""
    found = [noise for noise in ("high", "low") if noise in path.stem.lower()]
    return found[0] if len(found) == 1 else None
