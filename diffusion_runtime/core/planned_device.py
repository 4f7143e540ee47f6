"""Planned device: a GPU that is not in this machine, for dry runs: named (`--plan-for h100`), or any CUDA card of a
memory limit."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.core.hardware import Hardware, found_programs, installed_packages
from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.errors import ConfigError, nearest, shown

_MIB = 2**20
# An assumption, which no run measured: what the driver and a process's CUDA context take before a tensor is there.
_CONTEXT_BYTES = 600 * 10**6
# Of torch's builds for CUDA 12 and 13 since torch 2.9; a CPU build has none.
_CUDNN = (9, 10)
# Of a card that only a memory limit describes: every default of selection is the same from sm_80 to sm_90.
_ANY_CARD = (8, 0)


@dataclass(frozen=True)
class _Card:
    """memory: MiB, as nvidia-smi shows them."""

    device_name: str
    capability: tuple[int, int]
    memory: int


NAMED_CARDS = {
    "a100": _Card("NVIDIA A100 80GB", (8, 0), 81920),
    "a100-40gb": _Card("NVIDIA A100 40GB", (8, 0), 40960),
    "a10": _Card("NVIDIA A10", (8, 6), 23028),
    "3090": _Card("NVIDIA GeForce RTX 3090", (8, 6), 24576),
    "a6000": _Card("NVIDIA RTX A6000", (8, 6), 49140),
    "l4": _Card("NVIDIA L4", (8, 9), 23034),
    "l40s": _Card("NVIDIA L40S", (8, 9), 46068),
    "4080": _Card("NVIDIA GeForce RTX 4080", (8, 9), 16376),
    "4090": _Card("NVIDIA GeForce RTX 4090", (8, 9), 24564),
    "h100": _Card("NVIDIA H100 80GB HBM3", (9, 0), 81559),
    "h200": _Card("NVIDIA H200", (9, 0), 143771),
    "b200": _Card("NVIDIA B200", (10, 0), 183359),
    "5090": _Card("NVIDIA GeForce RTX 5090", (12, 0), 32607),
}


@dataclass(frozen=True)
class PlannedDevice:
    """free: bytes that a process can take there, None if a memory limit alone gives it."""

    hardware: Hardware
    free: int | None = None

    @property
    def note(self) -> str:
        """State what is assumed, in a sentence or two."""
        hardware = self.hardware
        packages = ", ".join(f"{name} {version}" for name, version in hardware.packages.items()) or "none"
        free = "" if self.free is None else f", {size_text(self.free)} free"
        cudnn = "" if hardware.cudnn is None else f" with cuDNN {'.'.join(map(str, hardware.cudnn))}"
        return (
            f"Planned for {hardware.device_name} ({hardware.describe()}){free}, which is not here. Assumed there: this "
            f"torch in a CUDA build{cudnn}, and the packages of this machine that compute attention ({packages}), none "
            "of them broken; nothing is known of the memory of the machine around it."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, bytes."""
        hardware = self.hardware
        return {
            "device_name": hardware.device_name,
            "capability": None if hardware.capability is None else list(hardware.capability),
            "free": self.free,
            "packages": dict(hardware.packages),
            "assumed": self.note,
        }


def named_device(name: str) -> PlannedDevice:
    """Return the card of NAMED_CARDS. Raises ConfigError for any other name."""
    card = NAMED_CARDS.get(name.lower())
    if card is None:
        raise ConfigError(
            f"plan_for: expected {', '.join(NAMED_CARDS)}, got {shown(name)}.{nearest(name.lower(), NAMED_CARDS)} Of "
            "any other card, --device cuda --memory-limit 24GB says enough on a machine without one"
        )
    return PlannedDevice(_hardware(card.device_name, card.capability), card.memory * _MIB - _CONTEXT_BYTES)


def any_card() -> PlannedDevice:
    """Return a CUDA card of which only a memory limit is known."""
    return PlannedDevice(_hardware("a CUDA card from sm_80 to sm_90", _ANY_CARD))


def _hardware(device_name: str, capability: tuple[int, int]) -> Hardware:
    version = importlib.metadata.version("torch").partition("+")[0]
    return Hardware("cuda", device_name, capability, _CUDNN, version, installed_packages(), found_programs())
