"""Limits that every untrusted document must keep, in any format."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

# Far more than a config, an index or a recipe nests; far less than a recursive reader can handle.
MAX_DEPTH = 32
# 2**63 has 19 digits, and a float64 is exact with 17; a longer number was not written by a program of this kind.
MAX_NUMBER_CHARACTERS = 64

# Lists and mappings of one document; a few that contain each other repeatedly stand for any number (a YAML bomb).
_MAX_HOLDERS = 1_000_000


class DocumentError(ValueError):
    """A text that is not a valid document, or exceeds a limit; the message does not name the file."""


def check_depth(value: object) -> None:
    """Raises DocumentError for lists and mappings nested more than MAX_DEPTH deep, or containing themselves."""
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
