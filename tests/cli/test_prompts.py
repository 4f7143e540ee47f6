"""Prompts and seeds in every form."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from diffusion_runtime.cli.prompts import collect_prompts, parse_seeds
from diffusion_runtime.errors import ConfigError, RequestError


@pytest.mark.parametrize(
    ("values", "seeds"),
    [
        ([], []),
        (["7"], [7]),
        (["1,2"], [1, 2]),
        (["1-4"], [1, 2, 3, 4]),
        (["1", "2"], [1, 2]),
        (["1-2, 5", "2", 9], [1, 2, 5, 9]),
        ([str(2**63 - 1)], [2**63 - 1]),
    ],
)
def test_seeds(values: list[Any], seeds: list[int]) -> None:
    assert parse_seeds(values) == seeds


@pytest.mark.parametrize(
    "value", ["-1", "x", "1.5", "", "1,", "4-1", "1-", str(2**63), "9" * 5000, "0-99999999", True, "٣"]
)
def test_what_is_not_a_seed(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^seed: "):
        parse_seeds([value])


def test_prompts_come_in_the_order_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeff# what to make\n\n  a blue ring \r\n#no\na star, # not a comment here\n", encoding="utf-8")
    assert collect_prompts(["one"], ["two", "three"], str(file)) == [
        "one",
        "two",
        "three",
        "a blue ring",
        "a star, # not a comment here",
    ]


def test_prompts_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a star\n\n# no\na ring"))
    assert collect_prompts([], [], "-") == ["a star", "a ring"]


def test_an_unquoted_prompt_says_how_to_quote_it() -> None:
    with pytest.raises(RequestError, match='generate "a red circle"'):
        collect_prompts(["a", "red", "circle"], [], None)


@pytest.mark.parametrize("prompts", [([""], []), ([], [" \t"])])
def test_an_empty_prompt_is_an_error(prompts: tuple[list[str], list[str]]) -> None:
    with pytest.raises(RequestError, match="empty prompt"):
        collect_prompts(*prompts, None)


@pytest.mark.parametrize(
    ("content", "said"), [(None, "no such file"), (b"# only\n\n", "holds no prompt"), (b"\xff\xfe\x00", "not UTF-8")]
)
def test_a_prompt_file_that_cannot_be_used(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        collect_prompts([], [], str(file))
