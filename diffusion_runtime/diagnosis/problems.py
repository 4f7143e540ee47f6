"""Problem: a finding about a machine with its fix, in one form for all checks."""

from __future__ import annotations

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
