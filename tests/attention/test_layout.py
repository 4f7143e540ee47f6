"""TokenLayout: where tokens sit."""

from __future__ import annotations

import pytest
from tables import table

from diffusion_runtime.attention import TokenLayout
from diffusion_runtime.errors import ConfigError


def test_counts() -> None:
    layout = TokenLayout(grid=(2, 3, 4), num_prefix_tokens=5, num_suffix_tokens=6)
    assert layout.num_grid_tokens == 24
    assert layout.num_text_tokens == 11
    assert layout.num_tokens == 35
    assert not layout.has_padding


@table(
    ("layout", "expected"),
    [
        (TokenLayout((1, 2, 2), num_suffix_tokens=3, valid_lengths=(3, 1, 0)), [((0, 7),), ((0, 5),), ((0, 4),)]),
        (
            TokenLayout((1, 2, 2), num_prefix_tokens=3, valid_lengths=(3, 1, 0)),
            [((0, 7),), ((0, 1), (3, 7)), ((3, 7),)],
        ),
        (TokenLayout.text(4, (4, 2, 0)), [((0, 4),), ((0, 2),), ()]),
    ],
)
def test_key_ranges_leave_padding_out(layout: TokenLayout, expected: list[tuple[tuple[int, int], ...]]) -> None:
    assert [layout.key_ranges(sample) for sample in range(3)] == expected
    assert layout.has_padding


def test_full_lengths_are_no_padding() -> None:
    assert not TokenLayout((1, 2, 2), num_suffix_tokens=3, valid_lengths=(3, 3)).has_padding


@table(
    ("arguments", "word"),
    [
        ({"grid": (1, 2)}, "grid"),
        ({"grid": (1, 2, -1)}, "0 or more"),
        ({"grid": (1, 2, 2), "num_suffix_tokens": 3, "valid_lengths": (4,)}, r"0\.\.3"),
        ({"grid": (1, 2, 2), "num_prefix_tokens": 1, "num_suffix_tokens": 1, "valid_lengths": (1,)}, "one side"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        TokenLayout(**arguments)  # type: ignore[arg-type]
