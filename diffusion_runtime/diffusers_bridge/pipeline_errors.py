"""Exceptions raised inside a diffusers pipeline, translated to ThirdPartyError with the pipeline and the call."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from types import TracebackType

from diffusion_runtime.diffusers_bridge.denoising_observer import DenoisingObserver
from diffusion_runtime.diffusers_bridge.pipeline_interface import PipelineInterface
from diffusion_runtime.errors import Cancelled, DiffusionRuntimeError, RequestError, ThirdPartyError

_PACKAGE = __name__.partition(".")[0]
# Hooks and interceptions of this folder are in every traceback; a frame of another folder, such as a kernel's, means
# that the exception is our own.
_BRIDGE = __name__.rpartition(".")[0]
_LIBRARIES = ("diffusers", "transformers")
# How many inputs a message lists, and how many characters of the original message it repeats.
_MAX_LISTED = 6
_MAX_MESSAGE = 400


@contextlib.contextmanager
def translated_errors(interface: PipelineInterface, observer: DenoisingObserver) -> Iterator[None]:
    """Context manager around the call of a pipeline: an exception becomes RequestError where the pipeline refuses the
    request before it denoises, and ThirdPartyError everywhere else. Our own exceptions and those of `on_progress` pass
    unchanged."""
    try:
        yield
    except (DiffusionRuntimeError, Cancelled):
        raise
    except Exception as error:
        if error is observer.interruption or _is_ours(error.__traceback__):
            raise
        if isinstance(error, ValueError) and not observer.has_denoised:
            raise RequestError(f"{interface.name} refuses the request: {_message(error)}") from error
        stage = "while denoising or decoding" if observer.has_denoised else "before the first step"
        raise ThirdPartyError(
            f"diffusers' own {interface.name} failed {stage}{_place(error)}: {type(error).__name__}: "
            f"{_message(error)}{_inputs(interface, observer)}"
        ) from error


def _is_ours(trace: TracebackType | None) -> bool:
    modules = (str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(trace))
    return any(_within(module, _PACKAGE) and not _within(module, _BRIDGE) for module in modules)


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _place(error: Exception) -> str:
    """Return `, in WanTransformer3DModel.forward`: the innermost call inside diffusers or transformers."""
    names = [
        (str(frame.f_globals.get("__name__", "")), frame.f_code.co_qualname, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    found = [(module, name, line) for module, name, line in names if module.partition(".")[0] in _LIBRARIES]
    if not found:
        return ""
    module, name, line = found[-1]
    return f", in {name} ({module}, line {line})"


def _message(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."


def _inputs(interface: PipelineInterface, observer: DenoisingObserver) -> str:
    """Return inputs that may be missing, where a call fails before it denoises."""
    others = [] if observer.has_denoised else list(interface.other_inputs())
    if not others:
        return ""
    shown = ", ".join(others[:_MAX_LISTED]) + (", ..." if len(others) > _MAX_LISTED else "")
    return f". It also takes {shown}, which no request gives"
