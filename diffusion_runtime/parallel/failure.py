"""Why a run of several processes ended, as a value that processes and launchers pass on as JSON."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from diffusion_runtime.errors import DiffusionRuntimeError

# Where the record stands in an error file of torch's elastic launcher, beside torch's own key `message`.
_RECORD_KEY = "diffusion_runtime"


@dataclass(frozen=True)
class RankFailure:
    """The process that failed, and how.

    rank: whose fault it is, which need not be the process that noticed. kind: the error's class name; message: for
    people; trace: where it happened. is_reported: somebody has told the user already.
    """

    rank: int
    kind: str
    message: str
    exit_code: int = 1
    trace: str = ""
    is_reported: bool = False

    @classmethod
    def of_interruption(cls, message: str) -> Self:
        """Nobody's fault: the user ended the run."""
        return cls(0, "Interrupted", message, 130)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls(**json.loads(text))

    def write(self, path: str | Path) -> None:
        """Into an error file, in the form that torch's elastic launcher reads: torchrun shows it too."""
        extra = {"py_callstack": self.trace, "timestamp": str(int(time.time()))}
        record = {"message": self.message, "extraInfo": extra}
        content = json.dumps({"message": record, _RECORD_KEY: dataclasses.asdict(self)})
        partial = Path(f"{path}.partial")
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, path: str | Path) -> Self | None:
        """What an error file says; None when there is none or somebody else wrote it."""
        try:
            content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**content[_RECORD_KEY])
        except (OSError, ValueError, KeyError, TypeError):
            return None


class RunEnded(BaseException):
    """Unwinds the main thread because the run is over, like KeyboardInterrupt: no item's failure.

    failure: why, if it is known here.
    """

    def __init__(self, failure: RankFailure | None = None) -> None:
        super().__init__(failure.message if failure is not None else "the run ended")
        self.failure = failure


class FirstProcessError(DiffusionRuntimeError):
    """On the other processes: what the first one could not make. failure: why."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.exit_code = failure.exit_code
