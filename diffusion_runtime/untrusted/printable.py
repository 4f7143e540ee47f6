"""Text of strangers for a terminal: without control characters and without bidirectional overrides."""

from __future__ import annotations

import unicodedata

# Embeddings, overrides and isolates, which show the text behind them in another order than it has; marks of direction,
# which Arabic and Hebrew are written with, move nothing but their neighbours.
_REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_LINE_BREAKS = frozenset("\u2028\u2029")


def printable(text: str) -> str:
    """`text` without control characters, which in an untrusted file could drive the terminal, without halves of
    characters, and without what shows it in another order; lines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c for c in text if c in "\n\t" or not _is_hostile(c))


def _is_hostile(character: str) -> bool:
    if character in _REORDERING or character in _LINE_BREAKS:
        return True
    return unicodedata.category(character) in ("Cc", "Cs")
