"""LoRA files in diffusers' format, merged into a checkpoint's weights as they are read (Hu et al., arXiv:2106.09685).

W + scale * (alpha / rank) * B @ A, with A [rank, in], B [out, rank]. Where a file says no alpha, alpha is the rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.config import LoraConfig
from diffusion_runtime.errors import ModelLoadError, first_line, shown
from diffusion_runtime.layers.weight_range import unusable_numbers
from diffusion_runtime.models.checkpoint import WeightChange, read_tensors
from diffusion_runtime.models.weight_files import DAMAGED, listed
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.files import expand_home
from diffusion_runtime.untrusted.json_text import parse_json

COMPONENTS = ("transformer", "transformer_2")
_DOWN, _UP, _UP_BIAS, _ALPHA = ".lora_A.weight", ".lora_B.weight", ".lora_B.bias", ".alpha"
# diffusers' names of text encoders, and what other trainers call theirs.
_TEXT_ENCODER_PREFIXES = ("text_encoder", "lora_te")
# A pattern of a stranger's with many repetitions, or repetitions inside each other, may take years to match.
_REPETITION = re.compile(r"[*+?{]")
_MAX_REPETITIONS = 2
_MAX_PATTERN_CHARACTERS = 200
_MAX_KEY_CHARACTERS = 300
_METADATA_KEY = "lora_adapter_metadata"
_CONVERSION = (
    "diffusers converts many formats: pipe.load_lora_weights(file, adapter_name='default'), then "
    "pipe.transformer.save_lora_adapter(folder)"
)


@dataclass(frozen=True)
class LowRank:
    """What is added to one linear map. down: [rank, in]; up: [out, rank]; bias: [out] or None; factor: on all."""

    down: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor | None
    factor: float


class Lora(WeightChange):
    """One file, read; `read_lora` makes it. parts: by component, then by the name of the module that it changes."""

    def __init__(self, path: Path, parts: Mapping[str, Mapping[str, LowRank]]) -> None:
        self.path = path
        self.parts = parts

    def check_components(self, known: Sequence[str]) -> None:
        """Whether a model whose transformers are `known` has every component that this changes.

        Raises ModelLoadError: what is for a component that is not there would change nothing.
        """
        missing = [component for component in self.parts if component not in known]
        if missing:
            counts = ", ".join(f"{len(self.parts[component])} modules of {component}" for component in missing)
            raise ModelLoadError(
                f"{self.path}: this LoRA changes {counts}, and the model has {' and '.join(known)} alone: that would "
                "be left out. Use a LoRA that was made for this model"
            )

    def check(self, component: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        parts = self.parts.get(component, {})
        missing = [name for name in parts if f"{name}.weight" not in shapes]
        if missing:
            raise ModelLoadError(
                f"{self.path}: this LoRA is for another model: {len(missing)} of its {len(parts)} modules are not in "
                f"the {component}: {listed(missing)}. If it is for this one, in another format: {_CONVERSION}"
            )
        misfits = [
            f"{name} is {list(shapes[f'{name}.weight'])}, the LoRA's {[part.up.shape[0], part.down.shape[1]]}"
            for name, part in parts.items()
            if shapes[f"{name}.weight"] != (part.up.shape[0], part.down.shape[1])
        ]
        if misfits:
            raise ModelLoadError(
                f"{self.path}: this LoRA is for another model: {len(misfits)} of its {len(parts)} modules have other "
                f"sizes in the {component}: {listed(misfits)}"
            )
        without_bias = [name for name, part in parts.items() if part.bias is not None and f"{name}.bias" not in shapes]
        if without_bias:
            raise ModelLoadError(f"{self.path}: has a bias for modules without one: {listed(without_bias)}")

    def apply(self, component: str, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Added in float32 and rounded once, to the dtype of `weight`."""
        module, _, kind = name.rpartition(".")
        part = self.parts.get(component, {}).get(module)
        if part is None or kind not in ("weight", "bias"):
            return weight
        if kind == "bias":
            return weight if part.bias is None else (weight.float() + part.factor * part.bias).to(weight.dtype)
        return torch.addmm(weight.float(), part.up, part.down, alpha=part.factor).to(weight.dtype)


def read_lora(config: LoraConfig) -> Lora:
    """The file of a LoraConfig.

    Raises ConfigError for a path that is no file's, ModelLoadError for a file that is missing, damaged or not in
    diffusers' format.
    """
    path = Path(expand_home(config.path))
    tensors, metadata = read_tensors(path, "lora.path")
    groups: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    strange = []
    for key, tensor in tensors.items():
        component, rest = _split_component(key, config.component)
        suffix = next((suffix for suffix in (_DOWN, _UP, _UP_BIAS, _ALPHA) if rest.endswith(suffix)), None)
        if component is None or suffix is None or len(key) > _MAX_KEY_CHARACTERS:
            strange.append(key)
        else:
            parts = groups.setdefault(component, {}).setdefault(rest.removesuffix(suffix), {})
            if suffix in parts:
                raise ModelLoadError(
                    f"{path}: key {shown(key)} and another one, with or without the component before it, are both for "
                    f"{rest} of {component}; leave one out"
                )
            parts[suffix] = tensor
    if strange or not groups:
        raise ModelLoadError(
            f"{path}: expected a LoRA in diffusers' format, for the transformer alone, with keys such as "
            f"'transformer.blocks.0.attn1.to_q{_DOWN}'; {len(strange)} of {len(tensors)} keys are others: "
            f"{listed(strange) if strange else 'there are none'}. {_CONVERSION}{_lost_text_encoders(strange)}"
        )
    settings = _read_settings(path, metadata, config.component)
    return Lora(
        path,
        {
            component: {
                name: _low_rank(path, name, found, settings.get(component, {}), config.scale)
                for name, found in modules.items()
            }
            for component, modules in groups.items()
        },
    )


def _lost_text_encoders(keys: Sequence[str]) -> str:
    """What the conversion drops, as a sentence; nothing for keys without parts of text encoders."""
    parts = [key for key in keys if key.startswith(_TEXT_ENCODER_PREFIXES)]
    if not parts:
        return ""
    return (
        f". {len(parts)} of these keys change a text encoder: that is not supported here, and the converted file has "
        "the transformer's part alone, so that pictures may differ from what the file's authors show"
    )


def _split_component(key: str, wanted: str) -> tuple[str | None, str]:
    """(component, rest of the key); a key without a component is the transformer's. None for a component not ours."""
    first, _, rest = key.partition(".")
    if first == "transformer":
        return wanted, rest
    if first in COMPONENTS:
        return first, rest
    foreign = first in ("unet", "diffusion_model") or first.startswith(_TEXT_ENCODER_PREFIXES)
    return (None, rest) if foreign else (wanted, key)


def _low_rank(
    path: Path, name: str, found: Mapping[str, torch.Tensor], settings: Mapping[str, Any], scale: float
) -> LowRank:
    down, up = found.get(_DOWN), found.get(_UP)
    if down is None or up is None:
        raise ModelLoadError(f"{path}: {name} has only one of {_DOWN[1:]} and {_UP[1:]}; the file is incomplete")
    if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
        raise ModelLoadError(
            f"{path}: {name}: expected {_DOWN[1:]} [rank, in] and {_UP[1:]} [out, rank], got {list(down.shape)} and "
            f"{list(up.shape)}; LoRAs of convolutions are not supported"
        )
    for suffix, tensor in found.items():
        wrong = unusable_numbers(tensor)
        if wrong is not None:
            raise ModelLoadError(f"{path}: tensor {name}{suffix} {wrong}. {DAMAGED}")
    rank = down.shape[0]
    if not rank or (_ALPHA in found and found[_ALPHA].numel() != 1):
        raise ModelLoadError(f"{path}: {name}: expected a rank of 1 or more and one number as {_ALPHA[1:]}")
    alpha = float(found[_ALPHA]) if _ALPHA in found else _stated_alpha(name, settings, rank)
    if not math.isfinite(alpha):
        raise ModelLoadError(f"{path}: {name}: lora_alpha: expected a number, got {alpha}")
    by_rank = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    bias = found.get(_UP_BIAS)
    return LowRank(down.float(), up.float(), None if bias is None else bias.float(), scale * by_rank)


def _stated_alpha(name: str, settings: Mapping[str, Any], rank: int) -> float:
    """As peft reads it: the first pattern that the end of the module's name matches, then the file's own alpha."""
    for pattern, alpha in (settings.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            return float(alpha)
    return float(settings.get("lora_alpha", rank))


def _read_settings(path: Path, metadata: Mapping[str, str], wanted: str) -> dict[str, dict[str, Any]]:
    """What the file says about its adapters, by component: lora_alpha, alpha_pattern, use_rslora."""
    text = metadata.get(_METADATA_KEY)
    if text is None:
        return {}
    try:
        values = parse_json(text)
    except DocumentError as error:
        raise ModelLoadError(f"{path}: its {_METADATA_KEY} is not valid json: {first_line(error)}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: its {_METADATA_KEY}: expected a json object, got {shown(values)}")
    settings: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        component, name = _split_component(key, wanted)
        if component is not None:
            settings.setdefault(component, {})[name] = value
    for component, known in settings.items():
        if known.get("use_dora"):
            raise ModelLoadError(f"{path}: {component}: use_dora: expected False, got True; DoRA is not supported")
        patterns = known.get("alpha_pattern") or {}
        if not isinstance(patterns, dict):
            raise ModelLoadError(
                f"{path}: {component}: alpha_pattern: expected names with numbers, got {shown(patterns)}"
            )
        numbers = [known.get("lora_alpha", 1), *patterns.values()]
        if not all(isinstance(number, int | float) for number in numbers):
            raise ModelLoadError(f"{path}: {component}: lora_alpha and alpha_pattern: expected numbers, got {numbers}")
        for pattern in patterns:
            if len(pattern) > _MAX_PATTERN_CHARACTERS or len(_REPETITION.findall(pattern)) > _MAX_REPETITIONS:
                raise ModelLoadError(
                    f"{path}: {component}: alpha_pattern: expected at most {_MAX_PATTERN_CHARACTERS} characters and "
                    f"{_MAX_REPETITIONS} repetitions, got {shown(pattern)}"
                )
            try:
                re.compile(pattern)
            except re.error as error:
                raise ModelLoadError(
                    f"{path}: {component}: alpha_pattern: {shown(pattern)}: {first_line(error)}"
                ) from error
    return settings
