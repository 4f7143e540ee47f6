"""Backend selection: force context > command line > per-role config > environment > platform, as a pure function.

`select` reads its arguments and nothing else, and `resolve_decision` makes its decision ready to run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from diffusion_runtime.attention.backends.capability import AttentionRequirements
from diffusion_runtime.attention.backends.interface import Backend
from diffusion_runtime.attention.backends.refusals import refusals
from diffusion_runtime.attention.backends.registry import available_names, find_backend
from diffusion_runtime.attention.config import AttentionConfig, AttentionSpec
from diffusion_runtime.attention.force import ForcedChoice
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.core.options import check_options, option_names
from diffusion_runtime.errors import BackendUnavailableError, ConfigError, shown

if TYPE_CHECKING:
    pass
from diffusion_runtime.attention.backends.interface import DenseAttention
from diffusion_runtime.core.options import build_options
from diffusion_runtime.startup.first_use import NARROW

ENVIRONMENT_VARIABLE = "DIFFUSION_ATTENTION_BACKEND"
_TOO_NARROW = f"passed over as a default, a layer of at most {NARROW} numbers per token repays no compiling"
SOURCES = ("force", "cli", "config", "environment", "platform")


@dataclass(frozen=True)
class Decision:
    """Which backend serves a role, and why.

    options: those that were set, in their declared types. source: the level that decided, one of SOURCES.
    rejected: (backend name, reason) for every candidate that came before and was not taken.
    dense: for a backend that chooses among the keys, what serves its calls that attend to every key, such as the first
    steps of a schedule; None for every other backend.
    """

    backend: str
    options: dict[str, Any] = field(default_factory=dict)
    source: str = "platform"
    reason: str = ""
    rejected: list[tuple[str, str]] = field(default_factory=list)
    dense: Decision | None = None

    def log_line(self, role: str, hardware: Hardware) -> str:
        """Return the line that is logged once when a role's backend is chosen."""
        if self.source == "platform":
            backend = find_backend(self.backend)
            versions = "" if backend is None else backend.versions(hardware)
            machine = ", ".join(filter(None, [hardware.architecture, hardware.describe(), versions]))
            refused = {name for name, _ in self.rejected}
            before = [name for name in platform_candidates(hardware) if name in refused and name != self.backend]
            narrow = [name for name, reason in self.rejected if reason == _TOO_NARROW]
            before = [name for name in before if name not in narrow]
            last = f"; {', '.join(before)} cannot run here" if before else ""
            last += f"; {', '.join(narrow)}: {_TOO_NARROW}" if narrow else ""
            return f"Defaulting to attention backend '{self.backend}' for role={role} ({machine}){last}"
        return f"Using attention backend '{self.backend}' for role={role} ({self.source})"


class Choice(NamedTuple):
    """One entry of a level. source: its level; by_name: it is made for the role, or for the role's category,
    by name; key: where it was given, for people."""

    source: str
    spec: AttentionSpec
    by_name: bool
    key: str


@dataclass(frozen=True)
class Levels:
    """The choices of each level, highest first. rules: for cli and config, the schedule rules that hold now."""

    forced: tuple[ForcedChoice, ...] = ()
    cli: AttentionConfig = field(default_factory=AttentionConfig)
    config: AttentionConfig = field(default_factory=AttentionConfig)
    environment: str | None = None
    cli_rules: tuple[int, ...] = ()
    config_rules: tuple[int, ...] = ()

    def choices(self, role: str) -> list[Choice]:
        """Every choice that applies to `role`, in order."""
        forced = [choice for choice in reversed(self.forced) if choice.applies_to(role)]
        choices = [
            Choice("force", choice.spec, choice.role is not None, "force_attention_backend") for choice in forced
        ]
        choices += [Choice("cli", *choice) for choice in self.cli.choices(role, self.cli_rules)]
        choices += [Choice("config", *choice) for choice in self.config.choices(role, self.config_rules)]
        default = self.config.default
        if self.environment and (default is None or not default.candidates):
            choices.append(Choice("environment", _environment_spec(self.environment), False, ENVIRONMENT_VARIABLE))
        return choices


def _environment_spec(text: str) -> AttentionSpec:
    try:
        return AttentionSpec(text)
    except ConfigError as error:
        raise ConfigError(f"environment variable {ENVIRONMENT_VARIABLE}: {error}") from error


def select(requirements: AttentionRequirements, levels: Levels) -> Decision:
    """The backend for a layer. Pure: equal arguments give equal decisions.

    The first choice that names a backend for the role decides. A general choice whose backend is not made for the role
    is passed over, which `rejected` lists. Raises BackendUnavailableError with every reason when an explicit choice
    cannot run, ConfigError for options that the chosen backend does not have.
    """
    rejected: list[tuple[str, str]] = []
    overlays: list[Choice] = []
    passed_over: list[Backend] = []
    choices = levels.choices(requirements.role)
    for index, choice in enumerate(choices):
        if not choice.spec.candidates:
            overlays.append(choice)
            continue
        decision, skipped = _try_choice(requirements, choice, rejected)
        if decision is not None:
            decision = _with_overlays(decision, overlays, passed_over)
            return _with_dense(decision, requirements, choices[index:])
        passed_over += skipped
    return _with_overlays(_platform_default(requirements, rejected), overlays, passed_over)


def _try_choice(
    requirements: AttentionRequirements, choice: Choice, rejected: list[tuple[str, str]]
) -> tuple[Decision | None, list[Backend]]:
    """The decision of one explicit choice; None with the passed-over backends when it does not apply to the role."""
    refused: list[tuple[str, str]] = []
    passed_over: list[Backend] = []
    for name in choice.spec.candidates:
        backend = find_backend(name)
        reason = "" if backend is None or choice.by_name else _passed_over(backend, requirements)
        if backend is not None and reason:
            rejected.append((name, f"{choice.key}: {reason}, the next choice decides"))
            passed_over.append(backend)
            continue
        reasons = refusals(name, requirements)
        if reasons:
            refused += [(name, reason) for reason in reasons]
            continue
        return _taken(name, choice, [*rejected, *refused]), []
    if refused:
        raise _unavailable(requirements, choice.source, choice.key, refused)
    return None, passed_over


def _taken(name: str, choice: Choice, rejected: list[tuple[str, str]]) -> Decision:
    reason = f"{choice.key} says {choice.spec.name}"
    return Decision(name, choice.spec.options_for(name), choice.source, reason, rejected)


def _with_dense(decision: Decision, requirements: AttentionRequirements, choices: list[Choice]) -> Decision:
    """The decision with what serves its dense calls. choices: from the one that decided on."""
    backend = find_backend(decision.backend)
    if backend is None or not backend.capability.needs_every_key:
        return decision
    first, *lower = choices
    later = first.spec.candidates[first.spec.candidates.index(decision.backend) + 1 :]
    named = [(name, first) for name in later] + [(name, choice) for choice in lower for name in choice.spec.candidates]
    return dataclasses.replace(decision, dense=select_dense(requirements, named))


def select_dense(requirements: AttentionRequirements, named: Iterable[tuple[str, Choice]] = ()) -> Decision:
    """Choose the backend for the calls that attend to every key in a layer whose own backend chooses among keys.

    named: backends and the choices that name them, in order, below the choice of the layer's backend: the user's
    choices for the calls that it leaves. The first that can run is taken, then the platform's default; the user chose
    none of these for the role, so one that cannot run is passed over, as `rejected` and `reason` tell. A gate stays
    with the layer's backend. Raises BackendUnavailableError when not even the platform's default can run.
    """
    requirements = dataclasses.replace(
        requirements, needs=requirements.needs - {"gate"}, keys_in_parts=False, every_key_on_demand=False
    )
    rejected: list[tuple[str, str]] = []
    for name, choice in named:
        backend = find_backend(name)
        if backend is not None and (backend.capability.needs_every_key or _passed_over(backend, requirements)):
            continue
        reasons = refusals(name, requirements)
        if not reasons:
            return _taken(name, choice, rejected)
        rejected.append((name, f"{choice.key}: {'; '.join(reasons)}"))
    default = _platform_default(requirements, [])
    reason = "; ".join([default.reason, *(f"not {name}, {why}" for name, why in rejected)])
    return dataclasses.replace(default, reason=reason, rejected=rejected)


def _passed_over(backend: Backend, requirements: AttentionRequirements) -> str:
    """Return why it is not made for the role, empty where it is; one that raises when asked counts as made for it, and
    is then refused."""
    try:
        return backend.capability.passed_over(requirements)
    except Exception:  # whatever a third-party capability raises
        return ""


def _unavailable(
    requirements: AttentionRequirements, source: str, key: str, refused: list[tuple[str, str]]
) -> BackendUnavailableError:
    lines = [f"  {name}: {reason}" for name, reason in refused]
    others = {name: refusals(name, requirements) for name in available_names()}
    usable = [name for name, reasons in others.items() if not reasons]
    if usable:
        advice = [f"  usable here for this role: {', '.join(usable)}. Choose one of them, or none for the default."]
    else:
        # Those that lack least: the others have further reasons, such as a package that is not installed.
        fewest = min(map(len, others.values()), default=0)
        named: dict[str, list[str]] = {}
        for name, reasons in others.items():
            if len(reasons) == fewest:
                named.setdefault("; ".join(reasons), []).append(name)
        advice = ["  no backend can serve this role here. What stands in the way of those that lack least:"]
        advice += [f"    {', '.join(names)}: {reason}" for reason, names in named.items()]
    message = "\n".join(
        [
            f"no attention backend of the choice for role {shown(requirements.role)} can run here ({source}, {key}):",
            *lines,
            *advice,
        ]
    )
    return BackendUnavailableError(message, refused)


def _platform_default(requirements: AttentionRequirements, rejected: list[tuple[str, str]]) -> Decision:
    refused: list[tuple[str, str]] = []
    candidates = platform_candidates(requirements.hardware)
    # Those that compile for too narrow a layer are not even imported where another can run.
    costly = [name for name in candidates if _costs_too_much(name, requirements)]
    for name in [*(name for name in candidates if name not in costly), *costly]:
        reasons = refusals(name, requirements)
        if not reasons:
            reason = f"default of {requirements.hardware.describe()}"
            passed_over = [(other, _TOO_NARROW) for other in costly if name not in costly]
            return Decision(name, {}, "platform", reason, [*rejected, *passed_over, *refused])
        refused += [(name, reason) for reason in reasons]
    raise _unavailable(requirements, "platform", "default", refused)


def _costs_too_much(name: str, requirements: AttentionRequirements) -> bool:
    """Return whether a backend that is installed would compile, and its package be imported, for longer than a narrow
    layer's calls take."""
    backend, hardware = find_backend(name), requirements.hardware
    if backend is None or not 0 < requirements.width <= NARROW or not backend.compiles_at_first_call(hardware):
        return False
    return backend.probe(hardware).version is not None


def _with_overlays(decision: Decision, overlays: list[Choice], passed_over: list[Backend]) -> Decision:
    """The decision with the options that came before it without a backend; the first wins."""
    overlays = [choice for choice in overlays if choice.spec.options]
    if not overlays:
        return decision
    backend = find_backend(decision.backend)
    assert backend is not None
    options = dict(decision.options)
    # A passed-over backend serves other roles of the same model: general options of it are meant for those.
    elsewhere = {name for other in passed_over for name in option_names(other.options_type)}
    elsewhere -= set(option_names(backend.options_type))
    for choice in reversed(overlays):
        given = choice.spec.options
        mine = given if choice.by_name else {name: value for name, value in given.items() if name not in elsewhere}
        options.update(check_options(backend.options_type, mine, f"{choice.key}: options of {backend.name}"))
    return dataclasses.replace(decision, options=options)


@dataclass(frozen=True)
class Resolved:
    """A decision with what running it takes. dense: what serves its dense calls, where the decision names it."""

    decision: Decision
    backend: Backend
    options: object
    dense: DenseAttention | None = None


def resolve_decision(decision: Decision) -> Resolved:
    """The backend of a decision, with its options as the type it declares.

    Raises ConfigError for options that contradict each other: here the set is complete.
    """
    backend = find_backend(decision.backend)
    assert backend is not None, decision
    options = build_options(backend.options_type, decision.options, f"options of {backend.name}")
    dense = None if decision.dense is None else resolve_dense(decision.dense)
    return Resolved(decision, backend, options, dense)


def resolve_dense(decision: Decision) -> DenseAttention:
    """Return the decision of `select_dense` as a call carries it. Raises ConfigError like resolve_decision."""
    found = resolve_decision(decision)
    is_plain_default = decision.source == "platform" and not decision.rejected
    return DenseAttention(found.backend, found.options, "" if is_plain_default else decision.reason)


# Blackwell: chips whose fastest dense kernels are cuDNN's, from 9.5 on. sm_101 and sm_110 are Jetson Thor's.
_CUDNN_FIRST = ((10, 0), (12, 1))


def platform_candidates(hardware: Hardware) -> tuple[str, ...]:
    """Backend names in the order of preference for this device; the last one always runs."""
    capability = hardware.capability
    if hardware.platform == "cuda" and capability is not None:
        if _CUDNN_FIRST[0] <= capability <= _CUDNN_FIRST[1]:
            cudnn = ("cudnn_attn",) if hardware.cudnn is not None and hardware.cudnn >= (9, 5) else ()
            return (*cudnn, "flashinfer_attn", "fa4", "torch_sdpa")
        if (8, 0) <= capability < (10, 0):
            return ("fa", "torch_sdpa")
    if hardware.platform == "rocm":
        return ("fa", "torch_sdpa")
    return ("torch_sdpa",)
