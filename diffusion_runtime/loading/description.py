"""Dry run: what a RuntimeConfig leads to, known from json alone: the model, its rules, and the attention of every
layer."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.select import Decision
from diffusion_runtime.attention.self_check import SelfCheck
from diffusion_runtime.config import Degrees, RuntimeConfig
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.core.planned_device import PlannedDevice
from diffusion_runtime.core.software import made_with
from diffusion_runtime.diffusers_bridge.dispatcher_names import dispatcher_name
from diffusion_runtime.diffusers_bridge.request_rules import PassthroughRules
from diffusion_runtime.memory.plan import MemoryPlan
from diffusion_runtime.models.lora_sources import recorded_loras
from diffusion_runtime.models.part_files import named_components
from diffusion_runtime.models.weight_fingerprint import (
    Fingerprints,
    fingerprint,
    folder_fingerprint,
    weight_bytes,
    weight_fingerprints,
)
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.rules.request_rules import RequestRules
from diffusion_runtime.weights.cached_folder import commit_of


@dataclass(frozen=True)
class PlannedAttention:
    """The attention of some layers of a role. when: `always`, or the steps a schedule rule holds for."""

    role: str
    when: str
    layers: tuple[int, ...]
    decision: Decision

    def to_dict(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "when": self.when,
            "layers": list(self.layers),
            **_decision_values(self.decision),
        }


@dataclass(frozen=True)
class PipelineDescription:
    """The result of a dry run: what a RuntimeConfig leads to, known without any weight.

    model_folder: opened; family: its architecture; device, dtype: where and in what it would run. rules: its request
    defaults, presets and sizes. attention: every choice, by role, layers and steps. libraries: components whose
    attention is their library's own. degrees: how processes share the work. self_checks: of the chosen backends, as far
    as they are run or cached. quantization: how many linear layers have 8-bit weights, or which components are
    dequantised, None for none.
    memory: what it takes, None where nobody planned it. planned_on: the device where it is not in this machine.
    """

    config: RuntimeConfig
    model_folder: ModelFolder
    family: str
    device: str
    dtype: str
    rules: RequestRules | PassthroughRules
    attention: tuple[PlannedAttention, ...]
    libraries: tuple[LibraryAttention, ...]
    degrees: Degrees = dataclasses.field(default_factory=Degrees)
    self_checks: tuple[SelfCheck, ...] = ()
    quantization: str | None = None
    memory: MemoryPlan | None = None
    planned_on: PlannedDevice | None = None

    @property
    def folder(self) -> Path:
        """The folder of the model."""
        return self.model_folder.path

    @property
    def is_offloaded(self) -> bool:
        """True where weights would wait in the machine's memory."""
        return (self.config.offload if self.memory is None else self.memory.offload) in ("model", "layers")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a recipe keeps them: `runtime` (RuntimeConfig fields), `model`, `weights` (fingerprints of
        the files that `runtime` and `attention` name), `weight_bytes` (sizes of such files), `attention`, `version`,
        `made_with` (versions of libraries, and the processor)."""
        plain = dataclasses.replace(self.config, attention=None, attention_override=None)
        commit = commit_of(self.folder)
        levels = {"attention": self.config.attention, "attention_override": self.config.attention_override}
        parsed = {name: self._recorded(given) for name, given in levels.items()}
        return {
            "version": str(importlib.import_module("diffusion_runtime").__version__),
            "runtime": {
                **dataclasses.asdict(plain),
                **parsed,
                "lora": recorded_loras(plain.lora),
                "models_dir": list(plain.models_dir),
                "quantization_ignored_layers": list(plain.quantization_ignored_layers),
            },
            "model": {
                "path": self.config.model_path,
                **({} if commit is None else {"commit": commit}),
                "family": self.family,
                "config_sha256": self.model_folder.digest,
                "device": self.device,
                "dtype": self.dtype,
            },
            **({"weights": weights} if (weights := self._fingerprints(commit)) else {}),
            **({"weight_bytes": sizes} if (sizes := weight_bytes(self.config)) else {}),
            "attention": [planned.to_dict() for planned in self.attention],
            **({} if self.planned_on is not None else {"made_with": made_with(self.device)}),
            **({} if self.degrees.num_processes == 1 else {"parallel": self.degrees.to_dict()}),
        }

    def _fingerprints(self, commit: str | None) -> Fingerprints:
        """Fingerprints of the folder's weights, of those that the config names, and of files that options of attention
        name. A commit of the hub says what its weights are."""
        options = [item for planned in self.attention for item in planned.decision.options.items()]
        files = sorted({str(value) for name, value in options if name.endswith("_file_path") and value is not None})
        of_attention: Fingerprints = {"attention": [fingerprint(Path(file)) for file in files]} if files else {}
        own = folder_fingerprint(self.model_folder, named_components(self.config)) if commit is None else None
        of_folder: Fingerprints = {} if own is None else {"model_path": own}
        return {**of_folder, **weight_fingerprints(self.config), **of_attention}

    def _recorded(self, given: Any) -> Any:
        """A level's choices as plain values; a name of diffusers' is kept as it is where diffusers reads it."""
        if given is None:
            return None
        is_theirs = isinstance(self.rules, PassthroughRules) and dispatcher_name(given) is not None
        return given if is_theirs else AttentionConfig.parse(given).to_dict()


def planned_attention(layers: Iterable[AttentionLayer]) -> tuple[PlannedAttention, ...]:
    """One row per role and decision, in the order in which layers run."""
    rows: list[PlannedAttention] = []
    for layer in layers:
        for when, decision in layer.decisions.possible:
            for index, row in enumerate(rows):
                if (row.role, row.when, row.decision) == (layer.layer.role, when, decision):
                    rows[index] = dataclasses.replace(
                        row, layers=tuple(dict.fromkeys((*row.layers, layer.layer.index)))
                    )
                    break
            else:
                rows.append(PlannedAttention(layer.layer.role, when, (layer.layer.index,), decision))
    return tuple(rows)


def _decision_values(decision: Decision) -> dict[str, Any]:
    """dense: the backend of the dense calls of a sparse backend; absent for every other backend."""
    return {
        "backend": decision.backend,
        "options": dict(decision.options),
        "source": decision.source,
        "reason": decision.reason,
        "rejected": [list(pair) for pair in decision.rejected],
        **({} if decision.dense is None else {"dense": _decision_values(decision.dense)}),
    }
