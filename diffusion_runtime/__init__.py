"""diffusion_runtime: video and image generation in which attention is chosen, never guessed.

The names below are the public API; each is imported when it is first used, so that importing the package is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusion_runtime.attention.config import AttentionConfig, AttentionSpec
    from diffusion_runtime.attention.force import force_attention_backend, global_force_attn_backend
    from diffusion_runtime.cli.script_flags import parse_flags
    from diffusion_runtime.config import RuntimeConfig
    from diffusion_runtime.diffusers_bridge.attach import attach
    from diffusion_runtime.errors import (
        BackendUnavailableError,
        BatchFailedError,
        Cancelled,
        ConfigError,
        DeviceMemoryError,
        DiffusionRuntimeError,
        MissingPackageError,
        ModelLoadError,
        OutputError,
        PipelineBusyError,
        PipelineClosedError,
        RequestError,
        ThirdPartyError,
        UsageError,
    )
    from diffusion_runtime.loading import load_pipeline
    from diffusion_runtime.media import GeneratedMedia
    from diffusion_runtime.models.video_restoration import upscale_request
    from diffusion_runtime.pipeline import Pipeline
    from diffusion_runtime.request.generation_request import GenerationRequest
    from diffusion_runtime.serving.client import Client
    from diffusion_runtime.session.following import follow, lead
    from diffusion_runtime.session.processes import join_processes

__version__ = "0.1.0"

_HOMES = {
    "AttentionConfig": "attention.config",
    "AttentionSpec": "attention.config",
    "BackendUnavailableError": "errors",
    "BatchFailedError": "errors",
    "MissingPackageError": "errors",
    "PipelineClosedError": "errors",
    "ThirdPartyError": "errors",
    "Cancelled": "errors",
    "DiffusionRuntimeError": "errors",
    "RequestError": "errors",
    "PipelineBusyError": "errors",
    "DeviceMemoryError": "errors",
    "Client": "serving.client",
    "ConfigError": "errors",
    "GeneratedMedia": "media",
    "GenerationRequest": "request.generation_request",
    "ModelLoadError": "errors",
    "OutputError": "errors",
    "Pipeline": "pipeline",
    "RuntimeConfig": "config",
    "UsageError": "errors",
    "attach": "diffusers_bridge.attach",
    "follow": "session.following",
    "force_attention_backend": "attention.force",
    "global_force_attn_backend": "attention.force",
    "join_processes": "session.processes",
    "lead": "session.following",
    "load_pipeline": "loading",
    "parse_flags": "cli.script_flags",
    "upscale_request": "models.video_restoration",
}

__all__ = [
    "AttentionConfig",
    "AttentionSpec",
    "BackendUnavailableError",
    "BatchFailedError",
    "Cancelled",
    "Client",
    "ConfigError",
    "DeviceMemoryError",
    "DiffusionRuntimeError",
    "GeneratedMedia",
    "GenerationRequest",
    "MissingPackageError",
    "ModelLoadError",
    "OutputError",
    "Pipeline",
    "PipelineBusyError",
    "PipelineClosedError",
    "RequestError",
    "RuntimeConfig",
    "ThirdPartyError",
    "UsageError",
    "__version__",
    "attach",
    "follow",
    "force_attention_backend",
    "global_force_attn_backend",
    "join_processes",
    "lead",
    "load_pipeline",
    "parse_flags",
    "upscale_request",
]


def __getattr__(name: str) -> object:
    """A public name. Raises AttributeError for any other, and ImportError with what to write instead for the names of
    other projects: `from diffusion_runtime import ServerArgs` would drop the text of an AttributeError."""
    if name not in _HOMES:
        if not name.startswith("_"):
            from diffusion_runtime.core.spellings import resolve

            theirs = resolve("name", name)
            if theirs is not None and theirs.means:
                return getattr(importlib.import_module("diffusion_runtime"), theirs.means)
            if theirs is not None:
                raise ImportError(f"diffusion_runtime has no {theirs.refusal}")
        raise AttributeError(f"module 'diffusion_runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(f"diffusion_runtime.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
