"""Phrases of a closed vocabulary, and the reading of a prompt that is made of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_MAX_CHARACTERS = 400
_TOKEN = re.compile(r"[a-z0-9]+|[.,;:]")

Meaning = tuple[str, str]
"""(kind, value) of a phrase."""


class Phrases:
    """Meanings by phrase. Of two phrases that begin alike the longer one is read."""

    def __init__(self, meanings: Mapping[str, Meaning]) -> None:
        self._meanings = {tuple(_TOKEN.findall(phrase)): meaning for phrase, meaning in meanings.items()}
        self._longest = max(map(len, self._meanings))

    def read(self, text: str) -> list[Meaning] | None:
        """Return the meanings of a prompt in order; None for one that is too long or has a word of no phrase."""
        lowered = text.lower()
        if len(text) > _MAX_CHARACTERS or _TOKEN.sub("", lowered).strip():
            return None
        tokens, meanings, at = _TOKEN.findall(lowered), [], 0
        while at < len(tokens):
            for length in range(min(self._longest, len(tokens) - at), 0, -1):
                meaning = self._meanings.get(tuple(tokens[at : at + length]))
                if meaning is not None:
                    meanings.append(meaning)
                    at += length
                    break
            else:
                return None
        return meanings
