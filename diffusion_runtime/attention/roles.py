"""Attention roles: what a layer relates. Every role belongs to a category, for which it may be configured too."""

from __future__ import annotations

import importlib

from diffusion_runtime.errors import ConfigError, nearest, shown

CATEGORIES = ("self", "cross")

# The attention of text encoders, which is not a layer's: it is chosen by this name alone, among what transformers has
# (text_encoders/attention_choice.py).
TEXT_ENCODER = "text_encoder"

# The modules that declare the roles of every model. They are higher rows and not imported here: they are asked by name,
# and only about a role that is not registered, so that a choice can be checked before its model is known.
_DECLARED_IN = ("diffusion_runtime.models.registry", "diffusion_runtime.diffusers_bridge.modules")

_category_of: dict[str, str] = {category: category for category in CATEGORIES}


def register_role(name: str, category: str) -> None:
    """Make `name` (such as `ltx2.audio_to_video`) a role of `category`. Saying the same again is harmless.

    Raises ConfigError for an unknown category, or when the role exists with another one.
    """
    if category not in CATEGORIES:
        raise ConfigError(f"role {shown(name)}: unknown category {shown(category)}.{nearest(category, CATEGORIES)}")
    if _category_of.setdefault(name, category) != category:
        raise ConfigError(f"role {shown(name)} is already registered with category {shown(_category_of[name])}")


def known_roles() -> tuple[str, ...]:
    """Every role that may be configured, categories included."""
    return tuple(_category_of)


def is_role(name: object) -> bool:
    """Return whether `name` is a role: of a category, registered, or of any model of this package."""
    if isinstance(name, str) and name not in _category_of:
        for module in _DECLARED_IN:
            importlib.import_module(module).register_declared_roles()
    return isinstance(name, str) and name in _category_of


def role_category(role: str) -> str:
    """The category of a role. Raises ConfigError that names the nearest role for an unknown one."""
    if not is_role(role):
        raise ConfigError(f"unknown attention role {shown(role)}.{nearest(role, _category_of)}")
    return _category_of[role]
