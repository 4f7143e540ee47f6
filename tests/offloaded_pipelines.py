"""Tiny pipelines whose weights are offloaded to a stand-in for a device: memory of the CPU with strict transfers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from diffusion_runtime import Pipeline, RuntimeConfig
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.memory.plan import MemoryPlan
from diffusion_runtime.memory.transfers import Copies, Transfers


class StrictTransfers(Transfers):
    """Hides the weights in the machine's memory: its tensors hold NaN there, so that whoever reads a weight that is not
    on the device computes NaN.

    num_copies: begun so far; fails_at: which of them is interrupted. pins: addresses that are pinned now; refuses_pins:
    as a system without the right.
    """

    def __init__(self, *, refuses_pins: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self.pins: dict[int, int] = {}
        self.refuses_pins = refuses_pins
        self.fails_at: int | None = None
        self._hidden: dict[int, torch.Tensor] = {}
        self.num_copies = 0

    def hide(self, arena_bytes: torch.Tensor) -> None:
        self._hidden[arena_bytes.data_ptr()] = arena_bytes.clone()
        arena_bytes.fill_(0xFF)

    def mark(self) -> Any:
        return "mark"

    def copy(self, copies: Copies, after: Any) -> Any:
        assert after == "mark", "a copy must stand behind what computes"
        self.num_copies += 1
        if self.num_copies == self.fails_at:
            raise KeyboardInterrupt
        for target, source in copies:
            begin = max(address for address in self._hidden if address <= source.data_ptr())
            offset = source.data_ptr() - begin
            target.copy_(self._hidden[begin][offset : offset + source.nbytes])
        return self.num_copies

    def wait(self, copied: Any) -> None:
        assert isinstance(copied, int)

    def register(self, address: int, num_bytes: int) -> str | None:
        if self.refuses_pins:
            return "the system says no"
        self.pins[address] = num_bytes
        return None

    def unregister(self, address: int) -> None:
        del self.pins[address]


def planned(
    prepared: PreparedModel, offload: str, resident: Mapping[str, int], *, waits_in_files: bool = False
) -> PreparedModel:
    """With a plan that offloads as asked, whatever fits."""
    found = prepared.planned_for(())
    plan = found.description.memory
    assert isinstance(plan, MemoryPlan)
    plan = dataclasses.replace(
        plan,
        offload=offload,
        resident=dict(resident),
        keeps_transformer=False,
        reason="of a test",
        waits_in_files=waits_in_files,
    )
    return dataclasses.replace(found, description=dataclasses.replace(found.description, memory=plan))


def load_offloaded(
    folder: str, offload: str, resident: Mapping[str, int], transfers: Transfers, **values: Any
) -> Pipeline:
    """A pipeline on the CPU whose device is what `transfers` makes of it."""
    prepared = prepare(RuntimeConfig(model_path=folder, device="cpu", **values))
    assert isinstance(prepared, PreparedModel)
    return planned(prepared, offload, resident).load(transfers=transfers)
