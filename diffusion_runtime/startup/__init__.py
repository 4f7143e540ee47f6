"""Measures for the first seconds of a process, which switch.py turns off together, and their counts."""

import os

from diffusion_runtime.errors import ConfigError

VARIABLE = "DIFFUSION_RUNTIME_STARTUP"


def startup_is_on() -> bool:
    """Return whether start-time measures are taken. Raises ConfigError for a value other than on and off."""
    value = os.environ.get(VARIABLE, "on")
    if value not in ("on", "off"):
        raise ConfigError(f"{VARIABLE}: expected on or off, got {value!r}")
    return value == "on"
