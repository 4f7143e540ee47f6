"""Phrases of a closed vocabulary, and the reading of a prompt that is made of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

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
            length = self._length_at(tokens, at)
            if length == 0:
                return None
            meanings.append(self._meanings[tuple(tokens[at : at + length])])
            at += length
        return meanings

    def strays(self, text: str) -> dict[str, str]:
        """Return the words of a text that stand in no phrase there, and that longer phrases have: each with the
        shortest of these."""
        tokens, found, at = _TOKEN.findall(text.lower()), {}, 0
        while at < len(tokens):
            length, word = self._length_at(tokens, at), tokens[at]
            if length == 0 and word in self._shortest_with:
                found[word] = self._shortest_with[word]
            at += max(1, length)
        return found

    def _length_at(self, tokens: Sequence[str], at: int) -> int:
        """Return the number of tokens of the longest phrase that begins there, 0 for none."""
        lengths = range(min(self._longest, len(tokens) - at), 0, -1)
        return next((length for length in lengths if tuple(tokens[at : at + length]) in self._meanings), 0)

    @functools.cached_property
    def _shortest_with(self) -> dict[str, str]:
        """The shortest phrase that has a word."""
        found: dict[str, str] = {}
        for phrase in sorted(self._meanings, key=lambda phrase: (len(phrase), len("".join(phrase)))):
            for word in filter(str.isalnum, phrase):
                found.setdefault(word, " ".join(phrase))
        return found
