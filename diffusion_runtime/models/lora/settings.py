"""What a file's metadata or the adapter_config.json beside it says: alphas, ranks, rank-stabilised scaling, DoRA.

rsLoRA: alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski, arXiv:2312.03732).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion_runtime.errors import ModelLoadError, first_line, shown
from diffusion_runtime.models.lora.keys import is_text_encoder_key, split_prefix
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.json_text import parse_json, read_json_file

METADATA_KEY = "lora_adapter_metadata"
CONFIG_FILE = "adapter_config.json"
# The alpha of the whole file, as other trainers say it in the metadata.
_ALPHA_KEYS = ("lora_alpha", "network_alpha")
# A pattern of a stranger's with many repetitions, or repetitions inside each other, may take years to match.
_REPETITION = re.compile(r"[*+?{]")
_MAX_REPETITIONS = 2
_MAX_PATTERN_CHARACTERS = 200


@dataclass(frozen=True)
class AdapterSettings:
    """Of one component. alpha, rank: None where nothing is said. alphas, ranks: by pattern of module names, as peft
    reads them. is_lokr: peft's LoKr, which scales by alpha / rank whether or not its factors are decomposed."""

    alpha: float | None = None
    rank: int | None = None
    alphas: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    is_lokr: bool = False

    def alpha_of(self, name: str) -> float | None:
        """As peft finds it: the first pattern that the end of the module's name matches, then the file's own."""
        return next((alpha for pattern, alpha in self.alphas.items() if _matches(pattern, name)), self.alpha)

    def rank_of(self, name: str) -> int | None:
        return next((rank for pattern, rank in self.ranks.items() if _matches(pattern, name)), self.rank)

    def scale(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_settings(path: Path, metadata: Mapping[str, str]) -> dict[bool, AdapterSettings]:
    """By whether they are for `transformer_2`. path: of the tensors' file. Raises ModelLoadError."""
    values: dict[bool, dict[str, Any]] = {False: {}, True: {}}
    stated = _stated(path, metadata)
    for key, value in stated.items():
        if not is_text_encoder_key(key):
            _, second, name = split_prefix(key)
            values[second][name] = value
    for key in _ALPHA_KEYS:
        if key in metadata and not stated:
            values[False].setdefault("lora_alpha", _number_in(path, key, metadata[key]))
    return {second: _parse(path, found) for second, found in values.items()}


def _stated(path: Path, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    beside = path.parent / CONFIG_FILE
    if path.name == "adapter_model.safetensors" and beside.exists():
        where, values = str(beside), read_json_file(beside, error=ModelLoadError)
    elif METADATA_KEY in metadata:
        where = f"{path}: its {METADATA_KEY}"
        try:
            values = parse_json(metadata[METADATA_KEY])
        except DocumentError as error:
            raise ModelLoadError(f"{where} is not valid json: {first_line(error)}") from error
    else:
        return {}
    if not isinstance(values, dict):
        raise ModelLoadError(f"{where}: expected a json object, got {shown(values)}")
    return values


def _number_in(path: Path, key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ModelLoadError(f"{path}: its metadata {key}: expected a number, got {shown(text)}") from error


def _parse(path: Path, values: Mapping[str, Any]) -> AdapterSettings:
    is_lokr = str(values.get("peft_type", "")).upper() == "LOKR"
    # peft calls the alpha of its LoKr `alpha`.
    alpha = values.get("alpha" if is_lokr else "lora_alpha")
    return AdapterSettings(
        alpha=None if alpha is None else _number(path, "lora_alpha", alpha),
        rank=None if values.get("r") is None else int(_number(path, "r", values["r"])),
        alphas={key: _number(path, "alpha_pattern", value) for key, value in _patterns(path, values, "alpha_pattern")},
        ranks={
            key: int(_number(path, "rank_pattern", value)) for key, value in _patterns(path, values, "rank_pattern")
        },
        use_rslora=values.get("use_rslora") is True,
        use_dora=values.get("use_dora") is True,
        is_lokr=is_lokr,
    )


def _patterns(path: Path, values: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    patterns = values.get(key) or {}
    if not isinstance(patterns, dict):
        raise ModelLoadError(f"{path}: {key}: expected names with numbers, got {shown(patterns)}")
    for pattern in patterns:
        if len(pattern) > _MAX_PATTERN_CHARACTERS or len(_REPETITION.findall(pattern)) > _MAX_REPETITIONS:
            raise ModelLoadError(
                f"{path}: {key}: expected at most {_MAX_PATTERN_CHARACTERS} characters and {_MAX_REPETITIONS} "
                f"repetitions, got {shown(pattern)}"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelLoadError(f"{path}: {key}: {shown(pattern)}: {first_line(error)}") from error
    return list(patterns.items())


def _number(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelLoadError(f"{path}: {key}: expected a number, got {shown(value)}")
    return float(value)


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(rf"(.*\.)?({pattern})", name) is not None
