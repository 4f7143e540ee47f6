"""LoRA settings in a file's metadata or adapter_config.json: alphas, ranks, rank-stabilised scaling (rsLoRA), DoRA.

rsLoRA: alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski, arXiv:2312.03732).
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from diffusion_runtime.errors import ModelLoadError, first_line, shown
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.json_text import parse_json, read_json_file
from diffusion_runtime.weights.lora.keys import Names, split_prefix

_T = TypeVar("_T")

METADATA_KEY = "lora_adapter_metadata"
CONFIG_FILE = "adapter_config.json"
# What peft, diffusers and trainers call the file inside a folder.
FILES_IN_FOLDERS = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
# The alpha of the whole file, as other trainers write it in the metadata.
_ALPHA_KEYS = ("lora_alpha", "network_alpha")
# Names of modules, of which a file may list any number.
_PLAIN = re.compile(r"[\w.\-]+")
# An untrusted regular expression may take years to match: with many repetitions or alternatives, or with repetitions of
# what has several ways to match itself. Within these bounds, and with names of this length, one takes milliseconds.
_REPETITION = re.compile(r"[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_MAX_REPETITIONS = 2
_MAX_BARS = 6
_MAX_PATTERN_CHARACTERS = 200
_MAX_EXPRESSIONS = 16
_MAX_NAME_CHARACTERS = 120
# Initial values that peft takes off the model's own weights: without those weights the file adds something else.
_RESIDUAL_INITS = ("pissa", "olora", "corda", "loftq")


class ByPattern(Generic[_T]):
    """Values by pattern of module names, as peft finds them: the first pattern that the end of a name matches. `find`
    raises ModelLoadError for a name that expressions could take years with."""

    def __init__(self, values: Mapping[str, _T] | None = None) -> None:
        self._plain: dict[str, tuple[int, _T]] = {}
        self._expressions: list[tuple[int, re.Pattern[str], _T]] = []
        for index, (pattern, value) in enumerate((values or {}).items()):
            if _PLAIN.fullmatch(pattern):
                self._plain.setdefault(pattern, (index, value))
            else:
                self._expressions.append((index, _expression(pattern), value))

    def find(self, name: str) -> _T | None:
        parts = name.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        found = [self._plain[end] for end in ends if end in self._plain]
        if self._expressions and len(name) > _MAX_NAME_CHARACTERS:
            raise ModelLoadError(
                f"{shown(name)}: expected a module name of at most {_MAX_NAME_CHARACTERS} characters beside regular "
                f"expressions in alpha_pattern or rank_pattern, got {len(name)}"
            )
        found += [(index, value) for index, pattern, value in self._expressions if pattern.fullmatch(name)]
        return min(found, key=lambda each: each[0])[1] if found else None


@dataclass(frozen=True)
class AdapterSettings:
    """The settings of one component. alpha, rank: None where the file has none. alphas, ranks: of modules that have
    their own. is_lycoris: peft's LoKr or LoHa, which scales by alpha / rank whether or not its factors are
    decomposed."""

    alpha: float | None = None
    rank: int | None = None
    alphas: ByPattern[float] = field(default_factory=ByPattern)
    ranks: ByPattern[int] = field(default_factory=ByPattern)
    use_rslora: bool = False
    use_dora: bool = False
    is_lycoris: bool = False

    def alpha_of(self, name: str) -> float | None:
        own = self.alphas.find(name)
        return self.alpha if own is None else own

    def rank_of(self, name: str) -> int | None:
        own = self.ranks.find(name)
        return self.rank if own is None else own

    def scale(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


class SettingsByComponent:
    """The settings of a file for each component that its keys name. where: they stand, for messages; whole: those of
    every component; own: those of one, by LoraKey.component."""

    def __init__(self, where: str, whole: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> None:
        self._own = {component: _parse(where, {**whole, **values}) for component, values in own.items()}
        self._whole = _parse(where, whole)

    def of(self, component: str) -> AdapterSettings:
        """component: as in LoraKey."""
        return self._own.get(component, self._whole)

    @property
    def use_dora(self) -> bool:
        """True where the settings give any component magnitudes."""
        return any(each.use_dora for each in (self._whole, *self._own.values()))


def read_settings(path: Path, metadata: Mapping[str, str], *, in_folder: bool = False) -> SettingsByComponent:
    """path: of the tensors' file; in_folder: whether its folder was given, whose adapter_config.json then counts
    whatever the file is called. Raises ModelLoadError."""
    whole: dict[str, Any] = {}
    own: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    where, stated = _stated(path, metadata, in_folder)
    for key, value in stated.items():
        names, component, name = split_prefix(key)
        (whole if names is Names.PLAIN else own[component])[name] = value
    for key in _ALPHA_KEYS:
        if key in metadata and not stated:
            whole.setdefault("lora_alpha", _number_in(path, key, metadata[key]))
    return SettingsByComponent(where, whole, own)


def _stated(path: Path, metadata: Mapping[str, str], in_folder: bool) -> tuple[str, Mapping[str, Any]]:
    """(where they stand, the settings)."""
    beside = path.parent / CONFIG_FILE
    if (in_folder or path.name == "adapter_model.safetensors") and os.path.lexists(beside):
        where, values = str(beside), read_json_file(beside, error=ModelLoadError)
    elif METADATA_KEY in metadata:
        where = f"{path}: its {METADATA_KEY}"
        try:
            values = parse_json(metadata[METADATA_KEY])
        except DocumentError as error:
            raise ModelLoadError(f"{where} is not valid json: {first_line(error)}") from error
    else:
        return str(path), {}
    if not isinstance(values, dict):
        raise ModelLoadError(f"{where}: expected a json object, got {shown(values)}")
    return where, values


def _number_in(path: Path, key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ModelLoadError(f"{path}: its metadata {key}: expected a number, got {shown(text)}") from error


def _parse(where: str, values: Mapping[str, Any]) -> AdapterSettings:
    is_lycoris = str(values.get("peft_type", "")).upper() in ("LOKR", "LOHA")
    # peft calls the alpha of these `alpha`.
    alpha = values.get("alpha" if is_lycoris else "lora_alpha")
    init = values.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_RESIDUAL_INITS):
        raise ModelLoadError(
            f"{where}: init_lora_weights: {shown(init)} takes its first values off the model's own weights, and the "
            "file is for what was left of them: save it again with peft's path_initial_model_for_weight_conversion, "
            "which makes a plain LoRA of it"
        )
    return AdapterSettings(
        alpha=None if alpha is None else _number(where, "lora_alpha", alpha),
        rank=None if values.get("r") is None else _rank(where, "r", values["r"]),
        alphas=ByPattern(_patterns(where, values, "alpha_pattern", _number)),
        ranks=ByPattern(_patterns(where, values, "rank_pattern", _rank)),
        use_rslora=_flag(where, values, "use_rslora"),
        use_dora=_flag(where, values, "use_dora"),
        is_lycoris=is_lycoris,
    )


def _patterns(where: str, values: Mapping[str, Any], key: str, read: Callable[[str, str, Any], _T]) -> dict[str, _T]:
    patterns = values.get(key) or {}
    if not isinstance(patterns, dict):
        raise ModelLoadError(f"{where}: {key}: expected names with numbers, got {shown(patterns)}")
    expressions = [pattern for pattern in patterns if not _PLAIN.fullmatch(pattern)]
    if len(expressions) > _MAX_EXPRESSIONS:
        raise ModelLoadError(
            f"{where}: {key}: expected at most {_MAX_EXPRESSIONS} regular expressions, got {len(expressions)}; give "
            "the modules by name"
        )
    for pattern in expressions:
        if (
            len(pattern) > _MAX_PATTERN_CHARACTERS
            or len(_REPETITION.findall(pattern)) > _MAX_REPETITIONS
            or pattern.count("|") > _MAX_BARS
            or _REPEATED_GROUP.search(pattern)
        ):
            raise ModelLoadError(
                f"{where}: {key}: expected names, or regular expressions of at most {_MAX_PATTERN_CHARACTERS} "
                f"characters, {_MAX_REPETITIONS} repetitions, none of a group, and {_MAX_BARS} alternatives, got "
                f"{shown(pattern)}"
            )
        try:
            _expression(pattern)
        except (re.error, OverflowError) as error:
            raise ModelLoadError(f"{where}: {key}: {shown(pattern)}: {first_line(error)}") from error
    return {pattern: read(where, key, value) for pattern, value in patterns.items()}


def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?:.*\.)?(?:{pattern})")


def _number(where: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelLoadError(f"{where}: {key}: expected a number, got {shown(value)}")
    return float(value)


def _rank(where: str, key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ModelLoadError(f"{where}: {key}: expected a whole number of 1 or more, got {shown(value)}")
    return value


def _flag(where: str, values: Mapping[str, Any], key: str) -> bool:
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelLoadError(f"{where}: {key}: expected true or false, got {shown(value)}")
    return value is True
