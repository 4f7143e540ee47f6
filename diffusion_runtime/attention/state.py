"""What attention keeps during one request."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

from diffusion_runtime.step_info import LayerInfo, StepInfo

T = TypeVar("T")


class AttentionState:
    """What a backend keeps between the steps of one request; it dies with the request.

    Keys hold the expert, the layer, the guidance branch and a name of the backend's own, so that two branches,
    two experts or two requests never share a value.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, object] = {}
        self._said: set[str] = set()

    def get_or_create(self, name: str, layer: LayerInfo, step: StepInfo, create: Callable[[], T]) -> T:
        """The value kept under `name` for this expert, layer and branch; made with `create` when there is none."""
        key = self._key(name, layer, step)
        if key not in self._values:
            self._values[key] = create()
        return cast(T, self._values[key])

    def is_first(self, what: str) -> bool:
        """Whether `what` is asked for the first time in this request: for what is to be said once."""
        if what in self._said:
            return False
        self._said.add(what)
        return True

    def put(self, name: str, layer: LayerInfo, step: StepInfo, value: object) -> None:
        """Keep `value` under `name` for this expert, layer and branch."""
        self._values[self._key(name, layer, step)] = value

    @staticmethod
    def _key(name: str, layer: LayerInfo, step: StepInfo) -> Hashable:
        return (name, step.expert, layer.index, layer.role, step.branch)
