"""Explicit attention choices that apply to a role, before checking whether they can run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.attention.config import AttentionSpec
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.roles import TEXT_ENCODER, role_category
from diffusion_runtime.attention.select import Choice, Levels
from diffusion_runtime.diffusers_bridge.modules import FoundModule, head_shape
from diffusion_runtime.errors import BackendUnavailableError


def deciding_choice(levels: Levels, role: str) -> Choice | None:
    """Return the choice that decides for a role; None without a choice, or when no choice applies to the role."""
    for choice in levels.choices(role):
        if any(choice.by_name or _is_made_for(name, role) for name in choice.spec.candidates):
            return choice
    return None


def is_chosen(policy: AttentionPolicy) -> bool:
    """Return whether any level names a backend, for any role."""
    return bool(list(_named(policy)))


def check_choices(models: Sequence[tuple[AttentionPolicy, Sequence[FoundModule]]]) -> None:
    """Check that each choice can serve an attention module. Raises BackendUnavailableError.

    models: the policy of each, and its reached modules. For a module without known heads, only the role is checked.
    """
    deciding = [
        (policy, module, choice)
        for policy, modules in models
        for module in modules
        for choice in _possible(policy, module)
    ]
    named = dict.fromkeys(name for policy, _ in models for spec in _named(policy) for name in spec.candidates)
    if named and not deciding:
        roles = ", ".join(sorted({module.layer.role for _, modules in models for module in modules}))
        reason = f"it would serve no attention call; the roles that are reached here: {roles}"
        raise BackendUnavailableError(
            f"attach: {', '.join(named)}: {reason}. Choose a dense backend", [(name, reason) for name in named]
        )
    for policy, module, choice in deciding:
        serving = [name for name in choice.spec.candidates if _is_made_for(name, module.layer.role)]
        if policy.no_grid and head_shape(module.module) is None and serving and all(map(needs_grid, serving)):
            reason = f"it needs the grid of the tokens, {policy.no_grid}"
            raise BackendUnavailableError(
                f"{', '.join(serving)} cannot serve role {module.layer.role!r} of this model ({choice.key}): {reason}. "
                "Choose a dense backend",
                [(name, reason) for name in serving],
            )


def _possible(policy: AttentionPolicy, module: FoundModule) -> Iterator[Choice]:
    """Yield the choices that decide for a module, at any step."""
    for rules in dict.fromkeys(policy.held_rules(module.layer)):
        choice = deciding_choice(policy.levels(rules), module.layer.role)
        if choice is not None:
            yield choice


def _named(policy: AttentionPolicy) -> Iterator[AttentionSpec]:
    """Yield every choice that names a backend."""
    specs = [choice.spec for choice in policy.forced if choice.role != TEXT_ENCODER]
    for level in (policy.cli, policy.config):
        specs += [rule.spec for rule in level.schedule]
        specs += level.per_role.values()
        specs += [] if level.default is None else [level.default]
    default = policy.config.default
    if policy.environment and (default is None or not default.candidates):
        specs.append(AttentionSpec(policy.environment))
    yield from (spec for spec in specs if spec.candidates)


def _is_made_for(name: str, role: str) -> bool:
    backend = find_backend(name)
    return backend is None or role_category(role) in backend.capability.categories


def needs_grid(name: str) -> bool:
    """Return whether a backend needs the positions of tokens in the grid."""
    backend = find_backend(name)
    return backend is not None and backend.capability.needs_grid
