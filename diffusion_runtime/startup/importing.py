"""Import of optional packages: what importing one raises, tried once per process; their functions at a first call."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from diffusion_runtime.errors import BackendUnavailableError
from diffusion_runtime.startup import startup_is_on
from diffusion_runtime.startup.first_use import watch_triton
from diffusion_runtime.startup.remembered_imports import forget

# Seconds of an import from which on it is told.
_LONG = 1.0

_logger = logging.getLogger("diffusion_runtime.attention")


@functools.cache
def import_failure(module: str, *functions: str) -> str | None:
    """Return the error of importing `module`, in one line, or which of `functions` it lacks; None when everything is
    found.

    Some packages catch what their own kernels raise at import, so a module that imports need not have its functions.
    Tried once per process.
    """
    import torch

    is_flash_attention_4 = module.split(".")[:2] == ["flash_attn", "cute"] and startup_is_on()
    try:
        if is_flash_attention_4:
            from diffusion_runtime.startup.kept_kernels import keep_flash_attention_kernels

            keep_flash_attention_kernels()
        compiler_left_out = _compiler_left_out("quack") if is_flash_attention_4 else contextlib.nullcontext()
        # Backends are chosen where transformers are built, on the meta device; a package's own import must not run on
        # it. A deprecation inside a package is no failure of it, even where warnings are errors.
        with torch.device("cpu"), warnings.catch_warnings(), compiler_left_out:
            warnings.simplefilter("ignore")
            found = importlib.import_module(module)
        if module.split(".")[0] == "triton":
            watch_triton()
    except Exception as error:  # any exception: a third-party package may raise anything when it is imported
        return raised_line(error)
    missing = [name for name in functions if not hasattr(found, name)]
    return f"module {module!r} has no {missing[0]!r}" if missing else None


@contextlib.contextmanager
def _compiler_left_out(package: str) -> Iterator[None]:
    """Context manager: `torch.compiler.disable` on a function of `package` asks torch's compiler at the first call.

    torch's own imports the compiler and sympy where it decorates: 3.8 of the 6.5 s that the import of FlashAttention-4
    took on one H200, half of it without a GPU (1.3 instead of 2.6 s of CPU time), for functions of quack's autotuner
    that are never called. Other packages, and other threads meanwhile, get torch's own.
    """
    import torch

    # What another thread put there while it imports is not to stay.
    disable: Any = inspect.unwrap(torch.compiler.disable)

    @functools.wraps(disable)
    def disable_when_called(fn: Any = None, recursive: bool = True, **keywords: Any) -> Any:
        if fn is None:
            return lambda function: disable_when_called(function, recursive, **keywords)
        if not inspect.isfunction(fn) or fn.__module__.partition(".")[0] != package:
            return disable(fn, recursive, **keywords)

        @functools.wraps(fn)
        def called(*arguments: Any, **named: Any) -> Any:
            return disable(fn, recursive, **keywords)(*arguments, **named)

        return called

    torch.compiler.disable = disable_when_called
    try:
        yield
    finally:
        torch.compiler.disable = disable


def first_call_functions(backend: str, module: str, *functions: str) -> tuple[Callable[..., Any], ...]:
    """Return the functions of a module, imported now unless it is: a choice of `backend` that is remembered imports
    nothing.

    Raises BackendUnavailableError where the import fails after all; what is remembered of it is dropped, so that the
    next choice imports first.
    """
    started = time.perf_counter()
    failure = import_failure(module, *functions)
    if failure is not None:
        forget(module)
        reason = f"{module} imported when it was last checked on this machine, and no longer does: {failure}"
        raise BackendUnavailableError(
            f"attention backend {backend!r} cannot run: {reason}; start again, which checks it anew and chooses among "
            f"what works, or choose another with --attention-backend",
            [(backend, reason)],
        )
    seconds = time.perf_counter() - started
    if seconds >= _LONG:
        _logger.info("imported %s for its first call: %.1f s", module, seconds)
    found = importlib.import_module(module)
    return tuple(getattr(found, name) for name in functions)


def raised_line(error: BaseException) -> str:
    """`OSError: libbroken.so: cannot open shared object file`."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
