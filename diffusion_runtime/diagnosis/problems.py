"""Problem: a finding about a machine with its fix, in one form for all checks; TimeBudget: the seconds a diagnosis may
take, and LeftOut, a check that did not fit in them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """what: the problem, in one sentence; fix: what to type or do; is_failure: whether something that was asked for, or
    a test that was run, failed, which makes the exit code 1."""

    what: str
    fix: str
    is_failure: bool = False

    def to_dict(self) -> dict[str, str | bool]:
        return {"what": self.what, "fix": self.fix, "is_failure": self.is_failure}


# As long as someone waits for an answer. One kernel may take longer to compile: FlashInfer's 84 s on an H200.
USUAL_SECONDS = 20.0
# The share of the budget in which packages are imported, before anything is computed.
_IMPORT_SHARE = 0.6
# No check begins in the last fifth of the budget, as one that has begun cannot be ended: on an H200 the last one took
# 2.7 s.
_BEGIN_SHARE = 0.8


@dataclass(frozen=True)
class LeftOut:
    """what: the checks that were not run; why: in one clause."""

    what: str
    why: str

    def to_dict(self) -> dict[str, str]:
        return {"what": self.what, "why": self.why}


class TimeBudget:
    """Seconds from `started` on. Checks that compile do not fit in a limited budget, however much of it is left."""

    def __init__(
        self, seconds: float | None, clock: Callable[[], float] = time.monotonic, *, started: float | None = None
    ) -> None:
        """seconds: None for as long as it takes. started: by the clock; None for now."""
        self.seconds = seconds
        self._clock = clock
        self._started = clock() if started is None else started

    @property
    def is_limited(self) -> bool:
        return self.seconds is not None

    @property
    def is_spent(self) -> bool:
        return self.seconds is not None and self._clock() - self._started >= self.seconds * _BEGIN_SHARE

    @property
    def import_seconds(self) -> float | None:
        """Seconds that are left for importing packages; None without a limit."""
        if self.seconds is None:
            return None
        return max(0.0, self.seconds * _IMPORT_SHARE - (self._clock() - self._started))
