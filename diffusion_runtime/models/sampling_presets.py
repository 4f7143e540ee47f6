"""Sampling presets: the settings that few-step (distilled) models were made for, from sampling_presets.yaml; known
without torch."""

from __future__ import annotations

import fnmatch
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_runtime.core.model_folder import AnyFolder, read_json_in
from diffusion_runtime.errors import ModelLoadError, nearest, shown
from diffusion_runtime.models.published import embedded_names
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.untrusted.yaml_text import read_packaged_yaml
from diffusion_runtime.weights.lora.settings import FILES_IN_FOLDERS

PRESETS_FILE = Path(__file__).with_name("sampling_presets.yaml")
# In recognised_by, next to names of json files.
_MODEL_PATH = "model_path"
# A few-step model is run as one up to this factor above its preset's number of steps: examples of Z-Image-Turbo have 9.
_MAX_STEPS_FACTOR = 2


@dataclass(frozen=True)
class SamplingPreset:
    """Request values under one name. models: those they are for; source: their publication. recognised_by: settings of
    a folder that show such a model, each by file and key; loras: patterns of file names of LoRAs that it is for. model:
    the one model path that has it, None for the whole family; needs_lora: the shipped LoRA that the values are for."""

    family: str
    name: str
    request: Mapping[str, Any]
    models: str
    source: str
    recognised_by: tuple[Mapping[str, Any], ...] = ()
    loras: tuple[str, ...] = ()
    model: str | None = None
    needs_lora: str | None = None

    @property
    def num_steps(self) -> int:
        return int(self.request["num_inference_steps"])

    @property
    def settings(self) -> str:
        """The request values as a text."""
        return ", ".join(f"{name} {_plain(value)}" for name, value in self.request.items())

    def matches(self, request: GenerationRequest) -> bool:
        """Return whether a resolved request has all of these values."""
        values = request.to_dict()
        # A scale of the second expert that equals the first's.
        same_scales = values["guidance_scale_2"] in (None, values["guidance_scale"])
        same_samplers = values["first_chunk_sampler"] in (None, values["sampler"])
        return same_scales and same_samplers and all(values[name] == value for name, value in self.request.items())

    def recognised(self, folder: AnyFolder, model_path: str) -> str | None:
        """Return why this preset is the model's, None when nothing shows it."""
        for sign in self.recognised_by:
            reasons = [_reason(folder, model_path, where, wanted) for where, wanted in sign.items()]
            if all(reason is not None for reason in reasons):
                return " and ".join(str(reason) for reason in reasons)
        return None


@dataclass(frozen=True)
class FewSteps:
    """The settings that a model or its LoRA was distilled to. presets: any of them is right. because: what shows it."""

    presets: tuple[SamplingPreset, ...]
    because: str

    def remark(self, request: GenerationRequest, is_guided: bool) -> str | None:
        """Return one sentence with the right settings for a resolved request that such a model is not made for; None
        where nothing is wrong."""
        wrong = []
        if request.num_inference_steps is not None:
            num_steps = max(preset.num_steps for preset in self.presets)
            if request.num_inference_steps > _MAX_STEPS_FACTOR * num_steps:
                wrong.append(f"{request.num_inference_steps} steps")
        if is_guided:
            wrong.append("classifier-free guidance")
        samplers = {str(preset.request["sampler"]) for preset in self.presets}
        if request.sampler not in samplers:
            wrong.append(f"sampler {request.sampler}")
        if request.first_chunk_sampler not in (None, request.sampler, *samplers):
            wrong.append(f"sampler {request.first_chunk_sampler} of the first chunk")
        if not wrong:
            return None
        names = " or ".join(f"--preset {preset.name} ({preset.settings})" for preset in self.presets)
        return f"made for few steps ({self.because}), and run with {', '.join(wrong)}: use {names}"


def names_of(presets: Iterable[SamplingPreset]) -> tuple[str, ...]:
    return tuple(preset.name for preset in presets)


def presets_of(family: str, model_path: str = "") -> tuple[SamplingPreset, ...]:
    """Return the sampling presets of a model: its own where it has any, else its family's, which are for published
    models and not for the embedded ones."""
    of_family = [preset for preset in sampling_presets() if preset.family == family]
    own = tuple(preset for preset in of_family if preset.model == model_path)
    if own or model_path in embedded_names():
        return own
    return tuple(preset for preset in of_family if preset.model is None)


def check_preset_names(names: Iterable[str], presets: Iterable[SamplingPreset], path: AnyFolder | Path) -> None:
    """Check the names of a model folder's own presets, of the file `path`. Raises ModelLoadError where one is that of a
    sampling preset of the model: `--preset NAME` would have other values with this folder than with every other one."""
    known = {preset.name: preset for preset in presets}
    for name in names:
        if name in known:
            raise ModelLoadError(
                f"{path}: key 'presets.{name}': {name} is the sampling preset of {known[name].models} "
                f"({known[name].settings}); give these values another name"
            )


def shipped_lora_of(preset: str | None, model_path: str) -> str | None:
    """Return the shipped LoRA that a preset of that name needs with this model; None where it needs none."""
    found = (each for each in sampling_presets() if each.name == preset and each.model == model_path)
    return next((each.needs_lora for each in found), None)


@functools.cache
def sampling_presets() -> tuple[SamplingPreset, ...]:
    """Return all sampling presets, family by family."""
    return tuple(
        SamplingPreset(
            family=family,
            name=name,
            request=entry["request"],
            models=entry["models"],
            source=entry["source"],
            recognised_by=tuple(entry.get("recognised_by", ())),
            loras=tuple(entry.get("loras", ())),
            model=entry.get("model"),
            needs_lora=entry.get("needs_lora"),
        )
        for family, entries in read_packaged_yaml(PRESETS_FILE).items()
        for name, entry in entries.items()
    )


def recognise(family: str, folder: AnyFolder, model_path: str) -> FewSteps | None:
    """Return the few-step settings of the model in a folder, as far as the folder or its name shows them; the first of
    its presets is its default. Raises ModelLoadError for json that cannot be read."""
    found = [(preset, preset.recognised(folder, model_path)) for preset in presets_of(family, model_path)]
    reasons = [reason for _, reason in found if reason is not None]
    if not reasons:
        return None
    return FewSteps(tuple(preset for preset, reason in found if reason == reasons[0]), reasons[0])


def recognise_lora(family: str, path: str, model_path: str = "") -> FewSteps | None:
    """Return the few-step settings of the LoRA in a file, as far as its name shows them."""
    file, presets = Path(path), presets_of(family, model_path)
    # Of a PEFT folder its folder tells.
    name = file.parent.name if file.name in FILES_IN_FOLDERS else file.name
    found = tuple(preset for preset in presets if any(_fits(name, pattern) for pattern in preset.loras))
    return FewSteps(found, f"the LoRA {name}") if found else None


def few_steps_of(family: str, folder: AnyFolder, model_path: str, loras: Iterable[str]) -> FewSteps | None:
    """Return few-step settings of a model, else of its first LoRA file that has any; None for many steps."""
    found = (recognise(family, folder, model_path), *(recognise_lora(family, path, model_path) for path in loras))
    return next((each for each in found if each is not None), None)


def unknown_preset(name: object, known: Iterable[str]) -> str:
    """Return why `name` is no preset of a model that has those `known`, and the presets it has."""
    known = sorted(set(known))
    found = [preset for preset in sampling_presets() if preset.name == name]
    families = sorted({preset.family for preset in found if preset.model is None})
    own = [preset.model for preset in found if preset.model is not None]
    elsewhere = [f"the embedded model {model} alone (--model-path {model}, native)" for model in own]
    elsewhere += [f"{' and '.join(families)} models"] if families else []
    if elsewhere:
        there = (
            f"this model has {', '.join(known)}" if known else "this one has none, as all pipelines of diffusers' own"
        )
        return f"preset: {shown(name)} is for {' and '.join(elsewhere)}; {there}"
    return f"preset: unknown name {shown(name)}.{nearest(name, known) or ' Neither the model nor a config has any.'}"


def _reason(folder: AnyFolder, model_path: str, where: str, wanted: Any) -> str | None:
    """Return one entry of recognised_by as a text; None where it does not hold."""
    if where == _MODEL_PATH:
        # Also of `.`; a hub id ends in its name as a path does.
        name = os.path.basename(os.path.abspath(model_path))
        return f"its name is {name}" if _fits(name, wanted) else None
    if not (folder / where).exists():
        return None
    values = read_json_in(folder, *where.split("/"))
    # A key that is left out is off, like the defaults of diffusers' classes.
    if any((values.get(key) or None) != (value or None) for key, value in wanted.items()):
        return None
    return f"{where}: {', '.join(f'{key} is {shown(value)}' for key, value in wanted.items())}"


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatch(name.lower(), pattern)


def _plain(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(f"{number:.6g}" for number in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
