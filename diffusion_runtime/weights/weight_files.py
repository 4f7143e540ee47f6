"""Weight files (safetensors) of a model folder: which hold a component, and whether they are whole and readable.

`check_components` reads json and the heads of files alone: what cannot be read ends a load there, before the first and
largest component has been read for nothing.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from diffusion_runtime.core.model_folder import (
    INDEX_FILE,
    LINKS,
    AnyFolder,
    part_prefix,
    read_index,
    read_json,
    read_json_in,
)
from diffusion_runtime.errors import MAX_LINE_CHARACTERS, ModelLoadError, first_line, shown, shown_name
from diffusion_runtime.untrusted.component_sizes import check_sizes
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.files import check_path, open_file
from diffusion_runtime.untrusted.gguf_header import MAX_TENSORS
from diffusion_runtime.untrusted.json_text import parse_json
from diffusion_runtime.weights.cached_folder import way_to_complete

# Names listed in a message before it gives how many more there are.
_NUM_LISTED = 10

# Where only variants of a checkpoint are there, the first of these wins, then the first in alphabetical order.
VARIANTS = ("fp32", "bf16", "fp16")

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# What to do about a pickle: only the converter opens one, and reads nothing but tensors of it.
CONVERT = "`diffusion-runtime models convert` reads the tensors of a causal Wan's .pt, or of its LoRA, and nothing else"
GGUF = ".gguf"
# Links to GGUF files: of a text encoder, and of the half of it that reads pictures.
GGUF_LINK, PICTURES_LINK = "model.gguf", "mmproj.gguf"
# `.sft` is another name of the same format.
SAFETENSORS = (".safetensors", ".sft")
# Of the files that a transformer, or a part of a model, may be.
SUFFIXES = (*SAFETENSORS, GGUF)
# safetensors' names of what weights and counters are stored as. Any other is a quantised weight, which is worth nothing
# without the scales that belong to it.
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "BOOL")
FLOAT8_KINDS = ("F8_E4M3", "F8_E5M2")
# As these no weight of a layer is stored; counters and positions are.
_WHOLE_NUMBERS = ("I64", "I32", "BOOL")
_WEIGHT_LEAVES = ("weight", "bias")
# Tokenizers that ComfyUI puts into the files of text encoders, as bytes; the model folder's own is read.
TOKENIZER_TENSORS = ("spiece_model", "tekken_model", "tokenizer_json")
# ComfyUI: how one layer is quantised, as JSON in bytes; how many of these a message looks at.
LAYER_MARK = ".comfy_quant"
MAX_MARK_BYTES = 4096
_MAX_MARKS = 1000
# In the header: the same of every layer.
QUANTIZATION_METADATA = "_quantization_metadata"
# Texts and marks beside 8-bit floats.
_MARK_DTYPES = ("U8",)
# What ComfyUI and the authors of models put in front of the names of a transformer's tensors.
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.")

# What to do about a file whose numbers cannot be used.
DAMAGED = "The file is damaged, or was saved from a run that had failed: copy or download it again"

# What to do instead, wherever weights are found to be quantised.
UNQUANTISED_FOLDER = "use the model's own folder, with weights in bfloat16, float16 or float32"
UNQUANTISED = f"{UNQUANTISED_FOLDER}; `--backend diffusers` runs what diffusers itself can load"


def find_weight_files(folder: Path, stem: str) -> list[Path]:
    """The safetensors files that hold a component, all of them present; of a text encoder from elsewhere its GGUF
    files. Raises ModelLoadError."""
    is_elsewhere = folder.parent.name.endswith(LINKS)
    if is_elsewhere and (
        links := [path for name in (GGUF_LINK, PICTURES_LINK) if (path := folder / name).is_symlink()]
    ):
        return [path.readlink() for path in links]
    found = _find_weight_files(folder, stem)
    if is_elsewhere:
        return [path.readlink() if path.is_symlink() else path for path in found]
    return found


def has_variant(folder: Path, stem: str, variant: str) -> bool:
    """Return whether a component has weights of a variant, such as `fp16`."""
    return f".{variant}" in _variants(folder, stem)


def _find_weight_files(folder: Path, stem: str) -> list[Path]:
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is missing; {way_to_complete(folder)}")
    for variant in ("", *_variants(folder, stem)):
        index = folder / f"{stem}.safetensors.index{variant}.json"
        if index.exists():
            return _shards(index)
        single = folder / f"{stem}{variant}.safetensors"
        if single.exists():
            return [single]
    names = sorted(path.name for path in folder.iterdir())
    expected = f"{folder}: expected {stem}.safetensors, or {stem}.safetensors.index.json with its shards"
    ggufs = [name for name in names if name.endswith(GGUF)]
    if ggufs:
        raise ModelLoadError(
            f"{expected}, found {listed(ggufs)}: GGUF weights are read of a transformer or a text encoder that a flag "
            f"names: add --transformer-path {folder / ggufs[0]}, or --text-encoder-path for a text encoder's, or "
            f"{UNQUANTISED_FOLDER}"
        )
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        raise ModelLoadError(
            f"{expected}, found {listed(pickles)}: pickled weights can run code and are never read; use a checkpoint "
            f"in safetensors, or convert it with save_pretrained(..., safe_serialization=True); {CONVERT}"
        )
    if any(re.fullmatch(rf"{re.escape(stem)}.*-\d+-of-\d+.*\.safetensors", name) for name in names):
        raise ModelLoadError(f"{expected}; shards are there and their index is not: copy or download it too")
    found = f"found {listed(names)}" if names else "the folder is empty"
    raise ModelLoadError(f"{expected}; {found}: {way_to_complete(folder)}")


def check_whole(path: Path) -> None:
    """Raises ModelLoadError for a Git-LFS pointer, and for a file too short for what its own header says."""
    try:
        size = path.stat().st_size
        with open_file(path, error=ModelLoadError) as file:
            start = file.read(8)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if size < 8 or 8 + int.from_bytes(start[:8], "little") > size:
        raise ModelLoadError(f"{path} is cut off after {size} bytes; copy or download it again")


# What safetensors itself reads at most.
_MAX_HEADER_BYTES = 100_000_000


def stored_dtypes(path: Path, prefix: str = "", max_bytes: int = _MAX_HEADER_BYTES) -> dict[str, str]:
    """Read the kind of number of every tensor of a safetensors file, such as `BF16`, from its head alone. prefix: of
    the part that is meant (file_parts.py). max_bytes: of a head that is read.

    Raises ModelLoadError for a file that is cut off, damaged, or a Git-LFS pointer.
    """
    entries = _head(path, max_bytes)[0].items()
    return {name.removeprefix(prefix): str(entry["dtype"]) for name, entry in entries if name.startswith(prefix)}


def stored_offsets(path: Path) -> dict[str, tuple[int, int]]:
    """Return where every tensor of a safetensors file begins and ends in it, in bytes, from the head of the file alone.
    Raises the errors of stored_heads."""
    return {name: (head.begin, head.end) for name, head in stored_heads(path)[0].items()}


@dataclass(frozen=True)
class StoredHead:
    """The entry of a tensor in the head of a safetensors file. begin, end: of its numbers in the file, in bytes."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


# Of a tensor, as many as torch has.
_MAX_DIMENSIONS = 64
# Bits of a number, by safetensors' names.
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}


def stored_heads(path: Path) -> tuple[dict[str, StoredHead], dict[str, str]]:
    """Return the entry of every tensor of a safetensors file, by name in alphabetical order, and its metadata, from the
    head alone; nothing is mapped into memory.

    Raises the errors of stored_dtypes, also for tensors that overlap, have gaps between them, do not fill the file, or
    have other bytes than their shape.
    """
    entries, metadata, start = _head(path)
    damaged = f"{path} is damaged or not a whole safetensors file"
    heads: dict[str, StoredHead] = {}
    kind: Any
    shape: Any
    places: Any
    for name, entry in entries.items():
        kind, shape, places = entry["dtype"], entry.get("shape"), entry.get("data_offsets")
        is_whole = isinstance(shape, list) and isinstance(places, list) and len(places) == 2 and str(kind) in _BITS
        # The product of a million sizes takes hours.
        if (
            not is_whole
            or len(shape) > _MAX_DIMENSIONS
            or not all(type(each) is int and each >= 0 for each in (*shape, *places))
        ):
            raise ModelLoadError(f"{damaged} (the entry of {shown_name(name)}); copy or download it again")
        num_bytes = places[1] - places[0]
        if num_bytes * 8 != math.prod(shape) * _BITS[str(kind)]:
            raise ModelLoadError(
                f"{damaged} ({shown_name(name)} has {num_bytes} bytes, expected those of {kind} {shape[:8]}); copy or "
                "download it again"
            )
        heads[name] = StoredHead(str(kind), tuple(shape), start + places[0], start + places[1])
    reached = start
    for name, head in sorted(heads.items(), key=lambda each: (each[1].begin, each[1].end)):
        if head.begin != reached:
            where = "overlaps the tensor before it" if head.begin < reached else "has a gap before it"
            raise ModelLoadError(f"{damaged} ({shown_name(name)} {where}); copy or download it again")
        reached = head.end
    if reached != path.stat().st_size:
        raise ModelLoadError(
            f"{damaged} (its tensors end at byte {reached} of {path.stat().st_size}); copy or download it again"
        )
    if not all(isinstance(text, str) for text in metadata.values()):
        raise ModelLoadError(f"{damaged} (its metadata are no texts); copy or download it again")
    return dict(sorted(heads.items())), metadata


def _head(path: Path, max_bytes: int = _MAX_HEADER_BYTES) -> tuple[dict[str, dict[str, Any]], dict[str, Any], int]:
    """Return the entry of every tensor in the head of a safetensors file, its metadata, and where numbers begin."""
    check_whole(path)
    try:
        with open_file(path, error=ModelLoadError) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > max_bytes:
                raise DocumentError(f"its header would be {length} bytes, more than {max_bytes}")
            content = file.read(length)
        # Each has one of these words, which are counted before a mapping is made of each.
        if (num_tensors := content.count(b'"data_offsets"')) > MAX_TENSORS:
            raise DocumentError(f"it would hold {num_tensors} tensors, more than {MAX_TENSORS}")
        head = parse_json(content)
        if len(head) > MAX_TENSORS + 1:
            raise DocumentError(f"it would hold {len(head)} tensors, more than {MAX_TENSORS}")
        entries = {name: entry for name, entry in head.items() if name != "__metadata__"}
        for name, entry in entries.items():
            if not isinstance(entry, dict) or "dtype" not in entry:
                raise DocumentError(f"the entry of {shown_name(name)}")
        metadata = head.get("__metadata__") or {}
        if not isinstance(metadata, dict):
            raise DocumentError("its metadata are no texts")
        return entries, metadata, 8 + length
    except (OSError, DocumentError, AttributeError, TypeError, KeyError, ValueError) as error:
        raise ModelLoadError(
            f"{path} is damaged or not a safetensors file ({first_line(error)}); copy or download it again"
        ) from error


def without_prefix(name: str) -> str:
    """The name of a tensor without what stands before the transformer's own."""
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


# Components that lie in one file with a transformer or a text encoder of other numbers, by the names of their tensors
# there, without a transformer's prefix.
OWN_NAMES: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "audio_vae": re.compile(r"audio_vae\."),
        "vocoder": re.compile(r"vocoder\."),
        "connectors": re.compile(r"((video|audio)_embeddings_connector|text_embedding_projection)\."),
    }
)


def of_component(component: str, dtypes: Mapping[str, str]) -> Mapping[str, str]:
    """Return the tensors of a component in a file that holds others as well; all of any other file. dtypes: by tensor
    name."""
    pattern = OWN_NAMES.get(component)
    if pattern is None:
        return dtypes
    return {name: dtype for name, dtype in dtypes.items() if pattern.match(without_prefix(name))} or dtypes


def refuse_quantised(path: Path, dtypes: Mapping[str, str]) -> None:
    """Raises ModelLoadError for a file with tensors stored as 8-bit integers or fewer, or as 8-bit floats with scales,
    and for weights that are whole numbers. Plain casts to 8-bit floats are numbers as others. dtypes: by tensor name.
    """
    dtypes = {name: dtype for name, dtype in dtypes.items() if name not in TOKENIZER_TENSORS}
    refuse_whole_numbers(path, dtypes)
    strange = need_scales(dtypes)
    if strange:
        raise ModelLoadError(
            f"{_stored_as(path, dtypes, strange)} Of autoencoders this runtime reads plain casts to 8-bit floats, "
            f"without scales; {UNQUANTISED_FOLDER}"
        )


def refuse_whole_numbers(path: Path, dtypes: Mapping[str, str]) -> None:
    """Raises ModelLoadError for weights that are stored as whole numbers or booleans. dtypes: by tensor name."""
    strange = {
        name: dtype
        for name, dtype in dtypes.items()
        if dtype in _WHOLE_NUMBERS and name.rpartition(".")[2] in _WEIGHT_LEAVES
    }
    if strange:
        kinds = ", ".join(sorted(set(strange.values())))
        raise ModelLoadError(
            f"{path}: {len(strange)} of {len(dtypes)} tensors are stored as {kinds}, expected BF16, F16 or F32: "
            f"{listed(strange)}. Weights of a layer are no whole numbers: the file was quantised without its scales, "
            f"or is of something else; {UNQUANTISED_FOLDER}"
        )


def refuse_unmarked(path: Path, dtypes: Mapping[str, str]) -> None:
    """Raises ModelLoadError for the file of a transformer or a text encoder with tensors stored otherwise than as plain
    numbers, 8-bit floats, the marks of layers, and the weights that these are for. dtypes: by tensor name."""
    dtypes = {name: dtype for name, dtype in dtypes.items() if name not in TOKENIZER_TENSORS}
    refuse_whole_numbers(path, dtypes)
    strange = {
        name: dtype
        for name, dtype in dtypes.items()
        if dtype not in (*_PLAIN_DTYPES, *FLOAT8_KINDS)
        and name.rpartition(".")[2] not in ("comfy_quant", "scaled_fp8")
        and f"{name.rpartition('.')[0]}{LAYER_MARK}" not in dtypes
    }
    if strange and not _has_marks_in_header(path):
        raise ModelLoadError(
            f"{_stored_as(path, dtypes, strange)} This runtime reads 8-bit floats and GGUF, and other formats where a "
            f"mark beside each weight (X{LAYER_MARK}) says which; {UNQUANTISED_FOLDER}"
        )


def _has_marks_in_header(path: Path) -> bool:
    with contextlib.suppress(ModelLoadError, OSError, DocumentError):
        with open_file(path, error=ModelLoadError) as file:
            head = parse_json(file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES)))
        notes = head.get("__metadata__") if isinstance(head, dict) else None
        return isinstance(notes, dict) and QUANTIZATION_METADATA in notes
    return False


def need_scales(dtypes: Mapping[str, str]) -> dict[str, str]:
    """The tensors that cannot be read without scales. 8-bit floats without scales are plain numbers."""
    has_scales = any("scale" in name.rpartition(".")[2] and "table" not in name for name in dtypes)
    return {
        name: dtype
        for name, dtype in dtypes.items()
        if dtype not in _PLAIN_DTYPES and (has_scales or dtype not in FLOAT8_KINDS)
    }


def _stored_as(path: Path, dtypes: Mapping[str, str], strange: Mapping[str, str]) -> str:
    kinds = ", ".join(sorted(set(strange.values())))
    formats = _marked_formats(path, dtypes)
    return (
        f"{path}: {len(strange)} of {len(dtypes)} tensors are stored as {kinds}, expected BF16, F16 or F32: "
        f"{listed(strange)}. These weights are quantised{f' (format {listed(formats)})' if formats else ''}."
    )


def _marked_formats(path: Path, dtypes: Mapping[str, str]) -> list[str]:
    """The formats that ComfyUI's marks of quantised weights name, with what they switch on:
    `int8_tensorwise, convrot`. dtypes: by tensor name, with or without the prefix of a part. Marks that cannot be read
    hold nothing."""
    if not any(name.endswith(LAYER_MARK) for name in dtypes):
        return []
    found: dict[str, None] = {}
    with contextlib.suppress(ModelLoadError, OSError, DocumentError):
        places = [place for name, place in stored_offsets(path).items() if name.endswith(LAYER_MARK)]
        with open_file(path, error=ModelLoadError) as file:
            for begin, end in places[:_MAX_MARKS]:
                file.seek(begin)
                values = parse_json(file.read(min(end - begin, MAX_MARK_BYTES)))
                if isinstance(values, dict) and isinstance(stored := values.get("format"), str):
                    switched_on = [key for key, value in values.items() if value is True]
                    found[", ".join(shown(each).strip("'") for each in (stored, *switched_on))] = None
    return sorted(found)


def _variants(folder: Path, stem: str) -> list[str]:
    """`.fp16` and the like, of which there are files; the preferred first."""
    single = re.compile(rf"{re.escape(stem)}\.([^.]+)\.safetensors")
    index = re.compile(rf"{re.escape(stem)}\.safetensors\.index\.([^.]+)\.json")
    matches = (single.fullmatch(path.name) or index.fullmatch(path.name) for path in folder.iterdir())
    found = {match[1] for match in matches if match and not re.search(r"-\d+-of-\d+", match[1])}
    order = {name: place for place, name in enumerate(VARIANTS)}
    return [f".{name}" for name in sorted(found, key=lambda name: (order.get(name, len(order)), name))]


def _shards(index: Path) -> list[Path]:
    """The shards that an index names, all of them present."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(
            f"{index}: key 'weight_map': expected tensor names with their files, got {shown(weight_map)}"
        )
    strange = next((name for name in weight_map.values() if not isinstance(name, str)), None)
    if strange is not None:
        raise ModelLoadError(f"{index}: key 'weight_map': expected the name of a file each, got {shown(strange)}")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelLoadError(f"{index}: key 'weight_map': expected files of this folder, got {listed(outside)}")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"{index.parent}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing)}; "
            f"{way_to_complete(index)}"
        )
    return [index.parent / name for name in names]


def listed(names: Iterable[Any]) -> str:
    """The first of some names or phrases, each cut to a line, and how many more there are."""
    texts = [str(name) for name in names]
    rest = len(texts) - _NUM_LISTED
    cut = [
        text if len(text) <= MAX_LINE_CHARACTERS else f"{text[:MAX_LINE_CHARACTERS]}..." for text in texts[:_NUM_LISTED]
    ]
    plain = [text if text.isprintable() else shown(text) for text in cut]
    return ", ".join(plain) + (f" and {rest} more" if rest > 0 else "")


# The components whose weights may be stored in 8 bits.
TRANSFORMERS = ("transformer", "transformer_2")

# quant_method of a folder whose files have ComfyUI's marks, which diffusers and transformers refuse to read.
MARKS = "comfy_quant"

# How the files of a component's weights are called, by the library that its class is of.
COMPONENT_STEM = "diffusion_pytorch_model"
STEMS = {"diffusers": COMPONENT_STEM, "transformers": "model"}


def check_components(folder: AnyFolder) -> None:
    """Raises ModelLoadError for a component that could not be a folder's inside the model folder, or has sizes that a
    library would build without end. Reads json alone."""
    path = folder / INDEX_FILE
    for component, _ in _components(folder):
        check_path(component, f"{path}: component", ModelLoadError)
        if Path(component).name != component:
            raise ModelLoadError(
                f"{path}: component {shown(component)}: expected the name of a folder beside this file"
            )
    for component, _ in _with_weights(folder):
        check_sizes(read_json_in(folder, component, "config.json"), folder / component / "config.json")


def refuse_quantised_components(folder: AnyFolder, elsewhere: Collection[str] = ()) -> None:
    """Raises ModelLoadError for a component whose config.json says that its weights are quantised, other than a
    transformer in ModelOpt's FP8. elsewhere: components whose weights are read from other files. Reads json alone."""
    for component, _ in _with_weights(folder):
        if component not in elsewhere:
            settings = read_json_in(folder, component, "config.json")
            _check_quantization_config(folder / component / "config.json", settings, component)


def check_quantization_config(folder: Path, component: str) -> None:
    """Raises ModelLoadError where config.json in a folder of weights says that they are quantised in a way that is not
    read."""
    path = folder / "config.json"
    if path.exists():
        _check_quantization_config(path, read_json(path), component)


def is_dequantized(folder: AnyFolder, component: str) -> bool:
    """Return whether config.json of a component asks for weights that are dequantised when they are loaded, as
    transformers' `dequantize` does. Raises what read_json_in raises."""
    settings = read_json_in(folder, component, "config.json").get("quantization_config")
    return isinstance(settings, dict) and settings.get("dequantize") is True


def _check_quantization_config(path: Path, values: Mapping[str, Any], component: str) -> None:
    settings = values.get("quantization_config")
    if isinstance(settings, dict) and not isinstance(settings.get("dequantize", False), bool):
        raise ModelLoadError(
            f"{path}: key 'quantization_config.dequantize': expected true or false, got {shown(settings['dequantize'])}"
        )
    if isinstance(settings, dict) and settings.get("quant_method") == MARKS:
        # The marks are read with the weights.
        return
    if settings is not None and not (component in TRANSFORMERS and _is_modelopt_fp8(settings)):
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        own = (
            f"add --{component.replace('_', '-')}-path with a safetensors file in 8-bit floats or a GGUF file, "
            if component in TRANSFORMERS
            else ""
        )
        raise ModelLoadError(
            f"{path}: key 'quantization_config': the weights are quantised ({method}), and this runtime does not "
            f"read them; {own}{UNQUANTISED}"
        )


def _is_modelopt_fp8(settings: object) -> bool:
    """Return whether a quantization_config is what ModelOpt writes for 8-bit floats with separate scales."""
    if not isinstance(settings, dict) or settings.get("quant_method") != "modelopt":
        return False
    nested = settings.get("quantization")
    algorithm = settings.get("quant_algo", nested.get("quant_algo") if isinstance(nested, dict) else None)
    return algorithm == "FP8"


def find_component_files(folder: AnyFolder, elsewhere: Collection[str] = ()) -> dict[str, list[Path]]:
    """The weight files of every component, all of them present; none is read. elsewhere: components whose weights are
    read from other files. Raises ModelLoadError for a component that is missing, and for weight files that are missing
    or pickled."""
    for component, _ in _components(folder):
        if not (folder / component).is_dir():
            raise ModelLoadError(
                f"{folder / component}/ is missing, and {INDEX_FILE} names it; {way_to_complete(folder / component)}"
            )
    return {
        component: find_weight_files(folder / component, stem)
        for component, stem in _with_weights(folder)
        if component not in elsewhere
    }


def check_component_files(
    folder: AnyFolder, elsewhere: Collection[str] = (), may_be_quantised: Collection[str] = ()
) -> None:
    """Check the heads of what find_component_files finds. may_be_quantised: autoencoders that are read in 8 bits, too.
    Raises its errors, and ModelLoadError for weights that are quantised in a way that is not read, damaged or cut
    off."""
    for component, files in find_component_files(folder, elsewhere).items():
        reads_quantized = component in (*TRANSFORMERS, *may_be_quantised) or component.startswith("text_encoder")
        refuse = refuse_unmarked if reads_quantized else refuse_quantised
        prefix = part_prefix(folder / component)
        for path in files:
            # GGUF files were opened where they were named (models/part_files.py).
            if path.suffix != GGUF:
                refuse(path, of_component(component, stored_dtypes(path, prefix)))


def _with_weights(folder: AnyFolder) -> Iterator[tuple[str, str]]:
    """(name, stem of its weight files) of every component that has weights: schedulers and tokenizers have no
    config.json."""
    for component, library in _components(folder):
        if library in STEMS and (folder / component / "config.json").is_file():
            yield component, STEMS[library]


def _components(folder: AnyFolder) -> Iterator[tuple[str, str]]:
    """(name, library) of every component; optional ones that a model lacks are null in model_index.json."""
    for component, entry in read_index(folder).items():
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str):
            yield component, entry[0]
