"""Files of rows: JSON lines, Parquet tables and standard input, read one row at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from diffusion_runtime.batches.rows import Row, read_row
from diffusion_runtime.errors import ConfigError, MissingPackageError, RequestError, UsageError, shown
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.files import open_file
from diffusion_runtime.untrusted.json_text import parse_json

STANDARD_INPUT = "-"
_JSONL, _PARQUET = (".jsonl", ".ndjson"), ".parquet"
# A data: URL of the largest image.
_MAX_LINE = 64 * 2**20
_MAX_VALUES = 10_000
_TABLE_ROWS = 256


@dataclass(frozen=True)
class RowFile:
    """The place of the rows: a path, or `-`. model: the name of the model in requests."""

    path: str
    model: str

    def __post_init__(self) -> None:
        suffix = Path(self.path).suffix.lower()
        if self.path != STANDARD_INPUT and suffix not in (*_JSONL, _PARQUET):
            raise ConfigError(f"ROWS: expected a file that ends in .jsonl, .ndjson or .parquet, or -, got {self.path}")

    @property
    def is_stream(self) -> bool:
        """Return whether it can be read once alone."""
        return self.path == STANDARD_INPUT

    @property
    def state(self) -> tuple[int, ...]:
        """Return what changes when somebody writes to the file. Raises ConfigError for one that cannot be read."""
        with open_file(self.path, "ROWS") as file:
            found = os.fstat(file.fileno())
        return found.st_size, found.st_mtime_ns, found.st_ino

    def rows(self) -> Iterator[Row]:
        """Yield every row. Raises RequestError, which names the row, and ConfigError for a file that is none."""
        for each in self.rows_or_errors():
            if isinstance(each, UsageError):
                raise each
            yield each

    def rows_or_errors(self) -> Iterator[Row | UsageError]:
        """Yield every row, or why it cannot be read."""
        folder = Path() if self.is_stream else Path(self.path).absolute().parent
        for number, values in self._values():
            if not isinstance(values, UsageError):
                try:
                    yield read_row(values, number, self.model, folder)
                    continue
                except UsageError as error:
                    values = error
            yield RequestError(f"{self.named(number)}: {values}")

    def named(self, number: int) -> str:
        """Return how messages name a row."""
        return f"{'standard input' if self.is_stream else self.path}:{number}"

    def _values(self) -> Iterator[tuple[int, Mapping[str, Any] | UsageError]]:
        if Path(self.path).suffix.lower() == _PARQUET:
            yield from _table_rows(self.path)
        elif self.is_stream:
            yield from _lines(sys.stdin.buffer)
        else:
            with open_file(self.path, "ROWS") as file:
                yield from _lines(file)


def _lines(file: IO[bytes]) -> Iterator[tuple[int, Mapping[str, Any] | UsageError]]:
    number = 0
    while line := file.readline(_MAX_LINE + 1):
        number += 1
        if len(line) > _MAX_LINE:
            raise ConfigError(f"ROWS: line {number} has more than {_MAX_LINE} bytes")
        if not line.strip():
            continue
        try:
            values = parse_json(line, max_values=_MAX_VALUES)
        except DocumentError as error:
            yield number, RequestError(f"not valid JSON: {error}; expected an object per line")
            continue
        if isinstance(values, Mapping):
            yield number, values
        else:
            yield number, RequestError(f'expected an object such as {{"prompt": "a star"}}, got {shown(values)}')


def _table_rows(path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise MissingPackageError(
            f"{path}: Parquet needs pyarrow, which is not installed: pip install 'diffusion-runtime[parquet]', or "
            "write the rows as .jsonl"
        ) from error
    number = 0
    try:
        with open_file(path, "ROWS") as file, ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=_TABLE_ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield number, values
    except ArrowException as error:
        raise ConfigError(f"ROWS: {path} is no Parquet file that can be read: {shown(str(error))}") from error
