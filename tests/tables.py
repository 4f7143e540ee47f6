"""Tests over a table: one collected test runs every case and reports all that fail.

Where `pytest.mark.parametrize` makes one test per case, `table` makes one of all: a suite of thousands of small cases
is collected and read as the few statements that it is. `parametrize` remains right for cases that take a while each.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# What a failed, a skipped and a broken case raise. The outcomes of pytest are no Exceptions.
OUTCOMES = (Exception, pytest.fail.Exception, pytest.skip.Exception)
Rows = list[tuple[str, dict[str, Any]]]


def table(
    names: str | Sequence[str], cases: Iterable[Any], ids: Iterable[object] | Callable[[Any], object] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Takes what `pytest.mark.parametrize` takes. Tables that are stacked multiply.

    Every case has a `tmp_path` and a `monkeypatch` of its own, and finds `caplog`, `capsys` and `recwarn` empty; other
    fixtures are made once. A skipped case fails: it would be silent. Raises ValueError for a table without cases.
    """
    fields = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows: Rows = []
    cases = list(cases)
    name = _short if ids is None else ids
    labels = [name(case) for case in cases] if callable(name) else name
    for case, label in zip(cases, labels, strict=True):
        values = (case,) if len(fields) == 1 else tuple(case)
        rows.append((str(label), dict(zip(fields, values, strict=True))))
    if not rows:
        raise ValueError(f"no cases of {', '.join(fields)}")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        inner, inner_rows = getattr(test, "table", (test, [("", {})]))
        product = [
            (f"{label}, {other}".rstrip(", "), values | others)
            for (label, values), (other, others) in itertools.product(rows, inner_rows)
        ]
        signature = inspect.signature(inner)

        @functools.wraps(inner)
        def run(**fixtures: Any) -> None:
            __tracebackhide__ = True
            _run_cases(inner, product, fixtures)

        own = [parameter for name, parameter in signature.parameters.items() if name not in product[0][1]]
        run.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        run.table = (inner, product)  # type: ignore[attr-defined]
        return run

    return decorate


def _run_cases(test: Callable[..., None], rows: Rows, fixtures: dict[str, Any]) -> None:
    __tracebackhide__ = True
    failures: list[tuple[str, BaseException]] = []
    for number, (label, values) in enumerate(rows):
        with _fresh(fixtures, number) as of_case:
            try:
                test(**values, **of_case)
            except OUTCOMES as error:
                error.add_note(f"case {number}: {label}")
                failures.append((label, error))
    if failures:
        listed = "\n".join(f"  {label}: {type(error).__name__}: {_first_line(error)}" for label, error in failures)
        raise BaseExceptionGroup(
            f"{len(failures)} of {len(rows)} cases failed:\n{listed}\n", [error for _, error in failures]
        )


@contextmanager
def _fresh(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    of_case = dict(fixtures)
    if "tmp_path" in fixtures:
        folder: Path = fixtures["tmp_path"] / f"case_{number}"
        folder.mkdir()
        of_case["tmp_path"] = folder
    if "caplog" in fixtures:
        fixtures["caplog"].clear()
    for name in {"capsys", "capfd"} & fixtures.keys():
        fixtures[name].readouterr()
    if "recwarn" in fixtures:
        fixtures["recwarn"].clear()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if "monkeypatch" in fixtures:
            of_case["monkeypatch"] = monkeypatch
        yield of_case


def _short(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_short, value))
    text = str(getattr(value, "__name__", None) or repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
