"""Text of strangers for a terminal: without control characters."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """`text` without control characters, which in an untrusted file could drive the terminal; lines and tabs stay."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs"))
