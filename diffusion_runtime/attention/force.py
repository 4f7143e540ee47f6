"""force_attention_backend: the choice above all others, for what runs inside it and nothing else.

The choices that are in force are one ContextVar, so threads and tasks do not see each other's. Below them stands one of
the whole process, which global_force_attn_backend sets.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast

from torch.compiler import is_compiling

from diffusion_runtime.attention.config import AttentionSpec
from diffusion_runtime.attention.roles import TEXT_ENCODER, is_role, known_roles, role_category
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, nearest

_COMPILED = (
    "force_attention_backend: expected outside of a compiled function, where it would be a constant of the graph; "
    "enter it around the call, or give the backend to `attention`"
)
Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


@dataclass(frozen=True)
class ForcedChoice:
    """One active `force_attention_backend`. role: a role or category, None for every role its backend serves."""

    spec: AttentionSpec
    role: str | None = None

    def applies_to(self, role: str) -> bool:
        return self.role in (None, role, role_category(role))


_forced: contextvars.ContextVar[tuple[ForcedChoice, ...]] = contextvars.ContextVar("forced_attention", default=())

_of_process: tuple[ForcedChoice, ...] = ()


def current_force() -> tuple[ForcedChoice, ...]:
    """The choices forced on this thread or task now, the innermost last; that of the process comes first."""
    return (*_of_process, *_forced.get()) if _of_process else _forced.get()


def global_force_attn_backend(backend: AttentionSpec | str | dict[str, Any] | None) -> None:
    """Force `backend` on every thread of the process from now on, as SGLang and FastVideo do; None takes it back.

    It is the outermost `force_attention_backend`: one that is entered decides before it. Raises ConfigError for unknown
    names and options.
    """
    global _of_process
    where = "global_force_attn_backend"
    _of_process = () if backend is None else (ForcedChoice(AttentionSpec.parse(backend, where)),)


class force_attention_backend:
    """Context manager and decorator: `spec` serves `role` (None: every role it serves) inside, above all else; role
    `text_encoder` is for text encoders that are loaded inside.

    Nestable, the innermost that names a backend for a role wins; restored on exceptions; invisible to other threads and
    tasks, which may hold the same instance at the same time. A layer built inside keeps the choice; a layer called
    inside takes it for that call. Decorated coroutine functions, generators and asynchronous generators hold it while
    they run, and not while they are suspended.

    Raises ConfigError for unknown names, options and roles, DiffusionRuntimeError when it is left in another thread or
    task than it was entered in.
    """

    def __init__(self, spec: AttentionSpec | str | dict[str, Any], role: str | None = None) -> None:
        if is_compiling():
            raise ConfigError(_COMPILED)
        if role not in (None, TEXT_ENCODER) and not is_role(role):
            raise ConfigError(f"unknown attention role {role!r}.{nearest(role, known_roles())}")
        self._choice = ForcedChoice(AttentionSpec.parse(spec, "force_attention_backend"), role)

    def __enter__(self) -> Self:
        _forced.set((*_forced.get(), self._choice))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # No token of the entry is kept: each thread and task holds its own choices, of which the last like ours goes.
        forced = _forced.get()
        entries = [index for index, choice in enumerate(forced) if choice is self._choice]
        if not entries:
            raise DiffusionRuntimeError(
                f"force_attention_backend({self._choice.spec.name!r}) is left in a thread or task that does not hold "
                "it; leave it where it was entered"
            )
        _forced.set((*forced[: entries[-1]], *forced[entries[-1] + 1 :]))

    def __call__(self, function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        run = self._wrapper(function)
        return cast(Callable[Parameters, Returned], functools.wraps(function)(run))

    def _wrapper(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of the same kind (function, generator, coroutine), as later decorators and callers may
        inspect it."""
        if inspect.iscoroutinefunction(function):

            async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
                return await self._held(function(*args, **kwargs))

            return run_coroutine
        if inspect.isasyncgenfunction(function):
            return _async_generator_function(self._choice, function)
        if inspect.isgeneratorfunction(function):

            def run_generator(*args: Any, **kwargs: Any) -> Any:
                return (yield from self._held(function(*args, **kwargs)))

            return run_generator

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                returned = function(*args, **kwargs)
            return self._held(returned)

        return run

    def _held(self, returned: Any) -> Any:
        """Return the result of a function; what has yet to run, such as a generator, holds the choice while it runs."""
        if inspect.isgenerator(returned):
            return _Resumes(self._choice).generator(returned)
        if inspect.iscoroutine(returned):
            return _Resumes(self._choice).coroutine(returned)
        if inspect.isasyncgen(returned):
            return _async_generator_function(self._choice, lambda: returned)()
        return returned


class _Resumes:
    """One generator or coroutine that is resumed again and again: it holds a choice, and what it forces itself, from
    each resume until it is suspended. The code that resumes it keeps the choices it held before."""

    def __init__(self, choice: ForcedChoice) -> None:
        self._held: tuple[ForcedChoice, ...] = (choice,)

    def run(self, resume: Callable[[], Any]) -> Any:
        outside = _forced.get()
        _forced.set((*outside, *self._held))
        try:
            return resume()
        finally:
            self._held = _forced.get()[len(outside) :]
            _forced.set(outside)

    def generator(self, body: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """`body`, each resume by `run`; otherwise as `yield from` delegates (PEP 380)."""
        resume: Callable[[], Any] = functools.partial(next, body)
        while True:
            try:
                yielded = self.run(resume)
            except StopIteration as end:
                return end.value
            try:
                sent = yield yielded
            except GeneratorExit:
                self.run(body.close)
                raise
            except BaseException as error:
                resume = functools.partial(body.throw, error)
            else:
                resume = functools.partial(body.send, sent)

    async def coroutine(self, body: Awaitable[Any]) -> Any:
        """The result of awaiting `body`."""
        return await _Awaiting(self, body)


class _Awaiting:
    """An awaitable whose every step holds the choices."""

    def __init__(self, resumes: _Resumes, body: Awaitable[Any]) -> None:
        self._resumes = resumes
        self._body = body

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._resumes.generator(self._body.__await__())


def _async_generator_function(
    choice: ForcedChoice, function: Callable[..., AsyncGenerator[Any, Any]]
) -> Callable[..., AsyncGenerator[Any, Any]]:
    """`function`, whose generators hold the choice in each resume, and in each step of what a resume awaits."""

    async def run_async_generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        resumes = _Resumes(choice)
        body = function(*args, **kwargs)
        resume: Awaitable[Any] = body.__anext__()
        while True:
            try:
                yielded = await _Awaiting(resumes, resume)
            except StopAsyncIteration:
                return
            try:
                sent = yield yielded
            except GeneratorExit:
                await _Awaiting(resumes, body.aclose())
                raise
            except BaseException as error:
                resume = body.athrow(error)
            else:
                resume = body.asend(sent)

    return run_async_generator
