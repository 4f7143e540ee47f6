"""Guiders of diffusers: the scale of plain classifier-free guidance that a folder's guider has."""

from __future__ import annotations

from typing import Any

from diffusion_runtime.core.model_folder import (
    INDEX_FILE,
    AnyFolder,
    ConfigFile,
    component_class,
    read_index,
    read_json_in,
)
from diffusion_runtime.errors import ModelLoadError

# Settings of a guider, and their values where it is classifier-free guidance of every step and nothing else.
_PLAIN = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}


def read_guidance_scale(folder: AnyFolder, component: str = "guider") -> float | None:
    """Read the factor s of `uncond + s * (cond - uncond)` in a folder's guider; 1 for one that is off, None when the
    folder has no such component.

    Raises ModelLoadError for a guider that does something else.
    """
    if read_index(folder).get(component) in (None, [None, None]):
        return None
    _, name = component_class(folder, component)
    if name != "ClassifierFreeGuidance":
        raise ModelLoadError(
            f"{folder / INDEX_FILE}: key '{component}': expected ClassifierFreeGuidance, got {name}; this is not "
            "supported natively"
        )
    path = folder / component / "guider_config.json"
    file = ConfigFile(path, read_json_in(folder, component, "guider_config.json"))
    file.refuse_unknown((*_PLAIN, "enabled", "guidance_scale"))
    settings: dict[str, Any] = file.settings()
    for key, plain in _PLAIN.items():
        if settings.get(key, plain) != plain:
            raise file.error(key, repr(plain), settings[key])
    return file.number("guidance_scale", 7.5) if file.flag("enabled", True) else 1.0
