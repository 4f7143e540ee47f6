"""Every error a caller can meet, with the exit code the command line gives it.

    DiffusionRuntimeError                 1          anything this package raises on purpose
    ├── UsageError (also a ValueError)    2  caller  a value that was given is wrong
    │   ├── ConfigError                              a key or value of a config, an option or a flag
    │   └── RequestError                             a prompt, size, step count or seed that cannot be generated
    │       └── ForbiddenAddressError                an address that nothing is fetched from
    ├── BackendUnavailableError           3  caller  an explicit attention choice that cannot run here
    │   └── BackendInaccurateError                   a rounded one whose error on the model's own numbers is too large
    ├── DeviceMemoryError                 4          the device ran out of memory
    ├── BatchFailedError                  5          some items of a batch failed, the others are on disk
    ├── PipelineBusyError                 1          a second generation on a pipeline that is generating
    ├── PipelineClosedError               1          a generation on a pipeline that was closed
    ├── ModelLoadError                    1          a model folder, hub id or checkpoint that cannot be used
    │   └── InstallationError                        installed packages that keep every model from being loaded
    ├── MissingPackageError               1          a package that this result or input needs and that is not installed
    ├── ThirdPartyError                   1          an exception inside another project's pipeline
    └── OutputError                       1          a result that cannot be written or read
        └── DiskFullError                            a disk without room

`caller` marks those whose `is_callers_fault` is True: the same call fails again, and another value works, on the same
machine with the same model. A server answers them with 4xx, and any other, which may go away or is the operator's to
repair, with 5xx.

`Cancelled` is none of them: requests that whoever watched their progress cancelled are no failure.
`tune` returns 6 where no setting is within its budget (BUDGET_NOT_MET), `verify` 7 for a file that its recipe does not
make (NOT_REPRODUCED).
A message states what was expected, what was there, and what to type instead.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import ClassVar

# The exit code of `tune` where no setting meets the budget; what it wrote is the nearest.
BUDGET_NOT_MET = 6
# The exit code of `verify` where the recipe makes other frames than the file's.
NOT_REPRODUCED = 7

MAX_SHOWN_CHARACTERS = 80
MAX_LINE_CHARACTERS = 240


class DiffusionRuntimeError(Exception):
    """Base class of all errors that this package raises on purpose; `exit_code` is what the command line returns for
    it."""

    exit_code = 1
    is_callers_fault: ClassVar[bool] = False


class UsageError(DiffusionRuntimeError, ValueError):
    """A value that was given is wrong; another value would work."""

    exit_code = 2
    is_callers_fault = True


class ConfigError(UsageError):
    """A key or a value of a configuration, an option or a flag; the message names the key."""


class RequestError(UsageError):
    """A prompt, size, step count or seed that cannot be generated."""


class ForbiddenAddressError(RequestError):
    """An address that nothing is fetched from: its host is not allowed, or is one of this machine's network."""


class BackendUnavailableError(DiffusionRuntimeError):
    """An explicit attention choice that cannot run here.

    `reasons` holds one (backend name, reason) pair for every candidate that was refused.
    """

    exit_code = 3
    is_callers_fault = True

    def __init__(self, message: str, reasons: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


class BackendInaccurateError(BackendUnavailableError):
    """A rounded attention backend whose error on a model's own q, k and v is above the bound that it declares; the
    message has both, and the option that accepts it."""


class DeviceMemoryError(DiffusionRuntimeError):
    """The device ran out of memory; the message lists what needs less."""

    exit_code = 4


class BatchFailedError(DiffusionRuntimeError):
    """Some items of a batch failed; the finished ones are on disk."""

    exit_code = 5


class PipelineBusyError(DiffusionRuntimeError):
    """A second generation on a pipeline that is generating: it makes one at a time."""


# Outside of DiffusionRuntimeError: whoever handles failures has not failed where somebody cancelled.
class Cancelled(Exception):
    """Raised by an on_progress to cancel requests: the other requests of the batch go on. It leaves `generate` where no
    request is left, as of a batch of one.

    request_indices: which requests of the batch, from 0; None for all of them.
    """

    exit_code = 1

    def __init__(self, request_indices: Iterable[int] | None = None) -> None:
        super().__init__("cancelled while it was being made")
        self.request_indices = None if request_indices is None else tuple(request_indices)


class PipelineClosedError(DiffusionRuntimeError):
    """A generation on a pipeline whose memory was given back."""


class ModelLoadError(DiffusionRuntimeError):
    """A model folder, hub id or checkpoint that cannot be used."""


class InstallationError(ModelLoadError):
    """Installed packages that keep every model from being loaded; the message names the one to remove."""


class MissingPackageError(DiffusionRuntimeError):
    """A package that a result or an input needs, and that is not installed; the message says what to type."""


class ThirdPartyError(DiffusionRuntimeError):
    """An exception inside another project's pipeline; the message names the pipeline and the call, and quotes the
    exception."""


class OutputError(DiffusionRuntimeError):
    """A result that cannot be written or read."""


class DiskFullError(OutputError):
    """A result for which the disk, or the user's quota of it, has no room left: the next one has none either."""


class _ShortRepr(reprlib.Repr):
    """A bounded repr: a few items per level, a few levels, the start of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple, self.maxother = 4, 8, 16, 16, 200

    def repr_str(self, x: str, level: int) -> str:  # noqa: ARG002 - reprlib calls it so
        # Not reprlib's own, which cuts the middle out and keeps the end.
        return repr(x[: MAX_SHOWN_CHARACTERS + 1])

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002
        # repr() refuses integers of more than 4300 digits.
        return repr(x) if x.bit_length() < 1024 else f"a whole number of {x.bit_length()} bits"

    def repr_instance(self, x: object, level: int) -> str:
        return f"a {type(x).__name__}" if isinstance(x, bytes | bytearray) else super().repr_instance(x, level)


_SHORT_REPR = _ShortRepr()


def shown(value: object) -> str:
    """`value` as a Python literal, cut at 80 characters: untrusted values may have any size and depth."""
    text = _SHORT_REPR.repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 3]}..."


def shown_name(name: str) -> str:
    """An untrusted name for a message: as it is, or as `shown` where it is long or cannot be printed."""
    return name if len(name) <= MAX_SHOWN_CHARACTERS and name.isprintable() else shown(name)


def first_line(error: BaseException) -> str:
    """The first line of another library's error; it may quote untrusted files."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= MAX_LINE_CHARACTERS else f"{line[: MAX_LINE_CHARACTERS - 3]}..."


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """` Did you mean 'x' or 'y'?` for the known names most like `name`; else for one or two that begin with it, or hold
    it; empty without."""
    names = sorted(set(known))
    spelled = (name if isinstance(name, str) else shown(name))[:MAX_SHOWN_CHARACTERS]
    close = difflib.get_close_matches(spelled, names, n=3, cutoff=0.6)
    if not close and len(spelled) > 2:
        begun = [each for each in names if each.startswith(spelled)]
        held = [each for each in names if spelled in each]
        close = next((each for each in (begun, held) if 0 < len(each) <= 2), [])
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def nearest(name: object, known: Iterable[str]) -> str:
    """Return `did_you_mean`, else ` Known: ...`."""
    names = sorted(set(known))
    return did_you_mean(name, names) or (f" Known: {', '.join(names)}." if names else "")
