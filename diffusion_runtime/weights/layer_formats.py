"""Formats of the weights in safetensors files: plain casts to 8-bit floats, ComfyUI's marks of layers (`comfy_quant`),
its older fp8_scaled files, and ModelOpt's FP8.

A mark says how a layer's weight is stored, and the format which tensors stand beside it (stored_formats). 8-bit floats
need no mark: their scale is `X.weight_scale`, which older files of ComfyUI call `X.scale_weight`; without any scale in
the file its numbers are what they say (a plain cast). Scales of inputs (`X.input_scale`, `X.scale_input`) are not used:
inputs are quantised per token as they come. AWQ's factors of inputs (`X.pre_quant_scale`, Lin et al. 2023,
arXiv:2306.00978) are: an input is multiplied by them, which is the same as a weight whose columns are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diffusion_runtime.errors import ModelLoadError, shown, shown_name
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.json_text import parse_json
from diffusion_runtime.weights.stored_formats.float8 import FLOAT8, Float8
from diffusion_runtime.weights.stored_formats.interface import FLOATS, Companion, StoredFormat
from diffusion_runtime.weights.stored_formats.registry import FORMATS
from diffusion_runtime.weights.tensor_files import TensorFile, TensorHead
from diffusion_runtime.weights.weight_files import LAYER_MARK, MAX_MARK_BYTES, QUANTIZATION_METADATA, without_prefix

_WEIGHT = ".weight"
# Kinds of tensors that are numbers in a format alone.
_NUMBERS_IN_FORMATS = {kind for each in FORMATS.values() for kind in each.kinds} - set(FLOAT8)
_INPUT_SCALES = (".input_scale", ".scale_input")
# ComfyUI, in older files: that every 8-bit layer has a scale.
_FILE_MARK = "scaled_fp8"
_INPUT_FACTORS = "pre_quant_scale"
# Of the JSON for all layers.
_MAX_METADATA_BYTES = 10_000_000
# Tensors beside weights in other formats.
_OTHER_SCALES = {
    ".weight_scale_inv": "one scale per block of 128 x 128 numbers",
}
# Keys of marks that a format reads, or that change no number of a weight. Any other may.
_MARK_KEYS = {
    *("format", "full_precision_matrix_mult", "convrot", "convrot_groupsize", "group_size", "act_unsigned"),
    *("orig_dtype", "orig_shape", "is_weight", "linear_dtype"),
}
# Every suffix of a tensor beside a weight, and the one that a format knows it by.
_SUFFIXES = {
    suffix: each.suffix
    for stored in FORMATS.values()
    for each in stored().companions((256, 256))
    for suffix in (each.suffix, *each.aliases)
}


@dataclass(frozen=True)
class CompanionTensor:
    """A tensor beside a weight. name: of it in `file`; companion: what it has to be."""

    file: TensorFile
    name: str
    companion: Companion

    @property
    def num_numbers(self) -> int:
        return math.prod(self.file.heads[self.name].shape)


@dataclass(frozen=True)
class LayerFormat:
    """Format of a weight. beside: the tensors beside it, by suffix. input_factors: by which its columns are multiplied;
    None for none."""

    format: StoredFormat
    beside: Mapping[str, CompanionTensor] = field(default_factory=dict)
    input_factors: CompanionTensor | None = None


@dataclass(frozen=True)
class LayerFormats:
    """of: by the weight's name. unread: tensors that say nothing about a weight's numbers. full_precision: weights
    whose products the file wants in the model's dtype."""

    of: Mapping[str, LayerFormat]
    unread: frozenset[str]
    full_precision: frozenset[str]


def find_formats(files: Sequence[TensorFile]) -> LayerFormats:
    """Return the formats of the weights in the files of one component.

    Raises ModelLoadError for marks that cannot be read or contradict each other, unknown formats, and tensors beside a
    weight that are missing, too many, or of another shape.
    """
    return _Search(files).result()


@dataclass(frozen=True)
class _Mark:
    """Mark of a layer. where: its place, for messages."""

    settings: Mapping[str, object]
    where: str


class _Search:
    def __init__(self, files: Sequence[TensorFile]) -> None:
        self.owner: dict[str, TensorFile] = {}
        self.marks: dict[str, _Mark] = {}
        self.unread: set[str] = set()
        # By weight, then by suffix.
        self.beside: dict[str, dict[str, tuple[TensorFile, str]]] = {}
        # By weight.
        self.input_factors: dict[str, tuple[TensorFile, str]] = {}
        self.says_scaled = self.wants_full_precision = False
        for file in files:
            for name in file.heads:
                # Of two files, each may say that it is scaled.
                if name in self.owner and name.rpartition(".")[2] != _FILE_MARK:
                    raise ModelLoadError(f"{file.path}: {shown_name(name)} is in {self.owner[name].path} too")
                self.owner[name] = file
        for file in files:
            self._read_metadata(file)
        for name, file in self.owner.items():
            self._read_name(name, file)
        self.has_scales = any("weight_scale" in found for found in self.beside.values())

    def result(self) -> LayerFormats:
        self._refuse_shared_marks()
        for weight, beside in self.beside.items():
            if weight not in self.owner:
                other, scale = next(iter(beside.values()))
                raise ModelLoadError(
                    f"{other.path}: {shown_name(scale)} is a scale, and {shown_name(weight)} is missing"
                )
        for name, file in self.owner.items():
            # In metadata, marks of other parts of a file may stand.
            if name.endswith(LAYER_MARK) and (weight := name.removesuffix(LAYER_MARK) + _WEIGHT) not in self.owner:
                raise ModelLoadError(
                    f"{file.path}: {shown_name(name)} is the mark of a layer, and {shown_name(weight)} is missing"
                )
        found: dict[str, LayerFormat] = {}
        for name, file in self.owner.items():
            mark = self.marks.get(_layer_of(name)) if name.endswith(_WEIGHT) else None
            head = file.heads[name]
            if mark is not None or head.kind in FLOAT8:
                if name not in self.unread:
                    found[name] = self._format_of(name, file, mark)
            elif name in self.beside:
                _, scale = next(iter(self.beside[name].values()))
                raise ModelLoadError(
                    f"{file.path}: {shown_name(scale)} is a scale, and {shown_name(name)} is stored as {head.kind}, "
                    "which has none"
                )
            elif head.kind in _NUMBERS_IN_FORMATS and name.endswith(_WEIGHT) and name not in self.unread:
                # Its numbers as they are would be noise.
                raise ModelLoadError(
                    f"{file.path}: {shown_name(name)} is stored as {head.kind} without a mark that says how, which "
                    f"other layers of the file have: expected {shown_name(name.removesuffix(_WEIGHT) + LAYER_MARK)}, "
                    f"or the layer in metadata {QUANTIZATION_METADATA!r}; copy or download the file again"
                )
        for weight, (file, name) in self.input_factors.items():
            if weight not in found:
                raise ModelLoadError(
                    f"{file.path}: {shown_name(name)} is for a quantised weight, and {shown_name(weight)} is "
                    f"{'stored as ' + self.owner[weight].heads[weight].kind if weight in self.owner else 'missing'}"
                )
        full = frozenset(filter(self._wants_full_precision, self.owner))
        return LayerFormats(found, frozenset(self.unread), full)

    def _refuse_shared_marks(self) -> None:
        layers: dict[str, str] = {}
        for name in self.owner:
            mark = self.marks.get(_layer_of(name)) if name.endswith(_WEIGHT) else None
            if mark is not None and (same := layers.setdefault(_layer_of(name), name)) != name:
                raise ModelLoadError(f"{mark.where} is of two weights: {shown_name(same)}, {shown_name(name)}")

    def _wants_full_precision(self, name: str) -> bool:
        mark = self.marks.get(_layer_of(name))
        return self.wants_full_precision if mark is None else mark.settings.get("full_precision_matrix_mult") is True

    def _format_of(self, name: str, file: TensorFile, mark: _Mark | None) -> LayerFormat:
        head, beside = file.heads[name], self.beside.get(name, {})
        stored_format: type[StoredFormat] = Float8 if mark is None else FORMATS[str(mark.settings["format"])]
        if mark is not None and head.kind not in stored_format.kinds:
            raise ModelLoadError(
                f"{file.path}: {shown_name(name)} is stored as {head.kind}; expected "
                f"{' or '.join(stored_format.kinds)} in format {shown(mark.settings['format'])}"
            )
        heads = {suffix: other.heads[scale] for suffix, (other, scale) in beside.items()}
        try:
            made = stored_format.read({} if mark is None else mark.settings, heads)
            made.shape(head.shape)
            companions = made.companions(head.shape)
        except ModelLoadError as error:
            place = f"{file.path}: {shown_name(name)}" if mark is None else mark.where
            raise ModelLoadError(f"{place}: {shown_name(name)}: {error}") from error
        places = {}
        for each in companions:
            if each.suffix in beside:
                found = CompanionTensor(*beside[each.suffix], each)
                _check(found, name)
                places[each.suffix] = found
            elif each.is_required or self._needs_scale(name, head):
                raise ModelLoadError(
                    f"{file.path}: {shown_name(name)} is stored as {head.kind} in a file with scales, and its own is "
                    f"missing: expected {self._expected(name, each)}; copy or download the file again"
                )
        for suffix in beside.keys() - places.keys():
            raise ModelLoadError(
                f"{file.path}: {shown_name(beside[suffix][1])}: weights in format {made.title} have no such tensor"
            )
        factors = None
        if name in self.input_factors:
            width = made.shape(head.shape)[-1]
            factors = CompanionTensor(*self.input_factors[name], Companion(_INPUT_FACTORS, FLOATS, ((width,),)))
            _check(factors, name)
        return LayerFormat(made, places, factors)

    def _expected(self, name: str, companion: Companion) -> str:
        layer = name.removesuffix(_WEIGHT)
        return " or ".join(shown_name(f"{layer}.{suffix}") for suffix in (companion.suffix, *companion.aliases))

    def _needs_scale(self, weight: str, head: TensorHead) -> bool:
        if not weight.endswith(_WEIGHT) or len(head.shape) < 2:
            return False
        if self.marks:
            return _layer_of(weight) in self.marks
        return self.says_scaled or self.has_scales

    def _read_name(self, name: str, file: TensorFile) -> None:
        layer, _, leaf = name.rpartition(".")
        if leaf in _SUFFIXES and layer:
            found = self.beside.setdefault(layer + _WEIGHT, {})
            if _SUFFIXES[leaf] in found:
                raise ModelLoadError(
                    f"{file.path}: {shown_name(layer + _WEIGHT)} has two scales: {shown_name(name)} too"
                )
            found[_SUFFIXES[leaf]] = (file, name)
            self.unread.add(name)
        if leaf == _INPUT_FACTORS:
            self.input_factors[layer + _WEIGHT] = (file, name)
            self.unread.add(name)
        for suffix, what in _OTHER_SCALES.items():
            if name.endswith(suffix):
                raise ModelLoadError(
                    f"{file.path}: {shown_name(name)}: {what}; this runtime reads {', '.join(sorted(FORMATS))}. Use "
                    "such a file, or one in bfloat16"
                )
        if name.endswith(_INPUT_SCALES):
            self.unread.add(name)
        elif name.endswith(LAYER_MARK):
            self.unread.add(name)
            self._mark(name.removesuffix(LAYER_MARK), self._mark_text(name, file), f"{file.path}: {shown_name(name)}")
        elif leaf == _FILE_MARK:
            self.unread.add(name)
            self.says_scaled = True
            # As ComfyUI reads it: two numbers ask for products in full precision.
            self.wants_full_precision |= math.prod(file.heads[name].shape) == 2

    def _read_metadata(self, file: TensorFile) -> None:
        text = file.metadata.get(QUANTIZATION_METADATA)
        if text is None:
            return
        where = f"{file.path}: metadata {QUANTIZATION_METADATA!r}"
        layers = _parsed(text.encode(), _MAX_METADATA_BYTES, where).get("layers")
        if not isinstance(layers, dict):
            raise ModelLoadError(f"{where}: key 'layers': expected layers with their formats, got {shown(layers)}")
        for layer, settings in layers.items():
            self._mark(layer, settings, f"{where}: layer {shown_name(layer)}")

    def _mark_text(self, name: str, file: TensorFile) -> Mapping[str, object]:
        head = file.heads[name]
        number = math.prod(head.shape)
        if head.kind not in ("U8", "I8") or number > MAX_MARK_BYTES:
            raise ModelLoadError(
                f"{file.path}: {shown_name(name)}: expected up to {MAX_MARK_BYTES} bytes of JSON, got "
                f"{number} x {head.kind}"
            )
        return _parsed(file.read(name).numpy().tobytes(), MAX_MARK_BYTES, f"{file.path}: {shown_name(name)}")

    def _mark(self, layer: str, settings: object, where: str) -> None:
        stored = settings.get("format") if isinstance(settings, dict) else None
        if not isinstance(settings, dict) or not isinstance(stored, str):
            raise ModelLoadError(f"{where}: expected a JSON object with key 'format', got {shown(settings)}")
        # ComfyUI's own reader takes what it appends to these, too.
        known = next((name for name in Float8.names if stored.startswith(name)), stored)
        if known not in FORMATS:
            raise ModelLoadError(
                f"{where}: expected format {' or '.join(sorted(FORMATS))}, got {shown(stored)}; this runtime reads no "
                "other. Use a file in one of these or in bfloat16"
            )
        if settings.get("convrot") and not FORMATS[known].rotates:
            raise ModelLoadError(
                f"{where}: convrot: expected none in format {known}, whose rows are not rotated, got "
                f"{shown(settings['convrot'])}: what its numbers stand for is not known. Use another file"
            )
        for key in settings.keys() - _MARK_KEYS:
            if settings[key]:
                raise ModelLoadError(
                    f"{where}: key {shown(key)}: expected none but {', '.join(sorted(_MARK_KEYS))}: another may change "
                    "the numbers. Use a file without it, or one in bfloat16"
                )
        values = {**settings, "format": known}
        other = self.marks.get(_layer_of(layer))
        if other is not None and other.settings != values:
            raise ModelLoadError(f"{where}: {shown(settings)} contradicts {other.where}: {shown(dict(other.settings))}")
        self.marks[_layer_of(layer)] = _Mark(values, where)


def _check(place: CompanionTensor, weight: str) -> None:
    head = place.file.heads[place.name]
    refusal = place.companion.refusal(head.kind, head.shape)
    if refusal is not None:
        raise ModelLoadError(f"{place.file.path}: {shown_name(place.name)} {refusal} beside {shown_name(weight)}")


def _layer_of(name: str) -> str:
    """Return the layer of a weight, by the name that metadata give it: with or without a prefix."""
    return without_prefix(name).removesuffix(_WEIGHT)


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
