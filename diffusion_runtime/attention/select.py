"""Selection: force context > command line > per-role config > environment > platform, as a pure function.

`select` reads its arguments and nothing else. `select_backend` gathers what is ambient (the force context, the
environment variable, the device) and asks it.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, cast

from diffusion_runtime.attention.backends.found_wrong import found_wrong
from diffusion_runtime.attention.backends.interface import FEATURES, Backend, Question
from diffusion_runtime.attention.backends.packages import ImportingBackend, unaskable
from diffusion_runtime.attention.backends.registry import available_names, broken_backends, find_backend
from diffusion_runtime.attention.config import AttentionConfig, AttentionSpec
from diffusion_runtime.attention.options import check_options, option_names
from diffusion_runtime.attention.platforms import platform_candidates
from diffusion_runtime.attention.roles import is_role, known_roles, role_category
from diffusion_runtime.errors import BackendUnavailableError, ConfigError, nearest
from diffusion_runtime.hardware import Hardware, detect_hardware

if TYPE_CHECKING:
    import torch

ENVIRONMENT_VARIABLE = "DIFFUSION_ATTENTION_BACKEND"
SOURCES = ("force", "cli", "config", "environment", "platform")

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


@dataclass(frozen=True)
class Decision:
    """Which backend serves a role, and why.

    options: those that were set, in their declared types. source: the level that decided, one of SOURCES.
    rejected: (backend name, reason) for every candidate that came before and was not taken.
    """

    backend: str
    options: dict[str, Any] = field(default_factory=dict)
    source: str = "platform"
    reason: str = ""
    rejected: list[tuple[str, str]] = field(default_factory=list)

    def log_line(self, role: str, hardware: Hardware) -> str:
        """What is logged once when a role's backend is settled."""
        if self.source == "platform":
            backend = find_backend(self.backend)
            versions = "" if backend is None else backend.versions(hardware)
            place = f"{hardware.describe()}, {versions}" if versions else hardware.describe()
            return f"Defaulting to attention backend '{self.backend}' for role={role} ({place})"
        return f"Using attention backend '{self.backend}' for role={role} ({self.source})"


@dataclass(frozen=True)
class ForcedChoice:
    """One active `force_attention_backend`. role: a role or category, None for every role its backend serves."""

    spec: AttentionSpec
    role: str | None = None

    def speaks_for(self, role: str) -> bool:
        return self.role in (None, role, role_category(role))


_forced: contextvars.ContextVar[tuple[ForcedChoice, ...]] = contextvars.ContextVar("forced_attention", default=())


def current_force() -> tuple[ForcedChoice, ...]:
    """The choices forced on this thread or task now, the innermost last."""
    return _forced.get()


class force_attention_backend:
    """Context manager and decorator: `spec` serves `role` (None: every role it serves) inside, above all else.

    Nestable, the innermost that speaks for a role wins; restored on exceptions; invisible to other threads and tasks.
    A layer built inside keeps the choice; a layer called inside takes it for that call. Decorated coroutine functions
    hold it while they run. Raises ConfigError for unknown names, options and roles.
    """

    def __init__(self, spec: AttentionSpec | str | dict[str, Any], role: str | None = None) -> None:
        if role is not None and not is_role(role):
            raise ConfigError(f"unknown attention role {role!r}.{nearest(role, known_roles())}")
        self._choice = ForcedChoice(AttentionSpec.parse(spec, "force_attention_backend"), role)
        self._tokens: list[contextvars.Token[tuple[ForcedChoice, ...]]] = []

    def __enter__(self) -> Self:
        self._tokens.append(_forced.set((*_forced.get(), self._choice)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _forced.reset(self._tokens.pop())

    def __call__(self, function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        spec, role = self._choice.spec, self._choice.role
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_coroutine(*args: Parameters.args, **kwargs: Parameters.kwargs) -> object:
                with force_attention_backend(spec, role):
                    return await cast(Awaitable[object], function(*args, **kwargs))

            return cast(Callable[Parameters, Returned], run_coroutine)

        @functools.wraps(function)
        def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            with force_attention_backend(spec, role):
                return function(*args, **kwargs)

        return run


@dataclass(frozen=True)
class Levels:
    """What each level says, highest first. rules: for cli and config, the schedule rules that hold now."""

    forced: tuple[ForcedChoice, ...] = ()
    cli: AttentionConfig = field(default_factory=AttentionConfig)
    config: AttentionConfig = field(default_factory=AttentionConfig)
    environment: str | None = None
    cli_rules: tuple[int, ...] = ()
    config_rules: tuple[int, ...] = ()

    def choices(self, role: str) -> list[tuple[str, AttentionSpec, bool, str]]:
        """(source, spec, made for the role by name, key) of every choice that could speak for `role`, in order."""
        forced = [choice for choice in reversed(self.forced) if choice.speaks_for(role)]
        said = [("force", choice.spec, choice.role is not None, "force_attention_backend") for choice in forced]
        said += [("cli", *choice) for choice in self.cli.choices(role, self.cli_rules)]
        said += [("config", *choice) for choice in self.config.choices(role, self.config_rules)]
        if self.environment and self.config.default is None:
            said.append(("environment", _environment_spec(self.environment), False, ENVIRONMENT_VARIABLE))
        return said


def _environment_spec(text: str) -> AttentionSpec:
    try:
        return AttentionSpec(text)
    except ConfigError as error:
        raise ConfigError(f"environment variable {ENVIRONMENT_VARIABLE}: {error}") from error


def select(question: Question, levels: Levels) -> Decision:
    """The backend for a layer. Pure: equal arguments give equal decisions.

    The first choice that speaks for the role decides. A general choice whose backend is not made for the role is
    passed over, which `rejected` says. Raises BackendUnavailableError with every reason when an explicit choice cannot
    run, ConfigError for options that the chosen backend does not have.
    """
    rejected: list[tuple[str, str]] = []
    overlays: list[tuple[str, AttentionSpec]] = []
    passed_over: list[Backend] = []
    for source, spec, by_name, key in levels.choices(question.role):
        if not spec.candidates:
            if spec.options:
                overlays.append((key, spec))
            continue
        decision, skipped = _try_choice(question, source, spec, by_name, key, rejected)
        if decision is not None:
            return _with_overlays(decision, overlays, passed_over)
        passed_over += skipped
    return _with_overlays(_platform_default(question, rejected), overlays, passed_over)


def _try_choice(
    question: Question, source: str, spec: AttentionSpec, by_name: bool, key: str, rejected: list[tuple[str, str]]
) -> tuple[Decision | None, list[Backend]]:
    """The decision of one explicit choice; None with the passed-over backends when it does not apply to the role."""
    refused: list[tuple[str, str]] = []
    passed_over: list[Backend] = []
    for name in spec.candidates:
        backend = find_backend(name)
        if backend is not None and not by_name and not _serves(backend, question):
            rejected.append((name, f"{key}: not made for role {question.role!r}, the next choice decides"))
            passed_over.append(backend)
            continue
        reasons = refusals(name, question)
        if reasons:
            refused += [(name, reason) for reason in reasons]
            continue
        place = f"{key} says {spec.name}"
        return Decision(name, spec.options_for(name), source, place, [*rejected, *refused]), []
    if refused:
        raise _unavailable(question, source, key, refused)
    return None, passed_over


def refusals(name: str, question: Question) -> list[str]:
    """Every reason why the backend `name` cannot serve `question`; empty when it can.

    Where nothing else speaks against it and the question is about the machine of this process, its package is imported,
    once a process: one that is installed and broken is refused like any other, and so is one that raises when asked,
    and one whose numbers a self-check of this process found wrong.
    """
    backend = find_backend(name)
    if backend is None:
        broken = broken_backends().get(name)
        return [broken or f"this version does not have it; it has {', '.join(available_names())}"]
    try:
        return _refusals(backend, question)
    except Exception as error:  # whatever a stranger's probe or capability raises
        return [unaskable(backend, error)]


def _refusals(backend: Backend, question: Question) -> list[str]:
    availability = backend.probe(question.hardware)
    reasons = []
    if availability.version is None:
        reasons.append(availability.reason + (f"; fix: {availability.fix}" if availability.fix else ""))
    reasons += backend.capability.refusals(question)
    if not reasons and question.hardware.is_here and isinstance(backend, ImportingBackend):
        broken = backend.import_error(question.hardware)
        reasons += [] if broken is None else [broken]
    if not reasons and question.hardware.is_here and not question.unchecked:
        wrong = found_wrong(backend.name, question.head_dim, question.dtype)
        reasons += [] if wrong is None else [wrong]
    return reasons


def _serves(backend: Backend, question: Question) -> bool:
    """Whether it is made for the role; one that raises when asked counts as made for it, and is then refused."""
    try:
        return backend.capability.serves(question)
    except Exception:  # whatever a stranger's capability raises
        return True


def _unavailable(question: Question, source: str, key: str, refused: list[tuple[str, str]]) -> BackendUnavailableError:
    lines = [f"  {name}: {reason}" for name, reason in refused]
    usable = [name for name in available_names() if not refusals(name, question)]
    message = "\n".join(
        [
            f"no attention backend of the choice for role {question.role!r} can run here ({source}, {key}):",
            *lines,
            f"  usable here for this role: {', '.join(usable)}. Choose one of them, or none for the default.",
        ]
    )
    return BackendUnavailableError(message, refused)


def _platform_default(question: Question, rejected: list[tuple[str, str]]) -> Decision:
    refused: list[tuple[str, str]] = []
    for name in platform_candidates(question.hardware):
        reasons = refusals(name, question)
        if not reasons:
            reason = f"default of {question.hardware.describe()}"
            return Decision(name, {}, "platform", reason, [*rejected, *refused])
        refused += [(name, reason) for reason in reasons]
    raise _unavailable(question, "platform", "default", refused)


def _with_overlays(
    decision: Decision, overlays: list[tuple[str, AttentionSpec]], passed_over: list[Backend]
) -> Decision:
    """The decision with the options that a higher level gave without naming a backend; the highest wins."""
    if not overlays:
        return decision
    backend = find_backend(decision.backend)
    assert backend is not None
    options = dict(decision.options)
    for key, spec in reversed(overlays):
        # A passed-over backend serves other roles of the same model: its options are meant for those.
        elsewhere = {name for other in passed_over for name in option_names(other.options_type)}
        elsewhere -= set(option_names(backend.options_type))
        mine = {name: value for name, value in spec.options.items() if name not in elsewhere}
        options.update(check_options(backend.options_type, mine, f"{key}: options of {backend.name}"))
    return Decision(decision.backend, options, decision.source, decision.reason, decision.rejected)


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

    cli, config: what each level says, in any form that AttentionConfig.parse takes; forced: a spec, a name or a
    mapping; an active force_attention_backend counts when `forced` is None.
    device: a Hardware value stands for any machine.
    needs: features the calls use, of backends.interface.FEATURES. Raises BackendUnavailableError, ConfigError.
    """
    for feature in needs:
        if feature not in FEATURES:
            raise ConfigError(f"needs: unknown feature {feature!r}.{nearest(feature, FEATURES)}")
    question = Question(
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
    return select(question, levels)
