"""Measures for the first seconds of a process, and their counts; DIFFUSION_RUNTIME_STARTUP=off turns them off."""

from __future__ import annotations

import os

from diffusion_runtime.errors import ConfigError

VARIABLE = "DIFFUSION_RUNTIME_STARTUP"


def startup_is_on() -> bool:
    """Return whether start-time measures are taken. Raises ConfigError for a value other than on and off."""
    value = os.environ.get(VARIABLE, "on")
    if value not in ("on", "off"):
        raise ConfigError(f"{VARIABLE}: expected on or off, got {value!r}")
    return value == "on"
