"""Engine interface: what holds a loaded model, in a process of this machine or of another one, and takes lines of JSON.

An engine sends `hello` with its `versions` first, `alive` every few seconds, and the messages of `engine.py`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from diffusion_runtime.errors import DiffusionRuntimeError

OnMessage: TypeAlias = "Callable[[dict[str, Any]], None]"
# Seconds between two signs of life of an engine, and after how many without one it is replaced.
BEAT_SECONDS, SILENT_SECONDS = 2.0, 60.0
_PACKAGES = ("torch", "diffusers", "transformers")


class EngineLost(DiffusionRuntimeError):
    """An engine that ended, and with it what it was asked."""


class Refused(DiffusionRuntimeError):
    """An engine's refusal of a question. details: as `engine.described` has them."""

    def __init__(self, details: Mapping[str, Any]) -> None:
        super().__init__(str(details.get("message")))
        self.details = details


class Engine(Protocol):
    """One engine, from its start to its end."""

    async def run(self) -> int:
        """Start it, pass on its messages until it ends, and return its exit code."""

    async def ask(self, kind: str, work: Mapping[str, Any]) -> Any:
        """Return the answer to a question: `check` or `explain`. Raises Refused, and EngineLost where the engine ends
        before it answers."""

    def send(self, kind: str, /, **values: Any) -> None:
        """Send one message. Raises EngineLost where nobody is there to read it."""

    def kill(self) -> None:
        """End it and all its processes, at once: it hangs, or another one is to take its place."""

    def release(self) -> None:
        """Let go of it: nothing more is asked of it."""


class Engines(Protocol):
    """The place where the engines of a server run. max_starts: engines in a row of one replica that may end before they
    are of use; after those it has failed."""

    max_starts: int

    async def connect(self) -> None:
        """Find or make what the engines run on. Raises ConfigError."""

    def engine(self, index: int, given: Mapping[str, Any], on_message: OnMessage) -> Engine:
        """Return an engine that has not begun. index: of its replica; given: its `config.json`; on_message: called with
        every message that is no answer to `ask`."""

    async def close(self) -> None:
        """Let go of it; what runs has ended."""


def batch_size(asked: int | None, card: Mapping[str, Any]) -> int:
    """Return how many requests run together: what was asked for, else 4, or 1 on a CPU. There a batch takes 0.6 to 0.8
    of the time of single runs, and rounds otherwise: prompts of unequal lengths change 1 value in 1000 by 1 of 255.

    card: as of ServedModel.card.
    """
    return asked or (1 if card.get("device") == "cpu" else 4)


def versions() -> dict[str, str]:
    """Return what must be equal in a server and its engines, or the same request has other bytes. Builds of one
    version, such as 2.13.0+cu130, count as equal. Imports none of the packages."""
    found = {
        "diffusion_runtime": str(importlib.import_module("diffusion_runtime").__version__),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def skew(theirs: Mapping[str, str]) -> str | None:
    """Return how the versions of an engine differ from this server's, None where they are equal."""
    ours = versions()
    differing = [
        f"{name} {theirs.get(name, 'none')} instead of {ours.get(name, 'none')}"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    if not differing:
        return None
    return f"version skew: it runs {', '.join(differing)}; install the server's versions there, or restart the server"
