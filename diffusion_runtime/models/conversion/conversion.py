"""Conversion of pickled causal Wan checkpoints to a diffusers folder, and of their LoRA files to a safetensors file."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.core.model_folder import INDEX_FILE, ModelFolder, read_index
from diffusion_runtime.errors import ConfigError, ModelLoadError, OutputError, nearest, shown, shown_name
from diffusion_runtime.media.publish import cannot_write, take_name
from diffusion_runtime.models.conversion.checkpoints import (
    CAUSAL_CLASS,
    CHECKPOINTS,
    LORA_KEYS,
    OPTIONAL_PART,
    CausalCheckpoint,
)
from diffusion_runtime.models.conversion.pickle_file import (
    PickledTensors,
    PickleFile,
    choose,
    read_checkpoint,
)
from diffusion_runtime.models.registry import family_for_folder, lora_names_of_families
from diffusion_runtime.request.interpolation import RIFE
from diffusion_runtime.untrusted.files import check_path, check_place
from diffusion_runtime.weights.lora.detection import families_of
from diffusion_runtime.weights.lora.reading import read_lora_file
from diffusion_runtime.weights.stored_tensors import Rows, stored_rows
from diffusion_runtime.weights.tensor_files import stream_tensors
from diffusion_runtime.weights.tensor_names import by_diffusers_names
from diffusion_runtime.weights.weight_files import COMPONENT_STEM, SAFETENSORS, listed

BASE_MODEL = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
LINKED = ("vae", "text_encoder", "tokenizer", "scheduler")
DTYPES: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_FAMILY = "Wan"


@dataclass(frozen=True)
class ConversionReport:
    """Contents read and written. keys: of the file, with the number of their tensors and bytes; stored: dtypes of the
    tensors that were read, with their number. left_out: tensors of the key that were for
    training alone."""

    source: str
    output: str
    key: str
    keys: Mapping[str, tuple[int, int]]
    num_tensors: int
    num_parameters: int
    stored: Mapping[str, int]
    dtype: str
    num_bytes: int
    checkpoint: str | None
    linked: Mapping[str, str]
    left_out: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "keys": {key: {"tensors": count, "bytes": size} for key, (count, size) in self.keys.items()},
            "stored": dict(self.stored),
            "linked": dict(self.linked),
            "left_out": list(self.left_out),
        }


def checkpoint_of(name: str) -> CausalCheckpoint:
    """Return the checkpoint of a name. Raises ConfigError for an unknown one."""
    if name not in CHECKPOINTS:
        raise ConfigError(f"--as: unknown checkpoint {shown(name)}.{nearest(name, (*CHECKPOINTS, RIFE))}")
    return CHECKPOINTS[name]


def convert_model(
    source: Path, output: Path, checkpoint: CausalCheckpoint, base: Path, *, key: str | None, dtype: str, copies: bool
) -> ConversionReport:
    """Write a model folder from a pickled transformer. base: a folder of Wan 2.1, for everything else; copies: copy its
    parts instead of linking to them. dtype: one of DTYPES.

    Raises ConfigError for a path or a key that is none, ModelLoadError for a file that is no pickle of tensors or of
    another model, OutputError where the folder cannot be written. A failure leaves nothing behind.
    """
    check_free(output)
    parts = _base_parts(base)
    groups = read_checkpoint(source)
    chosen = choose(source, groups, key, checkpoint.keys)
    if _is_lora(chosen):
        raise ModelLoadError(
            f"{source}: {shown_name(chosen.key)} is a LoRA and no model: leave out --base and --as, "
            "and give a .safetensors file to write"
        )
    rows = _model_rows(source, chosen, base)

    def write(folder: Path) -> int:
        (folder / "transformer").mkdir()
        config = ModelFolder(base).read_json("transformer", "config.json")
        _write_json(folder / "transformer" / "config.json", {**config, **checkpoint.transformer_settings()})
        index = ModelFolder(base).read_json(INDEX_FILE)
        index |= {"_class_name": checkpoint.pipeline, "transformer": ["diffusers", CAUSAL_CLASS]}
        _write_json(folder / INDEX_FILE, index)
        _write_json(folder / "generation.json", _generation(base, checkpoint))
        for name, part in parts.items():
            if copies:
                shutil.copytree(part, folder / name)
            else:
                (folder / name).symlink_to(part, target_is_directory=True)
        return write_rows(folder / "transformer" / f"{COMPONENT_STEM}.safetensors", rows, DTYPES[dtype])

    num_bytes = written(output, write, num_numbers(rows) * DTYPES[dtype].itemsize)
    linked = {} if copies else {name: str(part) for name, part in parts.items()}
    return report_of(source, output, groups, chosen, rows, dtype, num_bytes, checkpoint.name, linked)


def convert_lora(source: Path, output: Path, *, key: str | None, dtype: str) -> ConversionReport:
    """Write a safetensors file of a pickled LoRA of Wan. Raises what convert_model raises."""
    if not check_path(source, "FILE").is_file():
        raise ModelLoadError(f"{source}: expected a checkpoint that torch.save wrote, but there is no such file")
    if output.suffix not in SAFETENSORS:
        raise ConfigError(
            f"OUT: {output}: a LoRA becomes one .safetensors file; for a model add --as {' | '.join(CHECKPOINTS)} and "
            "--base FOLDER"
        )
    check_free(output)
    groups = read_checkpoint(source)
    chosen = choose(source, groups, key, LORA_KEYS)
    if not _is_lora(chosen):
        raise ModelLoadError(
            f"{source}: {shown_name(chosen.key)} holds no LoRA (lora_A, lora_B), but tensors such as "
            f"{listed(map(shown_name, list(chosen.tensors)[:3]))}: for a model add --as {' | '.join(CHECKPOINTS)} and "
            f"--base FOLDER, for weights of RIFE --as {RIFE}"
        )
    file = PickleFile(source, chosen)
    rows = stored_rows([file])

    def write(folder: Path) -> int:
        path = folder / output.name
        num_bytes = write_rows(path, rows, DTYPES[dtype])
        lora = read_lora_file(str(path), "OUT")
        families = families_of(lora.modules, lora_names_of_families())
        if lora.unknown or _FAMILY not in families:
            raise ModelLoadError(
                f"{source}: not a LoRA of {_FAMILY}: {len(lora.unknown)} unknown keys "
                f"({listed(map(shown_name, lora.unknown))}); families of its names: {', '.join(families) or 'none'}"
            )
        return num_bytes

    num_bytes = written(output, write, num_numbers(rows) * DTYPES[dtype].itemsize, is_file=True)
    return report_of(source, output, groups, chosen, rows, dtype, num_bytes, None, {})


def _is_lora(group: PickledTensors) -> bool:
    return any(".lora_" in name for name in group.tensors)


def check_free(output: Path) -> None:
    check_place(output, "OUT", OutputError)
    if os.path.lexists(output):
        raise OutputError(f"OUT: {output} is there already; remove it, or give another place")
    if not output.absolute().parent.is_dir():
        raise OutputError(f"OUT: {output.absolute().parent} is no folder")


def _base_parts(base: Path) -> dict[str, Path]:
    """Return the folders of Wan 2.1's other parts. Raises ModelLoadError with what to download for a missing one."""
    advice = f"give a folder of Wan 2.1, such as a download of {BASE_MODEL}"
    if not (base / INDEX_FILE).is_file():
        raise ModelLoadError(f"--base: {base} has no {INDEX_FILE}; {advice}")
    missing = [name for name in (*LINKED, "transformer/config.json") if not (base / name).exists()]
    if missing:
        raise ModelLoadError(f"--base: {base} lacks {listed(missing)}; {advice}")
    folder = ModelFolder(base.absolute())
    title = family_for_folder(folder).weights.lora_names.title
    classes = read_index(folder).get("transformer")
    if title != _FAMILY or not isinstance(classes, list) or classes[-1] != "WanTransformer3DModel":
        raise ModelLoadError(f"--base: {base} holds {shown(classes)} of {title}; {advice}")
    return {name: (base / name).resolve() for name in LINKED}


def _model_rows(source: Path, chosen: PickledTensors, base: Path) -> Rows:
    """Return the tensors by diffusers' names. Raises ModelLoadError for another model's or missing tensors."""
    folder = ModelFolder(base.absolute())
    family = family_for_folder(folder)
    expected = replace(family.open(folder).weights.expected("transformer"), known=lora_names_of_families)
    rows = by_diffusers_names(source, stored_rows([PickleFile(source, chosen)]), expected)
    wanted = {name: shape for name, shape in expected.shapes.items() if name in rows or OPTIONAL_PART not in name}
    missing = [name for name in wanted if name not in rows]
    if missing:
        raise ModelLoadError(
            f"{source}: {shown_name(chosen.key)} lacks {len(missing)} of {len(wanted)} tensors of the "
            f"transformer: {listed(missing)}; another key, or a whole file, has them"
        )
    wrong = [
        f"{name} is {list(rows[name][0].shape)}, expected {list(shape)}"
        for name, shape in wanted.items()
        if sum(each.shape[0] for each in rows[name]) != shape[0] or rows[name][0].shape[1:] != shape[1:]
    ]
    if wrong:
        raise ModelLoadError(
            f"{source}: {len(wrong)} of {len(rows)} tensors have other sizes than {base}: {listed(wrong)}. Give the "
            "Wan 2.1 that the checkpoint was trained from by --base"
        )
    odd = {each.kind for several in rows.values() for each in several} - {"F64", "F32", "F16", "BF16"}
    if odd:
        raise ModelLoadError(f"{source}: expected tensors of float32, float16 or bfloat16, got {listed(sorted(odd))}")
    return {name: rows[name] for name in wanted}


def _generation(base: Path, checkpoint: CausalCheckpoint) -> dict[str, Any]:
    """Return generation.json: the checkpoint's values, and the base's length of texts where it sets one."""
    path = base / "generation.json"
    own = ModelFolder(base).read_json("generation.json") if path.is_file() else {}
    kept = {"max_text_tokens": own["max_text_tokens"]} if "max_text_tokens" in own else {}
    return {**kept, "defaults": checkpoint.request_values()}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def num_numbers(rows: Rows) -> int:
    return sum(torch.Size(each.shape).numel() for several in rows.values() for each in several)


def write_rows(path: Path, rows: Rows, dtype: torch.dtype) -> int:
    """Write a safetensors file, one tensor after the other; return its size."""

    def read(name: str) -> torch.Tensor:
        parts = [each.numbers(dtype).to(dtype) for each in rows[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return stream_tensors(path, shapes_of(rows), dtype, read)


def shapes_of(rows: Rows) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor."""
    return {
        name: (sum(each.shape[0] for each in several), *several[0].shape[1:]) if several[0].shape else ()
        for name, several in rows.items()
    }


def written(output: Path, write: Callable[[Path], int], num_bytes: int, *, is_file: bool = False) -> int:
    """Let `write` fill a folder next to the output, and move the result into its place; return the size that it
    returns.

    is_file: the file of the output's name is moved there, and not the folder.
    """
    parent = output.absolute().parent
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise OutputError(f"OUT: {output} takes {num_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there")
    try:
        with tempfile.TemporaryDirectory(prefix=".converted-", dir=parent, ignore_cleanup_errors=True) as name:
            folder = Path(name) / "made"
            folder.mkdir()
            size = write(folder)
            if not take_name(folder / output.name if is_file else folder, output):
                raise OutputError(
                    f"OUT: {output} was made by another program meanwhile, and stays as it is; remove it, or give "
                    "another place"
                )
    except OSError as error:
        raise cannot_write(output, error, "OUT") from error
    return size


def report_of(
    source: Path,
    output: Path,
    groups: tuple[PickledTensors, ...],
    chosen: PickledTensors,
    rows: Rows,
    dtype: str,
    num_bytes: int,
    checkpoint: str | None,
    linked: Mapping[str, str],
) -> ConversionReport:
    stored: dict[str, int] = {}
    for several in rows.values():
        for each in several:
            stored[each.kind] = stored.get(each.kind, 0) + 1
    return ConversionReport(
        str(source),
        str(output),
        chosen.key,
        {group.key: (len(group.tensors), group.num_bytes) for group in groups},
        len(rows),
        num_numbers(rows),
        stored,
        dtype,
        num_bytes,
        checkpoint,
        linked,
    )
