"""Coordinator: rank 0 writes, and all ranks agree on success or failure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from diffusion_runtime.parallel.failure import note_growing_file
from diffusion_runtime.session.failures import Failure

if TYPE_CHECKING:
    from diffusion_runtime.parallel.world import World

Made = TypeVar("Made")


class Coordinator(ABC):
    """world: the processes of the run; None for one alone."""

    world: World | None = None

    @property
    @abstractmethod
    def is_first(self) -> bool:
        """True if this process writes files and results."""

    @abstractmethod
    def agree(self, error: Exception | None) -> Failure | None:
        """Return the failure that all ranks agree on, or None. error: what this rank met, None for success."""

    @abstractmethod
    def from_first(self, make: Callable[[], str]) -> str:
        """Return on every rank what `make` returns on rank 0; only rank 0 calls it."""

    def note_growing_file(self, path: Path) -> None:  # noqa: B027 - one process alone reports its own end
        """Note a file that the first process writes while it is made, the same on all; the process, or launcher, that
        reports why the run ended names it."""

    def attempt(self, work: Callable[[], Made]) -> tuple[Made | None, Failure | None]:
        """Return the result of `work`, or the failure; the same on all processes."""
        try:
            result = work()
        except Exception as error:  # whatever it is, other items are still wanted
            return None, self.agree(error)
        return result, self.agree(None)

    def path_from_first(self, make: Callable[[], Path]) -> Path:
        return Path(self.from_first(lambda: str(make())))


class SingleProcessCoordinator(Coordinator):
    """One process."""

    @property
    def is_first(self) -> bool:
        return True

    def agree(self, error: Exception | None) -> Failure | None:
        return None if error is None else Failure.of(error)

    def from_first(self, make: Callable[[], str]) -> str:
        return make()


class MultiProcessCoordinator(Coordinator):
    """One of several processes. An error that only some of them meet ends the run: RunEnded is raised."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.world = world
        self.growing_file: Path | None = None

    @property
    def is_first(self) -> bool:
        return self._world.is_first

    def agree(self, error: Exception | None) -> Failure | None:
        agreed = self._world.agree(None if error is None else self._world.failure_of(error))
        return None if agreed is None else Failure(agreed.kind, agreed.message, agreed.exit_code, agreed.trace)

    def from_first(self, make: Callable[[], str]) -> str:
        return self._world.from_first(make)

    def note_growing_file(self, path: Path) -> None:
        self.growing_file = path
        if self._world.place.error_file is not None:
            note_growing_file(self._world.place.error_file, path)
