"""Folder of a batch's results: the name of each, and the journal of which are made (`manifest.jsonl`) and which failed
(`failures.jsonl`).

A line of the manifest is written once its file is on the disk. A file whose line is missing, as its process was killed
between the two, says in its sidecar of which row it is, and is taken into the manifest instead of being made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from diffusion_runtime.batches.rows import Row
from diffusion_runtime.errors import ConfigError, OutputError, UsageError
from diffusion_runtime.media.formats import check_format, check_writable
from diffusion_runtime.media.publish import cannot_write
from diffusion_runtime.media.reading import read_own_sidecar
from diffusion_runtime.serving.results import file_sha256
from diffusion_runtime.untrusted.files import check_place, open_file
from diffusion_runtime.untrusted.json_text import parse_json, read_json_file

if sys.platform != "win32":
    import fcntl

SCHEMA = "diffusion_runtime.batch/1"
MANIFEST, FAILURES = "manifest.jsonl", "failures.jsonl"
# Of the run. No identifier begins with a dot.
_STATE = ".batch.json"
# The key of a recipe that says of which row a file is.
ROW_KEY = "batch_row"
# A folder of more files than this is slow on many file systems.
MAX_FLAT = 10_000
# Attention reports are the longest part of a line.
_MAX_LINE = 16 * 2**20


class Done(frozenset[bytes]):
    """Rows that are made: 16 bytes for each, as there may be millions."""

    def has(self, row: Row, digest: str) -> bool:
        return _key(row.id, digest) in self


class ResultFolder:
    """One folder. model: digest of the model and its options. file_format: None for png or mp4, by the number of
    frames. is_nested: whether results are in folders of two levels. manifest_bytes: its length when the run began."""

    def __init__(self, folder: Path, model: str, file_format: str | None, *, is_nested: bool = False) -> None:
        self.folder = folder
        self.model = model
        if file_format is not None:
            check_writable(check_format(file_format))
        self._format = file_format
        self.is_nested = is_nested
        self.manifest_bytes = 0
        self._lock: IO[str] | None = None
        self._manifest: IO[bytes] | None = None
        self._failures: IO[bytes] | None = None
        self._done = Done()

    def begin(self, num_rows: int | None, *, resumes: bool, writes: bool = True) -> None:
        """Begin to write, or go on where an earlier run ended. num_rows: None where nobody knows. writes: False looks
        alone.

        Raises ConfigError for a folder that another batch has, UsageError without `resumes` for one that holds
        results already, OutputError for one that cannot be written.
        """
        check_place(self.folder, "--output-path")
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"--output-path {self.folder}: expected a folder, and it is a file")
        state = self._state()
        if state is None:
            if (self.folder / MANIFEST).exists():
                raise UsageError(f"{self.folder / MANIFEST} was not written by `batch`; choose another --output-path")
            state = {"schema": SCHEMA, "is_nested": num_rows is None or num_rows > MAX_FLAT, "format": self._format}
        elif not resumes:
            raise UsageError(f"{self.folder} holds a batch already: --resume goes on, or choose another --output-path")
        elif state["format"] != self._format:
            raise UsageError(
                f"--resume: {self.folder} was begun with --format {state['format'] or 'left out'}; give the same"
            )
        self.is_nested = state["is_nested"]
        if writes:
            self._take(state)
        path = self.folder / MANIFEST
        self.manifest_bytes = path.stat().st_size if path.exists() else 0
        self._done = self.done(self.manifest_bytes)

    def done(self, num_bytes: int) -> Done:
        """Return the rows in the first bytes of the manifest whose files are there."""
        return Done({_key(line["id"], line["digest"]) for line in self._lines(num_bytes) if self._is_there(line)})

    def _take(self, state: Mapping[str, Any]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Not `with`: the lock holds until the process ends, however it ends.
            self._lock = open(self.folder / _STATE, "a+", encoding="utf-8")  # noqa: SIM115
            if sys.platform != "win32":
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ConfigError(
                        f"{self.folder}: another batch writes into it; wait for it, or choose another --output-path"
                    ) from None
            if self._lock.tell() == 0:
                self._lock.write(json.dumps(state))
                _flush(self._lock)
            self._manifest = open(self.folder / MANIFEST, "ab")  # noqa: SIM115
            self._cut_torn_line()
            # Those that failed are tried again.
            self._failures = open(self.folder / FAILURES, "wb")  # noqa: SIM115
        except OSError as error:
            raise cannot_write(self.folder, error, "--output-path") from error

    def close(self) -> None:
        for file in (self._manifest, self._failures, self._lock):
            if file is not None:
                file.close()

    def _lines(self, num_bytes: int) -> Iterator[dict[str, Any]]:
        """Yield the lines of the manifest, or of its first bytes. Raises OutputError for a line that is none."""
        path = self.folder / MANIFEST
        if not path.exists():
            return
        with open_file(path, "--resume", error=OutputError) as file:
            number = 0
            while line := file.readline(_MAX_LINE):
                number += 1
                if not line.endswith(b"\n") or file.tell() > num_bytes:
                    return
                try:
                    values = parse_json(line)
                    found = {name: values[name] for name in ("id", "digest", "path", "bytes")}
                except Exception as error:
                    raise OutputError(
                        f"{path}:{number}: expected a line of a batch; mend it, or choose another folder"
                    ) from error
                yield found

    @property
    def has_any(self) -> bool:
        """Return whether the manifest had a row when the run began."""
        return bool(self._done)

    def is_done(self, row: Row, digest: str) -> bool:
        """Return whether the manifest had a row when the run began, and its file was there."""
        return self._done.has(row, digest)

    def target(self, row_id: str, num_frames: int) -> Path:
        """Return the path of a result. Raises ConfigError for frames that the format does not hold."""
        suffix = check_format(self._format or ("png" if num_frames == 1 else "mp4"), num_frames)
        check_writable(suffix, num_frames)
        name = hashlib.sha256(row_id.encode()).hexdigest()
        folder = self.folder / name[:2] / name[2:4] if self.is_nested else self.folder
        return folder / f"{row_id}.{suffix}"

    def found(self, row: Row, digest: str, target: Path) -> dict[str, Any] | None:
        """Return what the manifest would say of a file that is there, where it is this row's; None for none."""
        if not target.is_file():
            return None
        sidecar = read_own_sidecar(target) or {}
        if (sidecar.get("recipe") or {}).get(ROW_KEY) != {"id": row.id, "digest": digest}:
            return None
        clip, timings = sidecar["file"], sidecar["timings"]
        return {
            "file": {"name": target.name, "bytes": target.stat().st_size, "sha256": file_sha256(target)},
            **{name: clip[name] for name in ("num_frames", "height", "width")},
            "seconds": round(sum(timings.values()), 4),
            "attention_report": sidecar["attention_report"],
        }

    def add(self, row: Row, digest: str, target: Path, result: Mapping[str, Any]) -> None:
        """Write that a row is made. Raises OutputError."""
        self._put(
            self._manifest,
            {
                "id": row.id,
                "row": row.number,
                "path": target.relative_to(self.folder).as_posix(),
                "sha256": result["file"]["sha256"],
                "bytes": result["file"]["bytes"],
                "seconds": result["seconds"],
                "digest": digest,
                "seed": row.request["seed"],
                **{name: result[name] for name in ("num_frames", "height", "width")},
                "attention_report": result["attention_report"],
            },
        )

    def add_failure(self, row_id: str | None, number: int | None, failure: Mapping[str, Any]) -> None:
        """Write that a row failed. failure: as `engine.described` has it. Raises OutputError."""
        reasons = {"reasons": failure["reasons"]} if failure.get("reasons") else {}
        values = {"id": row_id, "row": number, "kind": failure["kind"], "error": failure["message"], **reasons}
        self._put(self._failures, values)

    def _put(self, file: IO[bytes] | None, values: Mapping[str, Any]) -> None:
        assert file is not None, "begin comes first"
        try:
            file.write(json.dumps(values).encode() + b"\n")
            _flush(file)
        except OSError as error:
            raise cannot_write(Path(str(file.name)), error) from error

    def _state(self) -> dict[str, Any] | None:
        path = self.folder / _STATE
        if not path.is_file() or path.stat().st_size == 0:
            return None
        state = read_json_file(path)
        if not isinstance(state, dict) or state.get("schema") != SCHEMA:
            raise ConfigError(f"{path}: expected the state of a batch; choose another --output-path")
        return state

    def _cut_torn_line(self) -> None:
        """Remove what a process that was killed wrote of a line."""
        path = self.folder / MANIFEST
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(max(0, size - _MAX_LINE))
            tail = file.read()
            whole = tail.rfind(b"\n") + 1
            if whole < len(tail):
                file.truncate(size - len(tail) + whole)

    def _is_there(self, line: Mapping[str, Any]) -> bool:
        try:
            return bool((self.folder / line["path"]).stat().st_size == line["bytes"])
        except OSError:
            return False


def _key(row_id: str, digest: str) -> bytes:
    """Return 16 bytes that stand for a row."""
    return hashlib.blake2b(f"{digest}/{row_id}".encode(), digest_size=16).digest()


def _flush(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
