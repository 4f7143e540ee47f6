"""diffusion_runtime: video and image generation in which attention is chosen, never guessed.

The names below are the public API; each is imported when it is first used, so that importing the package is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusion_runtime.attention.config import AttentionConfig, AttentionSpec
    from diffusion_runtime.attention.force import force_attention_backend
    from diffusion_runtime.config import RuntimeConfig
    from diffusion_runtime.diffusers_bridge.attach import attach
    from diffusion_runtime.errors import (
        BackendUnavailableError,
        Cancelled,
        DiffusionRuntimeError,
        ModelLoadError,
        OutputError,
        UsageError,
    )
    from diffusion_runtime.loading import load_pipeline
    from diffusion_runtime.media import GeneratedMedia
    from diffusion_runtime.pipeline import Pipeline
    from diffusion_runtime.request import GenerationRequest
    from diffusion_runtime.session.following import follow, lead
    from diffusion_runtime.session.processes import join_processes

__version__ = "0.1.0"

_HOMES = {
    "AttentionConfig": "attention.config",
    "AttentionSpec": "attention.config",
    "BackendUnavailableError": "errors",
    "Cancelled": "errors",
    "DiffusionRuntimeError": "errors",
    "GeneratedMedia": "media",
    "GenerationRequest": "request",
    "ModelLoadError": "errors",
    "OutputError": "errors",
    "Pipeline": "pipeline",
    "RuntimeConfig": "config",
    "UsageError": "errors",
    "attach": "diffusers_bridge.attach",
    "follow": "session.following",
    "force_attention_backend": "attention.force",
    "join_processes": "session.processes",
    "lead": "session.following",
    "load_pipeline": "loading",
}

__all__ = [
    "AttentionConfig",
    "AttentionSpec",
    "BackendUnavailableError",
    "Cancelled",
    "DiffusionRuntimeError",
    "GeneratedMedia",
    "GenerationRequest",
    "ModelLoadError",
    "OutputError",
    "Pipeline",
    "RuntimeConfig",
    "UsageError",
    "__version__",
    "attach",
    "follow",
    "force_attention_backend",
    "join_processes",
    "lead",
    "load_pipeline",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'diffusion_runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(f"diffusion_runtime.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
