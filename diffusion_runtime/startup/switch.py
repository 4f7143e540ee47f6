"""One switch for everything in a process's first seconds that could be left out: DIFFUSION_RUNTIME_STARTUP=off."""

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
