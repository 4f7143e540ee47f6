"""Scales of 8-bit weights in safetensors files: plain casts, ComfyUI's fp8_scaled and mixed files, ModelOpt's FP8.

A weight `X.weight` of 8-bit floats is multiplied by `X.weight_scale`, which older files of ComfyUI call
`X.scale_weight`: one number, or one per output row. Without any scale in the file its numbers are what they say (a
plain cast). Scales of inputs (`X.input_scale`, `X.scale_input`) are not used: inputs are quantised per token as they
come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diffusion_runtime.errors import ModelLoadError, shown, shown_name
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.json_text import parse_json
from diffusion_runtime.weights.tensor_files import TensorFile, TensorHead
from diffusion_runtime.weights.weight_files import FLOAT8_KINDS, LAYER_MARK, MAX_MARK_BYTES, without_prefix

_WEIGHT = ".weight"
_WEIGHT_SCALES = (".weight_scale", ".scale_weight")
_INPUT_SCALES = (".input_scale", ".scale_input")
# ComfyUI, in older files: that every 8-bit layer has a scale.
_FILE_MARK = "scaled_fp8"
_METADATA = "_quantization_metadata"
_FORMATS = ("float8_e4m3fn", "float8_e5m2")
_SCALE_KINDS = ("F32", "F16", "BF16", "F64")
# Of the JSON for all layers.
_MAX_METADATA_BYTES = 10_000_000
# Scales of other formats, which belong to weights that this runtime does not read.
_OTHER_SCALES = {
    ".weight_scale_inv": "one scale per block of 128 x 128 numbers",
    ".weight_scale_2": "two levels of scales (NVFP4)",
}


@dataclass(frozen=True)
class Scale:
    """The scale of a weight. name: of its tensor, in `file`."""

    file: TensorFile
    name: str
    num_numbers: int


@dataclass(frozen=True)
class Scales:
    """of: by the weight's name. unread: tensors that hold nothing about a weight's numbers. full_precision: weights
    whose products the file wants in the model's dtype."""

    of: Mapping[str, Scale]
    unread: frozenset[str]
    full_precision: frozenset[str]


def find_scales(files: Sequence[TensorFile]) -> Scales:
    """The scales in the files of one component.

    Raises ModelLoadError for a scale that is missing, has no 8-bit weight or another shape than one number or one per
    row, and for formats other than 8-bit floats.
    """
    return _Search(files).result()


class _Search:
    def __init__(self, files: Sequence[TensorFile]) -> None:
        self.owner = {name: file for file in files for name in file.heads}
        self.marked: dict[str, bool] = {}
        self.unread: set[str] = set()
        self.scales: dict[str, Scale] = {}
        self.says_scaled = self.wants_full_precision = False
        for file in files:
            self._read_metadata(file)
        for name, file in self.owner.items():
            self._read_name(name, file)

    def result(self) -> Scales:
        for weight, scale in self.scales.items():
            self._check(weight, scale)
        for name, file in self.owner.items():
            head = file.heads[name]
            is_matrix = name.endswith(_WEIGHT) and len(head.shape) >= 2
            if head.kind in FLOAT8_KINDS and is_matrix and name not in self.scales and self._needs_scale(name):
                layer = name.removesuffix(_WEIGHT)
                raise ModelLoadError(
                    f"{file.path}: {shown_name(name)} is stored as {head.kind} in a file with scales, and its own is "
                    f"missing: expected {shown_name(f'{layer}{_WEIGHT_SCALES[0]}')} or "
                    f"{shown_name(f'{layer}{_WEIGHT_SCALES[1]}')}; copy or download the file again"
                )
        full = {name for name in self.owner if self.marked.get(_layer_of(name), self.wants_full_precision)}
        return Scales(self.scales, frozenset(self.unread), frozenset(full))

    def _needs_scale(self, weight: str) -> bool:
        if self.marked:
            return _layer_of(weight) in self.marked
        return self.says_scaled or bool(self.scales)

    def _read_name(self, name: str, file: TensorFile) -> None:
        for suffix in _WEIGHT_SCALES:
            if name.endswith(suffix):
                weight = name.removesuffix(suffix) + _WEIGHT
                if weight in self.scales:
                    raise ModelLoadError(f"{file.path}: {shown_name(weight)} has two scales: {shown_name(name)} too")
                self.scales[weight] = Scale(file, name, _numbers(file.heads[name]))
                self.unread.add(name)
        for suffix, what in _OTHER_SCALES.items():
            if name.endswith(suffix):
                raise ModelLoadError(
                    f"{file.path}: {shown_name(name)}: {what}; this runtime reads 8-bit floats with one scale per "
                    "tensor or per row. Use such a file, or one in bfloat16"
                )
        if name.endswith(_INPUT_SCALES):
            self.unread.add(name)
        elif name.endswith(LAYER_MARK):
            self.unread.add(name)
            self._mark(name.removesuffix(LAYER_MARK), self._mark_text(name, file), f"{file.path}: {shown_name(name)}")
        elif name.rpartition(".")[2] == _FILE_MARK:
            self.unread.add(name)
            self.says_scaled = True
            # As ComfyUI reads it: two numbers ask for products in full precision.
            self.wants_full_precision |= _numbers(file.heads[name]) == 2

    def _read_metadata(self, file: TensorFile) -> None:
        text = file.metadata.get(_METADATA)
        if text is None:
            return
        where = f"{file.path}: metadata {_METADATA!r}"
        layers = _parsed(text.encode(), _MAX_METADATA_BYTES, where).get("layers")
        if not isinstance(layers, dict):
            raise ModelLoadError(f"{where}: key 'layers': expected layers with their formats, got {shown(layers)}")
        for layer, settings in layers.items():
            self._mark(layer, settings, f"{where}: layer {shown_name(layer)}")

    def _mark_text(self, name: str, file: TensorFile) -> Mapping[str, object]:
        head = file.heads[name]
        if head.kind not in ("U8", "I8") or _numbers(head) > MAX_MARK_BYTES:
            raise ModelLoadError(
                f"{file.path}: {shown_name(name)}: expected up to {MAX_MARK_BYTES} bytes of JSON, got "
                f"{_numbers(head)} x {head.kind}"
            )
        return _parsed(file.read(name).numpy().tobytes(), MAX_MARK_BYTES, f"{file.path}: {shown_name(name)}")

    def _mark(self, layer: str, settings: object, where: str) -> None:
        stored = settings.get("format") if isinstance(settings, dict) else None
        if not isinstance(settings, dict) or not isinstance(stored, str) or not stored.startswith(_FORMATS):
            raise ModelLoadError(
                f"{where}: expected format {' or '.join(_FORMATS)}, got {shown(stored)}; this runtime reads no other. "
                "Use a file in 8-bit floats or in bfloat16"
            )
        self.marked[_layer_of(layer)] = settings.get("full_precision_matrix_mult") is True

    def _check(self, weight: str, scale: Scale) -> None:
        path, head = scale.file.path, scale.file.heads[scale.name]
        owner = self.owner.get(weight)
        if owner is None:
            raise ModelLoadError(f"{path}: {shown_name(scale.name)} is a scale, and {shown_name(weight)} is missing")
        stored = owner.heads[weight]
        if stored.kind not in FLOAT8_KINDS:
            raise ModelLoadError(
                f"{path}: {shown_name(scale.name)} is a scale, and {shown_name(weight)} is stored as {stored.kind}, "
                "which has none"
            )
        rows = stored.shape[0] if stored.shape else 1
        is_column = head.shape in ((), (1,), (1, 1), (rows,), (rows, 1))
        if head.kind not in _SCALE_KINDS or not is_column:
            raise ModelLoadError(
                f"{path}: {shown_name(scale.name)} is {head.kind} {list(head.shape)}; expected floating-point numbers, "
                f"one or [{rows}] (one per row of {shown_name(weight)})"
            )


def _layer_of(name: str) -> str:
    """The layer of a weight, by the name that metadata give it: with or without a prefix."""
    return without_prefix(name).removesuffix(_WEIGHT)


def _numbers(head: TensorHead) -> int:
    number = 1
    for size in head.shape:
        number *= size
    return number


def _parsed(text: bytes, max_bytes: int, where: str) -> Mapping[str, object]:
    try:
        if len(text) > max_bytes:
            raise DocumentError(f"expected at most {max_bytes} bytes, got {len(text)}")
        values = parse_json(text)
    except DocumentError as error:
        raise ModelLoadError(f"{where}: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{where}: expected a JSON object, got {shown(values)}")
    return values
