"""Prompts and seeds in every form."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from tables import table

from diffusion_runtime.cli.prompt_file import collect_prompts
from diffusion_runtime.cli.prompt_rows import PromptRow
from diffusion_runtime.cli.prompts import parse_seeds
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
    with pytest.raises(RequestError, match="as in 'a red circle'"):
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


def test_rows_of_a_csv_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.CSV"
    file.write_text(
        '\ufeffprompt, seed,num_frames,guidance_scale\r\n"a star, and\na ""ring""",1-2,1,\r\n,,,\r\nb,,,2.5\r\nc\r\n',
        encoding="utf-8",
    )
    assert collect_prompts(["typed"], [], str(file)) == [
        "typed",
        PromptRow('a star, and\na "ring"', (1, 2), {"num_frames": 1}, f"{file}:2"),
        PromptRow("b", (), {"guidance_scale": 2.5}, f"{file}:5"),
        PromptRow("c", (), {}, f"{file}:6"),
    ]


@table(
    "name, content, line, expected",
    [
        (
            "rows.jsonl",
            '{"prompt": "a"}\n{"prompt": "b", "hight": 64}',
            2,
            "unknown field 'hight'. Did you mean 'height'",
        ),
        ("rows.jsonl", '\n\n{"prompt": "a", "height": 0}', 3, "height: expected a whole number of 1 or more, got 0"),
        ("rows.jsonl", '{"prompt": "a", "seed": "x"}', 1, "seed: expected numbers from 0"),
        ("rows.jsonl", '{"prompt": "a", "seed": true}', 1, "seed: expected numbers from 0"),
        ("rows.jsonl", '{"height": 64}', 1, "the prompt is missing"),
        ("rows.ndjson", '{"prompt": ["a", "b"]}', 1, "prompt: expected a text"),
        ("rows.jsonl", '{"prompt": "a", "prompt": "b"}', 1, "not valid JSON: key 'prompt' is given twice"),
        (
            "rows.jsonl",
            '{"prompt": "a"}\na star\n',
            2,
            "not valid JSON: Expecting value at line 1, column 1; expected one object",
        ),
        ("rows.jsonl", "[" * 40 + "]" * 40, 1, "nests more than"),
        ("rows.jsonl", '"a star"', 1, "expected an object"),
        ("rows.csv", "prompt,hight\na,64\n", 1, "unknown column 'hight'. Did you mean 'height'"),
        ("rows.csv", "text;seed\na;1\n", 1, "unknown column 'text;seed'"),
        ("rows.csv", "seed\n1\n", 1, "none is 'prompt'"),
        ("rows.csv", "prompt,prompt\n", 1, "column 'prompt' is given twice"),
        ("rows.csv", "prompt,seed\n\na star, a ring,1\n", 3, "3 cells for 2 columns"),
        ("rows.csv", "prompt,height\na,tall\n", 2, "height: expected a whole number"),
        ("rows.csv", "prompt,seed\n,1\n", 2, "the prompt is missing"),
        ("rows.csv", 'prompt\n"a star\n', 2, "not valid CSV"),
        ("rows.csv", f"prompt\n{'x' * 200_000}\n", 2, "not valid CSV: field larger than field limit"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(name: str, content: str, line: int, expected: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    with pytest.raises((ConfigError, RequestError)) as error:
        collect_prompts([], [], str(file))
    assert str(error.value).startswith(f"{file}:{line}: ")
    assert expected in str(error.value)
