"""Catalogue of backends as plain values: what each can do, whether it is usable here, and which a layer gets."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from diffusion_runtime.attention.backends.capability import FEATURES, AttentionRequirements, Capability, HeadSizes
from diffusion_runtime.attention.backends.interface import Availability, Backend
from diffusion_runtime.attention.backends.packages import ImportingBackend
from diffusion_runtime.attention.backends.refusals import unaskable
from diffusion_runtime.attention.backends.registry import (
    KNOWN_NAMES,
    available_names,
    broken_backends,
    find_backend,
)
from diffusion_runtime.attention.config import AttentionConfig, AttentionSpec
from diffusion_runtime.attention.force import ForcedChoice, current_force
from diffusion_runtime.attention.roles import role_category
from diffusion_runtime.attention.select import ENVIRONMENT_VARIABLE, Decision, Levels, select
from diffusion_runtime.core.hardware import Hardware, detect_hardware
from diffusion_runtime.core.options import option_names
from diffusion_runtime.core.spellings import table_of
from diffusion_runtime.errors import ConfigError, nearest, shown
from diffusion_runtime.startup.importing import raised_line as raised_line


@dataclass(frozen=True)
class BackendInfo:
    """One backend as seen from one machine. version: None when it is not usable here; reason and fix then tell why.

    aliases: every other spelling that means it, those of peers included; capability: what this machine leaves of it;
    options: the keys it takes.
    """

    name: str
    aliases: tuple[str, ...]
    summary: str
    capability: Capability
    version: str | None
    reason: str
    fix: str
    options: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        return self.version is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; sets as sorted lists."""
        can = self.capability
        return {
            "name": self.name,
            "aliases": list(self.aliases),
            "summary": self.summary,
            "usable": self.usable,
            "version": self.version,
            "reason": self.reason,
            "fix": self.fix,
            "options": list(self.options),
            "capability": {
                "platforms": sorted(can.platforms),
                "minimum_capability": None if can.minimum_capability is None else list(can.minimum_capability),
                "maximum_capability": None if can.maximum_capability is None else list(can.maximum_capability),
                "dtypes": sorted(can.dtypes),
                "head_sizes": {
                    "minimum": can.head_sizes.minimum,
                    "maximum": can.head_sizes.maximum,
                    "multiple": can.head_sizes.multiple,
                    "only": list(can.head_sizes.only),
                },
                "features": sorted(can.features),
                "categories": sorted(can.categories),
                "key_counts": {"block": can.key_counts.block, "tolerance": can.key_counts.tolerance},
            },
        }


def select_backend(
    role: str = "self",
    *,
    head_dim: int,
    dtype: str | torch.dtype,
    device: str | torch.device | Hardware,
    num_heads: int,
    num_kv_heads: int | None = None,
    forced: Any = None,
    cli: Any = None,
    config: Any = None,
    needs: Iterable[str] = (),
) -> Decision:
    """Which backend would serve a layer, and why.

    cli, config: the choices of each level, in any form that AttentionConfig.parse takes; forced: a spec, a name or a
    mapping; an active force_attention_backend counts when `forced` is None.
    device: a Hardware value describes any machine.
    needs: features the calls use, of backends.interface.FEATURES. Raises BackendUnavailableError, ConfigError.
    """
    for feature in needs:
        if feature not in FEATURES:
            raise ConfigError(f"needs: unknown feature {shown(feature)}.{nearest(feature, FEATURES)}")
    requirements = AttentionRequirements(
        role=role,
        category=role_category(role),
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        hardware=device if isinstance(device, Hardware) else detect_hardware(str(device)),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        needs=frozenset(needs),
    )
    force = current_force() if forced is None else (ForcedChoice(AttentionSpec.parse(forced, "forced")),)
    levels = Levels(
        force, AttentionConfig.parse(cli), AttentionConfig.parse(config), os.environ.get(ENVIRONMENT_VARIABLE)
    )
    return select(requirements, levels)


def list_backends(device: str | Hardware = "auto", *, importing: bool = True) -> list[BackendInfo]:
    """Every backend this version has, with whether it runs on `device`. One that raises when asked is listed with that.

    importing: also import the packages of those that this machine can run, which finds the broken ones.
    """
    hardware = device if isinstance(device, Hardware) else detect_hardware(device)
    names = available_names()
    listed = [_describe(name, hardware, importing and hardware.is_here) for name in names]
    return listed + [_unusable(name, reason) for name, reason in broken_backends().items() if name not in names]


def option_values(name: str) -> list[dict[str, Any]]:
    """Return the options of a backend for a form: `name`, `default` as JSON has it, `choices` where it is one of some
    values. Nothing for a backend that is not there."""
    backend = find_backend(name)
    if backend is None:
        return []
    hints = get_type_hints(backend.options_type)
    rows = []
    for item in dataclasses.fields(backend.options_type):
        default = None if item.default is dataclasses.MISSING else item.default
        choices = [True, False] if hints[item.name] is bool else list(get_args(hints[item.name]))
        is_choice = hints[item.name] is bool or get_origin(hints[item.name]) is Literal
        plain = list(default) if isinstance(default, tuple) else default
        rows.append({"name": item.name, "default": plain, **({"choices": choices} if is_choice else {})})
    return rows


def missing_names() -> tuple[str, ...]:
    """Names that a choice may hold although this version has no such backend."""
    return tuple(name for name in KNOWN_NAMES if name not in available_names())


def platform_default(hardware: Hardware) -> Decision:
    """Return the default choice for a usual layer (self-attention, heads of 128, the platform's usual dtype).

    Raises BackendUnavailableError when nothing runs there.
    """
    dtype = "float32" if hardware.platform == "cpu" else "bfloat16"
    return select(AttentionRequirements("self", "self", 128, dtype, hardware, num_heads=24, num_kv_heads=24), Levels())


def usual_head_sizes(sizes: HeadSizes) -> list[int]:
    """64 and 128 where they are taken, else the smallest that is."""
    usual = [size for size in (64, 128) if size in sizes]
    return usual or [next(size for size in range(1, 4097) if size in sizes)]


def _describe(name: str, hardware: Hardware, importing: bool) -> BackendInfo:
    backend = find_backend(name)
    if backend is None:
        return _unusable(name, broken_backends()[name])
    try:
        found = _availability(backend, hardware, importing)
        return BackendInfo(
            name=name,
            aliases=_spellings(name, backend.aliases),
            summary=backend.summary,
            capability=backend.capability if found.version is None else backend.capability.on_hardware(hardware),
            version=found.version,
            reason=found.reason,
            fix=found.fix,
            options=option_names(backend.options_type),
        )
    except Exception as error:  # a package that is installed and broken may raise anything
        return _unusable(name, unaskable(backend, error))


def _unusable(name: str, reason: str) -> BackendInfo:
    """A backend of which nothing is known but why."""
    return BackendInfo(name, _spellings(name, ()), "", Capability(), None, reason, "")


def _availability(backend: Backend, hardware: Hardware, importing: bool) -> Availability:
    """Availability by chip, by packages and, with `importing`, their import; the chip first: no command changes it."""
    requirements = _usual_question(backend, hardware)
    refused = backend.capability.refusals(requirements)
    if refused:
        return Availability(None, "; ".join(refused))
    found = backend.probe(hardware)
    if found.version is not None and importing and isinstance(backend, ImportingBackend):
        return backend.imported(requirements)
    return found


def _spellings(name: str, aliases: tuple[str, ...]) -> tuple[str, ...]:
    # Those with a leading underscore are another program's inner names, and those with a remark are not quite the same:
    # accepted, not advertised.
    peers = [
        row.spelling
        for row in table_of("backend").values()
        if row.means == name and row.spelling[0] != "_" and not row.remark
    ]
    return tuple(dict.fromkeys([*aliases, *peers]))


def _usual_question(backend: Backend, hardware: Hardware) -> AttentionRequirements:
    """A call that the backend takes on its own machines: what it refuses of it, this device cannot run at all."""
    can = backend.capability.on_hardware(hardware)
    category, head_dim = min(can.categories), usual_head_sizes(can.head_sizes)[0]
    dtype = "bfloat16" if "bfloat16" in can.dtypes else min(can.dtypes)
    return AttentionRequirements(category, category, head_dim, dtype, hardware, 8, 8)
