"""LoraSwitch: other LoRA files for a loaded transformer, without loading it again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch

from diffusion_runtime.config import LoraConfig
from diffusion_runtime.weights.checkpoint import WeightChange
from diffusion_runtime.weights.lora.binding import Lora, LoraTarget, bind_files

RunAlike: TypeAlias = Callable[[str, Callable[[], None]], None]


class Rewrite(Protocol):
    """TransformerWeights.rewrite, for one transformer."""

    def __call__(
        self,
        changed: Mapping[str, Collection[str]],
        changes: Sequence[WeightChange],
        kept: Mapping[str, dict[str, torch.Tensor]],
    ) -> None: ...


def _run_alone(_: str, work: Callable[[], None]) -> None:
    work()


def _nothing(_: Sequence[WeightChange]) -> None:
    pass


class LoraSwitch:
    """The LoRA files of a loaded transformer.

    loras: those that are merged into it. The first switch reads the weights of the layers concerned from the model's
    folder and keeps them on the CPU, as they are in the files; from then on nothing is read but LoRA files. The result
    is bit for bit what loading the model with those files gives. run_alike: World.run_alike of the processes that run
    the model together, so that none of them has other files than the others. rewrite_text: gives the text encoders
    other changes; it reads their weights from the model's folder each time.
    """

    def __init__(
        self,
        rewrite: Rewrite,
        target: LoraTarget,
        loras: Sequence[Lora] = (),
        run_alike: RunAlike = _run_alone,
        rewrite_text: Callable[[Sequence[WeightChange]], None] = _nothing,
    ) -> None:
        self.loras = tuple(loras)
        self._rewrite = rewrite
        self._rewrite_text = rewrite_text
        self._target = target
        self._run_alike = run_alike
        self._kept: dict[str, dict[str, torch.Tensor]] = {component: {} for component in target.shapes}

    def switch(self, configs: Sequence[LoraConfig]) -> None:
        """These files instead of those before; none for the model alone.

        Raises what loading them raises, and leaves the transformer as it was.
        """
        self._run_alike(json.dumps([dataclasses.asdict(config) for config in configs]), lambda: self._switch(configs))

    def _switch(self, configs: Sequence[LoraConfig]) -> None:
        wanted = bind_files(configs, self._target)
        changed = {
            component: frozenset().union(*(lora.changed(component) for lora in (*self.loras, *wanted)))
            for component in self._target.shapes
        }
        has_text = any(not lora.changes.keys() <= changed.keys() for lora in (*self.loras, *wanted))
        rewrite_text = self._rewrite_text if has_text else _nothing
        try:
            self._rewrite(changed, wanted, self._kept)
            rewrite_text(wanted)
        except BaseException:
            self._rewrite(changed, self.loras, self._kept)
            rewrite_text(self.loras)
            raise
        self.loras = wanted
