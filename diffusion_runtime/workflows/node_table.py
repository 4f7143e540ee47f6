"""Every class of nodes that is understood, by name; what is not here is not supported."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from diffusion_runtime.workflows import (
    condition_nodes,
    guidance_nodes,
    latent_nodes,
    loader_nodes,
    picture_nodes,
    plain_nodes,
    sampling_nodes,
    scail_nodes,
)
from diffusion_runtime.workflows.evaluation import NodeClass

_MODULES = (
    plain_nodes,
    loader_nodes,
    condition_nodes,
    picture_nodes,
    latent_nodes,
    guidance_nodes,
    sampling_nodes,
    scail_nodes,
)
TABLE: Mapping[str, NodeClass] = MappingProxyType(
    {name: each for module in _MODULES for name, each in module.TABLE.items()}
)
