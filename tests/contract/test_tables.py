"""The tables of the tests: a case that fails is named, whatever comes before and after it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tables import table


def test_every_case_that_fails_is_named_and_the_others_run() -> None:
    ran = []

    @table("first", [1, 2])
    @table(("second", "third"), [("a", "b"), ("c", "d")])
    def check(first: int, second: str, third: str) -> None:
        ran.append((first, second, third))
        assert (first, second) != (1, "a")
        if second == "c":
            pytest.fail("not that")
        if first == 2:
            pytest.skip("nor that")

    with pytest.raises(BaseExceptionGroup, match="4 of 4 cases failed") as raised:
        check()
    assert ran == [(1, "a", "b"), (1, "c", "d"), (2, "a", "b"), (2, "c", "d")]
    assert [type(error).__name__ for error in raised.value.exceptions] == [
        *("AssertionError", "Failed", "Skipped", "Failed"),
    ]
    assert "1, 'c', 'd': Failed: not that" in str(raised.value)


@table("number", [1, 2])
def test_a_case_has_a_folder_and_a_monkeypatch_of_its_own(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "left").touch()
    assert "LEFT_BY_A_CASE" not in os.environ
    monkeypatch.setenv("LEFT_BY_A_CASE", "1")


def test_a_table_without_cases_is_refused() -> None:
    with pytest.raises(ValueError, match="no cases of name"):
        table("name", [])
