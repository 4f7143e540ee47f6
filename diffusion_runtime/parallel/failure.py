"""Reason why a multi-process run ended, as a value that ranks and launchers pass on as JSON."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from diffusion_runtime.errors import DiffusionRuntimeError

# The key of the record in an error file of torch's elastic launcher, next to torch's own key `message`.
_RECORD_KEY = "diffusion_runtime"
# Next to the error file of rank 0.
_GROWING_FILE = "growing_file.txt"


@dataclass(frozen=True)
class RankFailure:
    """The rank that failed, and how.

    rank: the rank at fault, which need not be the one that detected it. kind: the error's class name; message: for
    users; trace: where it was raised. is_reported: the user has already seen it. growing_file: what rank 0 was writing
    while it was made (`note_growing_file`), which stays.
    """

    rank: int
    kind: str
    message: str
    exit_code: int = 1
    trace: str = ""
    is_reported: bool = False
    growing_file: str | None = None

    @classmethod
    def of_interruption(cls, message: str) -> Self:
        """Return the failure for a run that the user ended: no rank is at fault."""
        return cls(0, "Interrupted", message, 130)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls(**json.loads(text))

    def write(self, path: str | Path) -> None:
        """Write it into an error file, in the form that torch's elastic launcher reads: torchrun shows it too."""
        extra = {"py_callstack": self.trace, "timestamp": str(int(time.time()))}
        record = {"message": self.message, "extraInfo": extra}
        content = json.dumps({"message": record, _RECORD_KEY: dataclasses.asdict(self)})
        partial = Path(f"{path}.partial")
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, path: str | Path) -> Self | None:
        """Read an error file; None when there is none or another program wrote it."""
        try:
            content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**content[_RECORD_KEY])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def note_growing_file(error_file: str | Path, path: Path) -> None:
    """Note for the launcher, however this process ends, the file that grows while the run goes on. error_file: of this
    process (ProcessInfo.error_file)."""
    Path(error_file).with_name(_GROWING_FILE).write_text(str(path), encoding="utf-8")


def read_growing_file(folder: str | Path) -> str | None:
    """Return the growing file that a process of the run has noted in the launcher's folder, or None."""
    return next((path.read_text(encoding="utf-8") for path in Path(folder).glob(f"**/{_GROWING_FILE}")), None)


class RunEnded(BaseException):
    """Unwinds the main thread because the run is over, like KeyboardInterrupt. It is not the failure of one item.

    failure: why the run ended, if this process knows it.
    """

    def __init__(self, failure: RankFailure | None = None) -> None:
        super().__init__(failure.message if failure is not None else "the run ended")
        self.failure = failure


class FirstProcessError(DiffusionRuntimeError):
    """Raised on the other ranks when rank 0 could not make what they wait for. failure: why."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.exit_code = failure.exit_code
