"""Attention roles: what a layer relates. Every role belongs to a category, for which it may be configured too."""

from __future__ import annotations

import importlib

from diffusion_runtime.errors import ConfigError, nearest

CATEGORIES = ("self", "cross")

# Who knows the roles of every model family. It stands above and is not imported from here: it is asked by its name, and
# only about a role that nobody has registered, so that a choice can be checked before its model is known.
_DECLARED_IN = "diffusion_runtime.models.registry"

_category_of: dict[str, str] = {category: category for category in CATEGORIES}


def register_role(name: str, category: str) -> None:
    """Make `name` (such as `ltx2.audio_to_video`) a role of `category`. Saying the same again is harmless.

    Raises ConfigError for an unknown category, or when the role exists with another one.
    """
    if category not in CATEGORIES:
        raise ConfigError(f"role {name!r}: unknown category {category!r}.{nearest(category, CATEGORIES)}")
    if _category_of.setdefault(name, category) != category:
        raise ConfigError(f"role {name!r} is already registered with category {_category_of[name]!r}")


def known_roles() -> tuple[str, ...]:
    """Every role that may be configured, categories included."""
    return tuple(_category_of)


def is_role(name: object) -> bool:
    """Whether `name` is a role, of a category, of this process or of any model family."""
    if isinstance(name, str) and name not in _category_of:
        importlib.import_module(_DECLARED_IN).register_declared_roles()
    return name in _category_of


def role_category(role: str) -> str:
    """The category of a role. Raises ConfigError that names the nearest role for an unknown one."""
    if role not in _category_of:
        raise ConfigError(f"unknown attention role {role!r}.{nearest(role, _category_of)}")
    return _category_of[role]
