"""Offloading of a loaded model: which of its parts are on the device now."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from diffusion_runtime.memory.offloaded_part import OffloadedPart
from diffusion_runtime.memory.plan import MACHINE, NUM_SLOTS, MemoryPlan
from diffusion_runtime.memory.transfers import Transfers
from diffusion_runtime.memory.weight_unit import WeightHome


class Reloaded(Protocol):
    """A part that is loaded again when it is needed, such as a text encoder that waits in its files."""

    @property
    def is_on_device(self) -> bool: ...

    def enter(self) -> None: ...

    def leave(self) -> None: ...


class Offloading:
    """The offloaded parts of one model. One of them is on the device at a time: the text encoders together, or one
    transformer."""

    def __init__(self, plan: MemoryPlan, transfers: Transfers) -> None:
        self.plan = plan
        self._transfers = transfers
        self._seconds = 0.0
        self._text: list[OffloadedPart] = []
        self._transformers: list[OffloadedPart] = []
        self._reloaded: list[Reloaded] = []

    @property
    def parts(self) -> tuple[OffloadedPart, ...]:
        return (*self._text, *self._transformers)

    def add_text_encoder(self, module: nn.Module, home: WeightHome, layers: Sequence[nn.Module]) -> None:
        """Add a text encoder with its tensors in `home`. Call `use_text_encoders` before calling it. layers: those of
        it that are streamed if the plan streams it, in their order; none for an encoder that is always whole."""
        resident = self.plan.resident.get(self.plan.demand.text.name)
        self._text.append(self._part(self.plan.demand.text.name, module, home, resident, layers))

    def add_reloaded_text_encoder(self, part: Reloaded) -> None:
        """Add a text encoder that waits in its files. Call `use_text_encoders` before calling it."""
        self._reloaded.append(part)

    def add_transformer(self, component: str, module: nn.Module, home: WeightHome) -> None:
        """Add a transformer with its tensors in `home`. It is moved to the device when it is called."""
        part = self._part(component, module, home, self.plan.resident.get(component))
        self._transformers.append(part)
        module.register_forward_pre_hook(lambda *_: self._use([part]))

    def use_text_encoders(self) -> None:
        self._use([*self._text, *self._reloaded])

    def leave_text_encoders(self) -> None:
        """They are done: what comes next, such as the encoder of an image, is planned without them."""
        for part in (*self._text, *self._reloaded):
            part.leave()

    def adopt(self, plan: MemoryPlan) -> None:
        """Adopt another plan of the same kind, as for a larger request: other numbers of blocks stay on the device."""
        assert (plan.offload, plan.waits_in_files) == (self.plan.offload, self.plan.waits_in_files)
        self.leave()
        for part in self.parts:
            part.arrange(plan.resident.get(part.name))
        self.plan = plan

    def leave(self) -> None:
        """Take every part from the device: the weights may be changed where they are then."""
        for part in (*self.parts, *self._reloaded):
            part.leave()

    def close(self) -> None:
        """Give all memory back. What was offloaded must not be called any more."""
        self.leave()
        for part in self.parts:
            part.close()

    def report(self, note: Callable[[str], object]) -> dict[str, float]:
        """Say what was offloaded and how, once a generation has its latents, and make room for the decoder. Returns the
        seconds in which whole parts were brought to the device, a part of the text's and of the denoising's."""
        in_files = self.plan.waits_in_files
        where = ", what waits is read from its files" if in_files else ""
        note(f"offload: {self.plan.offload} ({self.plan.reason}){where}")
        for part in self.parts:
            if part.stream is not None:
                note(
                    f"offload: {part.name}: {part.stream.num_blocks} of {part.num_blocks} blocks streamed"
                    f"{' from files' if in_files else ''}, {part.stream.num_copies} copies so far, "
                    f"{part.stream.num_late_copies} of them not ahead"
                )
        if self.plan.whole_text:
            note(f"offload: {self.plan.demand.text.name}: {self.plan.whole_text}")
        if not self.plan.keeps_transformer:
            self.leave()
        seconds, self._seconds = self._seconds, 0.0
        return {"move": seconds}

    def _part(
        self,
        name: str,
        module: nn.Module,
        home: WeightHome,
        num_resident: int | None,
        blocks: Sequence[nn.Module] | None = None,
    ) -> OffloadedPart:
        home.pin(self._transfers.register, self._transfers.unregister)
        num_slots = MACHINE.num_slots if self.plan.waits_in_files else NUM_SLOTS
        return OffloadedPart(name, module, home, self._transfers, num_resident, num_slots, blocks)

    def _use(self, parts: Sequence[OffloadedPart | Reloaded]) -> None:
        if all(part.is_on_device for part in parts):
            return
        for part in (*self.parts, *self._reloaded):
            if part not in parts:
                part.leave()
        started = time.perf_counter()
        # Outside of inference mode: tensors made in it could not be written to later.
        with torch.inference_mode(False), torch.no_grad():
            for part in parts:
                part.enter()
        self._transfers.synchronize()
        self._seconds += time.perf_counter() - started
