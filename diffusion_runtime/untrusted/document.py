"""What every document of a stranger is held to, whatever it is written in."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

# Far more than a config, an index or a recipe nests; far less than what a recursive reader can walk.
MAX_DEPTH = 32
# 2**63 has 19 digits, and a float64 is exact with 17; what is longer was not written by a program of this kind.
MAX_NUMBER_CHARACTERS = 64

# Lists and mappings of one level; a few that hold each other again and again stand for any number.
_MAX_HOLDERS = 1_000_000


class DocumentError(ValueError):
    """A text that is not the document it should be, or is past a limit; the message does not name the file."""


def check_depth(value: object) -> None:
    """Raises DocumentError for lists and mappings nested more than MAX_DEPTH deep, or without end: in themselves."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        holders = (item for outer in level for item in _inner(outer) if isinstance(item, Mapping | list | tuple))
        level = list(itertools.islice(holders, _MAX_HOLDERS + 1))
        if not level:
            return
        if len(level) > _MAX_HOLDERS:
            raise DocumentError(f"it holds more than {_MAX_HOLDERS} lists and mappings")
    raise DocumentError(f"it nests more than {MAX_DEPTH} levels deep")


def _inner(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
