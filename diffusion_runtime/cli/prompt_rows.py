"""Prompt files with request fields per row: JSONL (one JSON object per line) and CSV (a header of fields).

A row's values hold for its prompt: flags come before them, they before --config. Errors say FILE:LINE.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from diffusion_runtime.cli.config_file import request_value
from diffusion_runtime.cli.prompts import MAX_ITEMS, parse_seeds
from diffusion_runtime.errors import ConfigError, RequestError, UsageError, nearest, shown
from diffusion_runtime.request.generation_request import REQUEST_FIELDS, GenerationRequest
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.json_text import parse_json

JSONL_ENDINGS = (".jsonl", ".ndjson")
CSV_ENDING = ".csv"
# One row holds a prompt and some numbers.
_MAX_VALUES_PER_ROW = 10_000


@dataclass(frozen=True)
class PromptRow:
    """A prompt with request values of its own. seeds: empty for those of the command line; values: the other fields by
    name; where: FILE:LINE."""

    prompt: str
    seeds: tuple[int, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""


def has_rows(file: str) -> bool:
    """Return whether a prompt file of this name holds a row of fields per prompt, by its ending."""
    return PurePath(file).suffix.lower() in (*JSONL_ENDINGS, CSV_ENDING)


def parse_rows(text: str, file: str) -> list[PromptRow]:
    """The rows of a JSONL or CSV text, by the ending of `file`.

    Raises ConfigError for text that does not parse and for an unknown field, RequestError for a value that a field
    cannot have; both name file and line.
    """
    is_csv = PurePath(file).suffix.lower() == CSV_ENDING
    rows = []
    for line, values in _csv_rows(text, file) if is_csv else _json_rows(text, file):
        where = f"{file}:{line}"
        rows.append(_row(values, where))
        if len(rows) > MAX_ITEMS:
            raise ConfigError(f"{where}: more than {MAX_ITEMS} rows; make them in parts")
    return rows


def _json_rows(text: str, file: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    # Not splitlines: a JSON text may hold a line separator of Unicode as it is.
    for line, row in enumerate(text.split("\n"), 1):
        if not row.strip():
            continue
        try:
            values = parse_json(row, max_values=_MAX_VALUES_PER_ROW)
        except DocumentError as error:
            raise ConfigError(
                f'{file}:{line}: not valid JSON: {error}; expected one object per line, such as {{"prompt": "a star", '
                '"seed": 1}'
            ) from error
        if not isinstance(values, Mapping):
            raise ConfigError(
                f'{file}:{line}: expected an object such as {{"prompt": "a star", "seed": 1}}, got {shown(values)}'
            )
        yield line, {key: value for key, value in values.items() if value is not None}


def _csv_rows(text: str, file: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Text of cells in the types that their fields have; an empty cell leaves its field out."""
    import csv

    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ConfigError(f"{file}:{line}: not valid CSV: {error}") from error
        if cells is None:
            return
        if not any(cell.strip() for cell in cells):
            continue
        if columns is None:
            columns = _columns(cells, f"{file}:{line}")
            continue
        if len(cells) > len(columns):
            raise ConfigError(
                f"{file}:{line}: {len(cells)} cells for {len(columns)} columns; put a text with commas in double quotes"
            )
        filled = {column: cell for column, cell in zip(columns, cells, strict=False) if cell.strip()}
        yield line, {column: request_value(column, cell) for column, cell in filled.items()}


def _columns(cells: Sequence[str], where: str) -> list[str]:
    columns = [cell.strip() for cell in cells]
    for index, column in enumerate(columns):
        _check_field(column, where, "column")
        if column in columns[:index]:
            raise ConfigError(f"{where}: column {shown(column)} is given twice")
    if "prompt" not in columns:
        raise ConfigError(f"{where}: the first line names the columns, and none is 'prompt'; got {shown(columns)}")
    return columns


def _check_field(name: str, where: str, kind: str) -> None:
    if name not in REQUEST_FIELDS:
        raise ConfigError(f"{where}: unknown {kind} {shown(name)}.{nearest(name, REQUEST_FIELDS)}")


def _row(values: Mapping[str, Any], where: str) -> PromptRow:
    for name in values:
        _check_field(name, where, "field")
    if "prompt" not in values:
        raise RequestError(f"{where}: the prompt is missing")
    others = {name: value for name, value in values.items() if name not in ("prompt", "seed")}
    try:
        seeds = values.get("seed", ())
        seeds = parse_seeds(seeds if isinstance(seeds, list | tuple) else [seeds])
        # The request's own checks, here where the line is known.
        GenerationRequest.from_dict({"prompt": values["prompt"], **others})
    except UsageError as error:
        raise RequestError(f"{where}: {error}") from error
    return PromptRow(values["prompt"], tuple(seeds), others, where)
