"""Authentication of a Ray cluster: chosen by whoever connects, never left out; known without Ray."""

from __future__ import annotations

import os

from diffusion_runtime.errors import ConfigError, shown

# The address of a cluster that is started here for one command, to which Ray itself gives a token.
LOCAL = "local"
_VARIABLE, _MODES = "RAY_AUTH_MODE", ("token", "disabled")


def check_cluster(address: str) -> None:
    """Raises ConfigError for an address that none can have, and where nobody chose how the cluster authenticates."""
    if not address or "://" in address:
        raise ConfigError(f"--ray: expected auto, local or HOST:PORT of `ray start --head`, got {shown(address)}")
    mode = os.environ.get(_VARIABLE)
    if address != LOCAL and mode not in _MODES:
        raise ConfigError(
            f"--ray: the variable {_VARIABLE} is {'not set' if mode is None else shown(mode)}, and whoever reaches a "
            f"Ray cluster runs code on it; export {_VARIABLE}=token and the cluster's RAY_AUTH_TOKEN_PATH, or "
            f"{_VARIABLE}=disabled in a network of its own"
        )
