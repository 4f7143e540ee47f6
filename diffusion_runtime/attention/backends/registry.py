"""Backend registry: names and the spellings of other projects, our backends, and those that packages register or
publish as entry points. Case and `-`/`_` in a name do not matter."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
from collections.abc import Callable
from typing import TypeVar

from diffusion_runtime.attention.backends.capability import FEATURES
from diffusion_runtime.attention.backends.interface import Backend
from diffusion_runtime.core.spellings import Spelling, resolve, table_of
from diffusion_runtime.errors import ConfigError, did_you_mean, nearest, shown
from diffusion_runtime.startup.importing import raised_line

# Names may be known here before this version has the backend: choosing it then fails with that reason.
KNOWN_NAMES = (
    "fa",
    "fa2",
    "fa3",
    "fa4",
    "torch_sdpa",
    "cudnn_attn",
    "flashinfer_attn",
    "sage_attn",
    "sage_attn_3",
    "xformers",
    "flex_attn",
    "aiter",
    "sliding_tile_attn",
    "video_sparse_attn",
    "vmoba_attn",
    "sparse_video_gen_2_attn",
    "sol_attn",
    "fp8_attn",
)

ENTRY_POINT_GROUP = "diffusion_runtime.attention_backends"

# Our own backends: name -> module. A module registers its backend when it is imported, which is when it is asked for.
_OWN_MODULES = {
    "torch_sdpa": "diffusion_runtime.attention.backends.torch_sdpa",
    "reference": "diffusion_runtime.attention.backends.reference",
    "aiter": "diffusion_runtime.attention.backends.aiter",
    "cudnn_attn": "diffusion_runtime.attention.backends.cudnn_attn",
    "fa": "diffusion_runtime.attention.backends.fa",
    "fa2": "diffusion_runtime.attention.backends.fa2",
    "fa3": "diffusion_runtime.attention.backends.fa3",
    "fa4": "diffusion_runtime.attention.backends.fa4",
    "flashinfer_attn": "diffusion_runtime.attention.backends.flashinfer_attn",
    "flex_attn": "diffusion_runtime.attention.backends.flex_attn",
    "fp8_attn": "diffusion_runtime.attention.backends.fp8_attn",
    "sage_attn": "diffusion_runtime.attention.backends.sage_attn",
    "sage_attn_3": "diffusion_runtime.attention.backends.sage_attn_3",
    "xformers": "diffusion_runtime.attention.backends.xformers",
    "measured": "diffusion_runtime.attention.measured",
    "sliding_tile_attn": "diffusion_runtime.attention.sparse.sliding_tile",
    "sol_attn": "diffusion_runtime.attention.sparse.sol",
    "sparse_video_gen_2_attn": "diffusion_runtime.attention.sparse.sparse_video_gen_2",
    "video_sparse_attn": "diffusion_runtime.attention.sparse.video_sparse",
    "vmoba_attn": "diffusion_runtime.attention.sparse.vmoba",
}

_logger = logging.getLogger("diffusion_runtime.attention")
_backends: dict[str, Backend] = {}
_aliases: dict[str, str] = {}
_entry_points_read = False
# Those that are there and cannot be loaded: name -> why.
_broken: dict[str, str] = {}

# How often the backends behind names have changed, and what is called then.
_num_changes = 0
_listeners: list[Callable[[], object]] = []

BackendClass = TypeVar("BackendClass", bound=type[Backend])


def register_backend(backend_class: BackendClass) -> BackendClass:
    """Class decorator: make a Backend selectable under its name and aliases.

    A package can also publish the class under the entry point group `diffusion_runtime.attention_backends`.
    Raises ConfigError when a name is taken by another class, or a feature is not one of FEATURES.
    """
    unknown = set(backend_class.capability.features) - set(FEATURES)
    if unknown:
        raise ConfigError(f"backend {backend_class.name!r}: unknown feature{nearest(sorted(unknown)[0], FEATURES)}")
    for name in map(plain, (backend_class.name, *backend_class.aliases)):
        theirs = resolve("backend", name)
        holder = _backends.get(_aliases.get(name, theirs.means if theirs is not None and theirs.means else name))
        if holder is not None and type(holder).__qualname__ != backend_class.__qualname__:
            raise ConfigError(f"backend name {shown(name)} is taken by {type(holder).__name__}")
    name = plain(backend_class.name)
    _backends[name] = backend_class()
    _aliases.update({plain(alias): name for alias in backend_class.aliases})
    _notify_changed()
    return backend_class


def unregister_backend(name: str) -> None:
    """Take a backend that was registered by hand out again."""
    canonical = canonical_name(name)
    _backends.pop(canonical, None)
    for alias in [alias for alias, target in _aliases.items() if target == canonical]:
        del _aliases[alias]
    _notify_changed()


def num_changes() -> int:
    """Return how often a backend was registered or unregistered so far. A decision made at another number is made
    again: the same name may now mean another backend."""
    return _num_changes


def when_backends_change(forget: Callable[[], object]) -> None:
    """Call `forget` whenever a backend is registered or unregistered: for caches of this process that hold some."""
    _listeners.append(forget)


def _notify_changed() -> None:
    global _num_changes
    _num_changes += 1
    for forget in _listeners:
        forget()


def canonical_name(name: str) -> str:
    """The name of a backend for one of its spellings. Raises ConfigError with the nearest names for an unknown one, and
    with the reason for a peer's backend that has no counterpart here."""
    spelled = plain(name)
    canonical = _aliases.get(spelled, spelled)
    if canonical in _backends or canonical in _OWN_MODULES or canonical in KNOWN_NAMES:
        return canonical
    theirs = resolve("backend", spelled)
    if theirs is not None and theirs.means:
        if theirs.remark:
            _remark(theirs)
        return theirs.means
    _read_entry_points()
    if theirs is None:
        # An alias of ours is known once its module is imported.
        for ours in _OWN_MODULES:
            find_backend(ours)
    canonical = _aliases.get(spelled, spelled)
    if canonical in _backends or canonical in _broken:
        return canonical
    if theirs is not None:
        raise ConfigError(
            f"attention backend {name!r} has no counterpart here: {theirs.remark}; the nearest is {theirs.instead!r}"
        )
    known = {*KNOWN_NAMES, *_OWN_MODULES, *_backends}
    spellings = {spelling for spelling, row in table_of("backend").items() if row.means}
    # Without a name that is like it, ours are listed, and not every spelling of theirs.
    hint = did_you_mean(spelled, {*known, *_aliases, *spellings}) or nearest(spelled, known)
    raise ConfigError(f"unknown attention backend {shown(name)}.{hint}")


@functools.cache
def _remark(theirs: Spelling) -> None:
    """Cached, so that it is logged once."""
    _logger.warning(
        "attention backend '%s' is '%s' here: %s; the report says what ran",
        theirs.spelling,
        theirs.means,
        theirs.remark,
    )


def find_backend(name: str) -> Backend | None:
    """The backend of a canonical name; None for a known name that this version does not have or cannot load."""
    if name not in _backends and name in _OWN_MODULES and name not in _broken:
        try:
            importlib.import_module(_OWN_MODULES[name])
        except Exception as error:  # a backend's file stands or falls with the packages it imports
            _broken[name] = f"its module cannot be imported: {raised_line(error)}"
    if name not in _backends:
        _read_entry_points()
    return _backends.get(name)


def available_names() -> tuple[str, ...]:
    """Canonical names of every backend that is here."""
    _read_entry_points()
    return tuple(dict.fromkeys([*_OWN_MODULES, *_backends]))


def broken_backends() -> dict[str, str]:
    """Names whose backend is published or ours and cannot be loaded -> why, with the entry point or what was raised.

    Ours are loaded when they are asked for; `find_backend` of such a name gives None.
    """
    _read_entry_points()
    return dict(_broken)


def _read_entry_points() -> None:
    """Load what other packages publish. A broken one is reported and left out: it must not stop everyone else."""
    global _entry_points_read
    if _entry_points_read:
        return
    _entry_points_read = True
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            register_backend(entry_point.load())
        except Exception as error:  # whatever a third-party module raises when it is imported
            package = "" if entry_point.dist is None else f" of package {entry_point.dist.name!r}"
            reason = f"entry point {entry_point.value!r}{package} cannot be used: {raised_line(error)}"
            _broken[plain(entry_point.name)] = reason
            _logger.warning("attention backend %s: %s", entry_point.name, reason)


def plain(name: str) -> str:
    """`FLASH-ATTN` as `flash_attn`: the form in which names are compared."""
    return name.strip().lower().replace("-", "_")
