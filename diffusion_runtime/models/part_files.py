"""Text encoders and autoencoders from elsewhere than the model's folder (`--vae-path`, `--text-encoder-path`), and
variants of its weights (`--variant`): a folder of links, so that readers of the component find the named files."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.model_folder import (
    INDEX_FILE,
    LINKS,
    PART_MARK,
    AnyFolder,
    ModelFolder,
    part_prefix,
    read_index,
    read_json,
)
from diffusion_runtime.decoders.autoencoder import DiffusersComponent
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, ModelLoadError, shown
from diffusion_runtime.models.encoder_file import (
    EMBEDDINGS,
    num_embeddings_of,
    num_layers_of,
    open_encoder_file,
    tokenizer_in,
)
from diffusion_runtime.models.hub import cached_file
from diffusion_runtime.models.registry import lora_names_of_families
from diffusion_runtime.text_encoders.loading import tokenizer_id
from diffusion_runtime.untrusted.files import check_file, check_place, user_path
from diffusion_runtime.weights.cached_folder import snapshot_in
from diffusion_runtime.weights.file_kinds import describe_file, kind_of
from diffusion_runtime.weights.file_parts import FilePart, parts_of
from diffusion_runtime.weights.gguf_encoder import VISION, GgufEncoderFile, differing_settings
from diffusion_runtime.weights.stored_tensors import stored_rows
from diffusion_runtime.weights.tensor_files import SafetensorsFile
from diffusion_runtime.weights.transformer_files import transformer_files
from diffusion_runtime.weights.weight_files import (
    GGUF,
    GGUF_LINK,
    PICTURES_LINK,
    SAFETENSORS,
    STEMS,
    check_quantization_config,
    find_weight_files,
    has_variant,
    listed,
    refuse_quantised,
)

# The flag of each component that can be somewhere else.
PART_KEYS = {
    "vae_path": "vae",
    "audio_vae_path": "audio_vae",
    "vocoder_path": "vocoder",
    "text_encoder_path": "text_encoder",
    "text_encoder_2_path": "text_encoder_2",
    "connectors_path": "connectors",
    "image_encoder_path": "image_encoder",
}
# Components that are recognised by their tensors alone.
BY_NAMES = ("audio_vae", "vocoder", "connectors")
# Of LTX-2's connectors, in the authors' files.
_PROJECTIONS = "text_embedding_projection."
# Keys of a config.json that change no computed number.
_NOTES = ("architectures", "torch_dtype", "dtype", "transformers_version", "use_cache", "quantization_config")


@dataclass(frozen=True)
class PartFile:
    """A component's weights. path: as given. key: of the config, for messages; component: whose weights. pictures: the
    GGUF file of the half of a text encoder that reads pictures, as given. beside: another file that may hold the rest
    of the component, as given: LTX-2.5's text encoder has projections of the connectors that its transformer's file
    holds."""

    path: str
    key: str
    component: str
    pictures: str | None = None
    beside: str | None = None

    @property
    def flag(self) -> str:
        return f"--{self.key.replace('_', '-')}"


def part_files(config: RuntimeConfig) -> tuple[PartFile, ...]:
    """Return the components besides transformers whose weights a config names. Raises ConfigError for the file of an
    encoder's half alone."""
    if config.mmproj_path is not None and not (config.text_encoder_path or "").endswith(GGUF):
        raise ConfigError(
            "mmproj_path: the half that reads pictures of a text encoder in GGUF; add --text-encoder-path FILE.gguf, "
            "or leave out --mmproj-path"
        )
    return tuple(
        PartFile(
            path,
            key,
            component,
            config.mmproj_path if key == "text_encoder_path" else None,
            config.text_encoder_path if component == "connectors" else None,
        )
        for key, component in PART_KEYS.items()
        if (path := getattr(config, key)) is not None
    )


def named_components(config: RuntimeConfig) -> list[str]:
    """Return the components whose weights a config names: they are not the model folder's, and need no download."""
    transformers = [file.component for file in transformer_files(config)]
    return [*transformers, *(part.component for part in part_files(config))]


def with_parts(
    folder: ModelFolder, parts: Sequence[PartFile], variant: str | None, elsewhere: Sequence[str]
) -> ModelFolder:
    """Return the folder with components from elsewhere, and with a variant of the weights of all others that have one.
    elsewhere: components whose weights other flags name.

    The settings stay the folder's. Raises ConfigError for a component that the model does not have and a path that is
    none, ModelLoadError for files that are missing, damaged, quantised, or hold something else.
    """
    places = {part.component: _place_of(folder, part) for part in parts}
    for part in parts:
        places |= _tokenizer_place(folder, part, places[part.component])
    if parts:
        places |= _tokenizers_alone(folder)
    if variant is not None:
        places |= _variants(folder, variant, (*places, *elsewhere))
    return folder.with_parts(places) if places else folder


def misfit_of(
    folder: ModelFolder, part: PartFile, modules: Sequence[DiffusersComponent]
) -> DiffusionRuntimeError | None:
    """Return why a file is not a component of a model; None for one that is. modules: of diffusers, that the model
    has."""
    try:
        changed = with_parts(folder, [part], None, ())
        for module in modules:
            if module.name == part.component:
                module.check_weights(changed)
    except DiffusionRuntimeError as error:
        return error
    return None


# Any of these is a tokenizer's vocabulary.
_VOCABULARIES = ("tokenizer.json", "spiece.model", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# What the hub's cache has of one.
_JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def has_tokenizer(folder: AnyFolder) -> bool:
    """Return whether a tokenizer's folder has a vocabulary, rather than its settings alone."""
    return any((folder / name).is_file() for name in _VOCABULARIES)


def _tokenizer_place(folder: ModelFolder, part: PartFile, encoder: Path) -> dict[str, Path]:
    """Return the folder of a text encoder's tokenizer, of its file or else of the hub's cache, where the model's folder
    has none. encoder: its folder of links. Raises ModelLoadError for a tokenizer in the file that is none."""
    if not part.component.startswith("text_encoder"):
        return {}
    index, of_part = read_index(folder), part.component.replace("text_encoder", "tokenizer")
    name = of_part if of_part in index or "processor" not in index else "processor"
    if name not in index or has_tokenizer(folder / name):
        return {}
    config, path = read_json(encoder / "config.json"), Path(user_path(part.path, part.key))
    found = tokenizer_in(path, part_prefix(encoder), str(config.get("model_type"))) if path.is_file() else None
    links = _cached_tokenizer(tokenizer_id(config) if found is None else None)
    if found is None and _JSON_FILES[0] not in links:
        return {}
    place = _linked(name, folder, links)
    if found is not None:
        settings = place / _JSON_FILES[1]
        longest = read_json(settings).get("model_max_length") if settings.is_file() else None
        # Not through the links to the model's own.
        for each in _JSON_FILES:
            (place / each).unlink(missing_ok=True)
        for each, text in found.files({"model_max_length": longest} if type(longest) is int else {}).items():
            (place / each).write_text(text, encoding="utf-8")
    return {name: place}


def tokenizer_id_of(folder: ModelFolder, name: str) -> str | None:
    """Return the repository of the hub that has a tokenizer of a model: that of its text encoder, or by its name that
    of a tokenizer without one; None for one that is not known."""
    encoder = name.replace("tokenizer", "text_encoder").replace("processor", "text_encoder")
    if encoder in read_index(folder):
        return tokenizer_id(folder.read_json(encoder, "config.json"))
    return tokenizer_id({"model_type": name.removesuffix("_tokenizer")})


def _cached_tokenizer(whose: str | None) -> dict[str, Path]:
    """Return the files of a repository's tokenizer that are in the hub's cache."""
    found = {} if whose is None else {each: cached_file(whose, each) for each in _JSON_FILES}
    return {each: file for each, file in found.items() if file is not None}


def _tokenizers_alone(folder: ModelFolder) -> dict[str, Path]:
    """Return the folders of tokenizers without a text encoder that the model's folder lacks, from the hub's cache."""
    places = {}
    for name in read_index(folder):
        if name.endswith("_tokenizer") and not has_tokenizer(folder / name):
            links = _cached_tokenizer(tokenizer_id_of(folder, name))
            if _JSON_FILES[0] in links:
                places[name] = _linked(name, folder, links)
    return places


def check_part(folder: ModelFolder, path: str, component: str, modules: Sequence[DiffusersComponent]) -> None:
    """Check that a file is a component of a model; raises what `with_parts` raises. component: `vae`, or `text_encoder`
    for any of its text encoders. modules: of diffusers, that the model has."""
    named = [
        (key, name) for key, name in PART_KEYS.items() if name.startswith(component) and name in read_index(folder)
    ]
    errors: list[DiffusionRuntimeError] = []
    for key, name in named:
        try:
            changed = with_parts(folder, [PartFile(path, key, name)], None, ())
            for module in modules:
                if module.name == name:
                    module.check_weights(changed)
            return
        except DiffusionRuntimeError as error:
            errors.append(error)
    raise errors[0] if errors else ConfigError(f"{path}: the model has no {component}")


def _place_of(folder: ModelFolder, part: PartFile) -> Path:
    entry = read_index(folder).get(part.component)
    # A class of a pipeline's own folder is one of diffusers' models, too.
    library = "diffusers" if part.component in BY_NAMES else entry[0] if isinstance(entry, list) and entry else None
    if not isinstance(entry, list) or len(entry) != 2 or library not in STEMS:
        raise ConfigError(f"{part.key}: the model has no {part.component}; leave out {part.flag}")
    stem = STEMS[library]
    path = check_place(user_path(part.path, part.key), part.key)
    own = folder.read_json(part.component, "config.json")
    if not path.exists():
        raise ModelLoadError(f"{part.key}: {path}: no such file or folder")
    if path.is_dir():
        path = snapshot_in(path) or path
        if (path / INDEX_FILE).exists():
            raise ModelLoadError(
                f"{part.key}: {path} is the folder of a whole model: give {path / part.component}, or --model-path"
            )
        if (path / "config.json").is_file():
            _check_settings(path / "config.json", own, part)
        files = find_weight_files(path, stem)
        links = {each.name: each for each in path.iterdir() if each.name.startswith(stem)}
    elif path.suffix == GGUF and part.component.startswith("text_encoder"):
        return _gguf_encoder(folder, path, part, own)
    else:
        rest = None if part.beside is None else _projections(path, user_path(part.beside, part.key))
        files, links = [path], {f"{stem}.safetensors": path}
        if rest is not None:
            shards = {f"{stem}-{number}-of-2.safetensors": each for number, each in ((1, path), (2, rest))}
            place = _linked(part.component, folder, shards)
            weight_map = {name: name for name in shards}
            (place / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
            return place
    prefixes = {_check_kind(file, part, own) for file in files}
    return _linked(part.component, folder, links, prefixes.pop() if len(prefixes) == 1 else "")


def _projections(path: Path, beside: Path) -> Path | None:
    """Return `beside` where it holds projections of the text that `path` lacks. Raises ModelLoadError for files that
    cannot be read."""
    if not beside.is_file() or beside.suffix not in SAFETENSORS:
        return None
    with closing(SafetensorsFile(path)) as file, closing(SafetensorsFile(beside)) as other:
        has = [any(name.startswith(_PROJECTIONS) for name in each.heads) for each in (file, other)]
    return beside if has == [False, True] else None


def _check_settings(path: Path, own: Mapping[str, Any], part: PartFile) -> None:
    """Check that config.json next to the weights agrees with the model folder's, which is the one that counts. Raises
    ModelLoadError."""
    given = read_json(path)
    classes = given.get("_class_name"), own.get("_class_name")
    if None not in classes and classes[0] != classes[1]:
        raise ModelLoadError(
            f"{part.key}: {path.parent} holds {shown(classes[0])}, expected {shown(classes[1])}: give the folder of "
            "this component"
        )
    check_quantization_config(path.parent, part.component)
    differing = [
        f"{key} is {shown(value)}, here {shown(own[key])}"
        for key, value in given.items()
        if key in own and own[key] != value and not key.startswith("_") and key not in _NOTES
    ]
    if differing:
        raise ModelLoadError(
            f"{path}: {len(differing)} settings differ from the model's own: {listed(differing)}. {part.flag} takes "
            "weights that were made for the model's settings; give the folder of the whole model by --model-path"
        )


def _check_kind(path: Path, part: PartFile, own: Mapping[str, Any]) -> str:
    """Return the prefix of the component's tensors in a file of several, empty for a file of it alone. Raises
    ModelLoadError for a file that cannot be read, or that holds another kind of component."""
    check_file(path, part.key, missing=ModelLoadError)
    if path.suffix == GGUF:
        raise ModelLoadError(
            f"{path}: GGUF is read of transformers and text encoders (--transformer-path, --text-encoder-path); give a "
            "safetensors file in bfloat16, float16 or float32"
        )
    if path.suffix not in SAFETENSORS:
        raise ModelLoadError(
            f"{path}: expected a .safetensors file; a pickle can run code when it is opened, and is never read"
        )
    with closing(SafetensorsFile(path)) as file:
        whole = {name: head.shape for name, head in file.heads.items()}
    prefix = _prefix_in(whole, part, own)
    if part.component == "vae":
        with closing(SafetensorsFile(path, prefix)) as file:
            of_vae = kind_of(tuple(file.heads))
            if of_vae is None or not of_vae.may_be_quantised:
                refuse_quantised(path, {name: head.kind for name, head in file.heads.items()})
            shapes = {name: head.shape for name, head in file.heads.items()}
    else:
        with closing(open_encoder_file(path, prefix)) as opened:
            shapes = {name: rows[0].shape for name, rows in stored_rows([opened]).items()}
    kind = kind_of(tuple(shapes))
    wanted = own.get("model_type")
    is_shard = "-of-" in path.name
    if part.component == "vae":
        fits = is_shard or (kind is not None and kind.component == "vae")
        expected = "an autoencoder"
    elif part.component in BY_NAMES:
        return prefix
    else:
        fits = is_shard or (kind is not None and bool(kind.component) and wanted in kind.model_types)
        expected = f"the {part.component.removesuffix('_2').replace('_', ' ')} of the model, of model_type {wanted!r}"
    if fits:
        _check_width(path, part, own, shapes)
        return prefix
    if several := parts_of(tuple(whole)):
        raise ModelLoadError(
            f"{part.key}: {path}: holds {listed(map(describe_part, several))}, expected {expected} among these: use "
            "the file of this component"
        )
    other = next(_flags_for(kind.component if kind else "", part), None)
    advice = f"give it by {other}, or " if other else ""
    raise ModelLoadError(
        f"{part.key}: {path}: holds {describe_file(shapes, lora_names_of_families)}, expected {expected}: "
        f"{advice}use the file of this component"
    )


def _gguf_encoder(folder: ModelFolder, path: Path, part: PartFile, own: Mapping[str, Any]) -> Path:
    """Return a folder of links to a text encoder in GGUF, and to the half of it that reads pictures, where that is
    given or alone beside it. Raises ConfigError, and ModelLoadError for files of something else."""
    pictures = _pictures_beside(path, own) if part.pictures is None else user_path(part.pictures, "mmproj_path")
    shapes: dict[str, tuple[int, ...]] = {}
    for each, key in ((path, part.key), (pictures, "mmproj_path")):
        if each is None:
            continue
        check_file(each, key, missing=ModelLoadError)
        with closing(GgufEncoderFile(each, num_embeddings_of(own))) as file:
            if own.get("model_type") not in file.kind.model_types or (file.architecture == VISION) == (each is path):
                half = "the vision half of one" if each is pictures else "one"
                raise ModelLoadError(
                    f"{key}: {each}: key 'general.architecture': {shown(file.architecture)}, expected {half} of "
                    f"model_type {own.get('model_type')!r}: use the file of this model's own text encoder"
                )
            if differing := differing_settings(file, own):
                raise ModelLoadError(
                    f"{key}: {each}: {len(differing)} settings differ from the model's own: {listed(differing)}. Use "
                    "the file of this model's own text encoder"
                )
            shapes |= {name: rows[0].shape for name, rows in stored_rows([file]).items()}
    kind = kind_of(tuple(shapes))
    if kind is None or own.get("model_type") not in kind.model_types:
        raise ModelLoadError(
            f"{part.key}: {path}: holds {describe_file(shapes, lora_names_of_families)}, expected the text encoder of "
            f"the model, of model_type {own.get('model_type')!r}: use the file of this component"
        )
    _check_width(path, part, own, shapes)
    links = {GGUF_LINK: path} | ({} if pictures is None else {PICTURES_LINK: pictures})
    return _linked(part.component, folder, links)


def _pictures_beside(path: Path, own: Mapping[str, Any]) -> Path | None:
    """Return the only file beside a text encoder in GGUF that can be the half of it that reads pictures."""
    found = []
    for each in sorted(path.parent.glob(f"*mmproj*{GGUF}")):
        with contextlib.suppress(DiffusionRuntimeError), closing(GgufEncoderFile(each)) as file:
            if file.architecture == VISION and own.get("model_type") in file.kind.model_types:
                found.append(each)
    return found[0] if len(found) == 1 else None


def check_sees(folder: ModelFolder) -> None:
    """Raises ConfigError where the text encoder of a model that reads pictures is in GGUF without its half for them."""
    link = folder / "text_encoder" / GGUF_LINK
    if link.is_symlink() and not (folder / "text_encoder" / PICTURES_LINK).is_symlink():
        beside = sorted(each.name for each in link.readlink().parent.glob(f"*mmproj*{GGUF}"))
        raise ConfigError(
            f"text_encoder_path: {link.readlink()}: the model reads pictures, and this file has the language model "
            f"alone; add --mmproj-path FILE.gguf ({f'beside it: {listed(beside)}' if beside else 'none is beside it'})"
        )


def _prefix_in(shapes: Mapping[str, tuple[int, ...]], part: PartFile, own: Mapping[str, Any]) -> str:
    """Return the prefix of the part of a file that a component is read from; empty for the whole file."""
    wanted = own.get("model_type")
    for each in parts_of(tuple(shapes)):
        if each.kind is None or not each.kind.component:
            continue
        if part.component.startswith("text_encoder"):
            fits = wanted in each.kind.model_types and _has_width(
                {name: shapes[each.prefix + name] for name in each.names}, own
            )
        else:
            # The names of these have their prefix taken off where they are read.
            fits = each.kind.component == part.component == "vae"
        if fits:
            return each.prefix
    return ""


def describe_part(part: FilePart) -> str:
    """Describe a part of a file in words, for a message."""
    title = "a transformer" if part.is_transformer else "something else" if part.kind is None else part.kind.title
    if part.kind is None and not part.prefix:
        return f"{len(part.names)} other tensors"
    return f"{title} ({part.prefix}...)" if part.prefix else title


def _has_width(shapes: Mapping[str, tuple[int, ...]], own: Mapping[str, Any]) -> bool:
    """Compare the width of a text encoder with the model's by its embeddings: CLIP comes in several sizes."""
    wanted, found = _widths(shapes, own)
    return found is None or not all(isinstance(size, int) for size in wanted) or found == wanted


def _check_width(path: Path, part: PartFile, own: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a text encoder has the size of the model's. Raises ModelLoadError."""
    wanted, found = _widths(shapes, own)
    is_text = part.component.startswith("text_encoder")
    is_encoder = is_text or part.component == "image_encoder"
    if is_encoder and all(isinstance(size, int) for size in wanted) and found is not None and found != wanted:
        sizes, kind = ("patch", "image") if part.component == "image_encoder" else ("vocabulary", "text")
        raise ModelLoadError(
            f"{part.key}: {path}: holds {describe_file(shapes, lora_names_of_families)} with embeddings {list(found)}, "
            f"expected {list(wanted)} ({sizes}, width): use the file of this model's own {kind} encoder"
        )
    text = own.get("text_config") or own
    most = text.get("num_layers", text.get("num_hidden_layers"))
    if is_text and isinstance(most, int) and num_layers_of(shapes) > most:
        raise ModelLoadError(
            f"{part.key}: {path}: holds {num_layers_of(shapes)} layers, expected at most {most}, those of the model's "
            "text encoder: use the file of this model's own"
        )


def _widths(
    shapes: Mapping[str, tuple[int, ...]], own: Mapping[str, Any]
) -> tuple[tuple[Any, Any], tuple[int, ...] | None]:
    """Return (vocabulary and width of the model's text encoder, or patch and width of its image encoder, the same of a
    file's embeddings)."""
    if "patch_size" in own:
        # Of pictures: [width, colours, patch, patch].
        name = next((name for name in shapes if name.endswith("patch_embedding.weight")), None)
        wanted = (own["patch_size"], own.get("hidden_size"))
        return wanted, None if name is None else (shapes[name][-1], shapes[name][0])
    text = own.get("text_config") or own
    wanted = (text.get("vocab_size"), text.get("d_model", text.get("hidden_size")))
    return wanted, next((shape for name, shape in shapes.items() if name.endswith(EMBEDDINGS)), None)


def _flags_for(component: str, part: PartFile) -> Iterator[str]:
    """Yield the flags that take such a component, other than the one that was given."""
    for key, other in PART_KEYS.items():
        if component and other.startswith(component) and key != part.key:
            yield f"--{key.replace('_', '-')}"


def _variants(folder: ModelFolder, variant: str, elsewhere: Sequence[str]) -> dict[str, Path]:
    """Return the components that have weights of a variant, by links under the plain names. Raises ConfigError where
    none has."""
    places: dict[str, Path] = {}
    lacking = []
    for component, entry in read_index(folder).items():
        is_pair = isinstance(entry, list) and len(entry) == 2
        if not is_pair or entry[0] not in STEMS or component in elsewhere or not (folder / component).is_dir():
            continue
        if not (folder / component / "config.json").is_file():
            continue
        stem = STEMS[entry[0]]
        if not has_variant(folder / component, stem, variant):
            lacking.append(component)
            continue
        links = {}
        for path in (folder / component).iterdir():
            name = path.name
            if name == f"{stem}.{variant}.safetensors":
                links[f"{stem}.safetensors"] = path
            elif name == f"{stem}.safetensors.index.{variant}.json":
                links[f"{stem}.safetensors.index.json"] = path
            elif name.startswith(stem) and (f".{variant}." in name or f".{variant}-" in name):
                links[name] = path
        places[component] = _linked(component, folder, links)
    if not places:
        raise ConfigError(
            f"variant: {shown(variant)}: no component of {folder} has such files ({listed(lacking)}): leave out "
            "--variant, or download the files of that variant"
        )
    return places


def _linked(component: str, folder: ModelFolder, links: Mapping[str, Path], prefix: str = "") -> Path:
    """Make a folder of a component's own json and texts with links to weights; it is deleted when the process ends.
    prefix: of the component's tensors in them."""
    place = Path(_temporary().name) / f"{len(os.listdir(_temporary().name))}{LINKS}" / component
    place.mkdir(parents=True)
    for path in (folder / component).iterdir() if (folder / component).is_dir() else ():
        is_text = path.suffix in (".json", ".txt", ".model", ".jinja") and ".safetensors.index" not in path.name
        if is_text and path.name not in links:
            (place / path.name).symlink_to(path.absolute())
    for name, target in links.items():
        (place / name).symlink_to(target.absolute())
    if prefix:
        (place / PART_MARK).write_text(json.dumps({"prefix": prefix}))
    return place


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="diffusion_runtime_parts_")
