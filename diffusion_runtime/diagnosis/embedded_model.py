"""Integrity check of the embedded model: every part is loaded on the CPU, as a generation loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.self_test import quiet_log
from diffusion_runtime.diagnosis.problems import Problem
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.models.model_sources import EMBEDDED, EMBEDDED_FOLDER
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.startup.importing import raised_line


@dataclass(frozen=True)
class ModelCheck:
    """num_bytes: of its weight files; num_parameters: of its transformer; error: why it cannot be used, else empty;
    was_run: False when the check was skipped, because it would have ended this process."""

    folder: str
    num_bytes: int
    num_parameters: int
    error: str = ""
    was_run: bool = True

    @property
    def state(self) -> str:
        """`whole`, `damaged` or `not looked at`."""
        if not self.was_run:
            return "not looked at"
        return "damaged" if self.error else "whole"

    def to_dict(self) -> dict[str, str | int]:
        return {
            "name": EMBEDDED,
            "state": self.state,
            "folder": self.folder,
            "num_bytes": self.num_bytes,
            "num_parameters": self.num_parameters,
            "error": self.error,
        }


def check_model(folder: Path = EMBEDDED_FOLDER) -> ModelCheck:
    """Open every file of a model folder: each tensor that is expected must be there, of its shape and finite."""
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    num_parameters = 0
    try:
        device, dtype = torch.device("cpu"), torch.float32
        model = family_for_folder(folder).describe(folder)
        model.load_text_encoder(device, dtype)
        # No choice of the user's may keep the files from being looked at.
        policy = AttentionPolicy(device="cpu", dtype=dtype, environment=None, forced=())
        with quiet_log():
            empty = model.build_transformer(policy)
        transformer = model.load_transformer(empty, device, dtype)
        model.load_decoder(device, dtype)
        state: Mapping[str, torch.Tensor] = transformer.state_dict()
        num_parameters = sum(tensor.numel() for tensor in state.values())
        damaged = [name for name, tensor in state.items() if not torch.isfinite(tensor).all()]
        error = f"numbers that are not finite in {', '.join(damaged[:3])}" if damaged else ""
    except DiffusionRuntimeError as raised:
        error = str(raised)
    except Exception as raised:  # any exception: a broken diffusers or transformers may raise anything
        error = raised_line(raised)
    return ModelCheck(str(folder), num_bytes, num_parameters, error)


def model_problems(check: ModelCheck) -> list[Problem]:
    if not check.error:
        return []
    what = f"the embedded model cannot be loaded: {check.error}"
    fix = f"in a clone: git checkout -- {check.folder}; else: pip install --force-reinstall --no-deps CLONE_OR_WHEEL"
    return [Problem(what, fix, is_failure=True)]
