"""Import check of optional packages: what importing one raises, tried once per process."""

from __future__ import annotations

import functools
import importlib
import warnings

from diffusion_runtime.kernels.first_use import watch_triton


@functools.cache
def import_failure(module: str, *functions: str) -> str | None:
    """What importing `module` raises, in one line, or which of `functions` it lacks; None when everything is found.

    Some packages catch what their own kernels raise at import, so a module that imports need not have its functions.
    Tried once per process.
    """
    import torch

    try:
        if module.split(".")[:2] == ["flash_attn", "cute"]:
            from diffusion_runtime.kernels.kept_kernels import keep_flash_attention_kernels

            keep_flash_attention_kernels()
        # Backends are chosen where transformers are built, on the meta device; a package's own import must not run on
        # it. A deprecation inside a package is no failure of it, even where warnings are errors.
        with torch.device("cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = importlib.import_module(module)
        if module.split(".")[0] == "triton":
            watch_triton()
    except Exception as error:  # any exception: a third-party package may raise anything when it is imported
        return raised_line(error)
    missing = [name for name in functions if not hasattr(found, name)]
    return f"module {module!r} has no {missing[0]!r}" if missing else None


def raised_line(error: BaseException) -> str:
    """`OSError: libbroken.so: cannot open shared object file`."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
