"""Graph of a ComfyUI workflow, of either of its two formats: nodes, and links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from diffusion_runtime.errors import ConfigError, shown_name

# The largest template has 211 nodes; a workflow of 10,000 is one that a program made.
MAX_NODES = 20_000


class WorkflowError(ConfigError):
    """A workflow file that cannot be read, or that asks for what is not supported; the message names the nodes."""


class Link(NamedTuple):
    """An output of a node that an input takes. node: its id; output: counted from 0."""

    node: str
    output: int


@dataclass(frozen=True)
class Node:
    """A node that runs. id: as ComfyUI's API has it, `105:10` for node 10 of the subgraph that node 105 stands for;
    kind: its class; inputs: values and links by name."""

    id: str
    kind: str
    title: str
    inputs: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{shown_name(self.kind)} (node {shown_name(self.id)})"


@dataclass(frozen=True)
class Graph:
    """Nodes by id: without those that are muted, and with links around those that are bypassed."""

    nodes: Mapping[str, Node]
