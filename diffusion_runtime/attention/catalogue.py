"""What each backend can do and whether it is usable here, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.attention.backends.interface import Capability
from diffusion_runtime.attention.backends.registry import available_names, find_backend
from diffusion_runtime.hardware import Hardware, detect_hardware


@dataclass(frozen=True)
class BackendInfo:
    """One backend as seen from one machine. version: None when it is not usable here; reason and fix then say why."""

    name: str
    aliases: tuple[str, ...]
    summary: str
    capability: Capability
    version: str | None
    reason: str
    fix: str

    @property
    def usable(self) -> bool:
        return self.version is not None


def list_backends(device: str | Hardware = "auto") -> list[BackendInfo]:
    """Every backend this version has, with whether it runs on `device`."""
    hardware = device if isinstance(device, Hardware) else detect_hardware(device)
    listed = []
    for name in available_names():
        backend = find_backend(name)
        assert backend is not None
        found = backend.probe(hardware)
        version, reason = found.version, found.reason
        if hardware.platform not in backend.capability.platforms:
            version, reason = None, f"does not run on {hardware.platform}"
        listed.append(
            BackendInfo(name, backend.aliases, backend.summary, backend.capability, version, reason, found.fix)
        )
    return listed
