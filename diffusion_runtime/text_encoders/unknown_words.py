"""Unknown words of a prompt: the sentence that names them, with the known ones that are nearest."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from diffusion_runtime.errors import shown

# Suggested are words that are spelled at least this much like the first letters of an unknown one; 1 is the same.
_MIN_LIKENESS, _MAX_COMPARED = 0.8, 40
# Unknown words that a remark names: comparing the 5,300 of a prompt of 32,000 letters took 2.7 s on a CPU.
_MAX_NAMED = 10
# Named only where nothing else is: "in a garage" lacks the garage.
_LINKING = frozenset("above among at between by during in near of on over to under".split())


@dataclass(frozen=True)
class Vocabulary:
    """All that a model was trained on. page: lists it. strays: text -> its words that stand in no phrase there, and
    that the model knows within longer phrases alone, each with one of these."""

    page: str
    strays: Callable[[str], Mapping[str, str]]


def unknown_words_remark(
    prompt: str, unknown: Sequence[str], known: Sequence[str], vocabulary: Vocabulary | None = None
) -> str | None:
    """Return the sentence about the words of a prompt that a model does not know; None where it knows all of them.

    unknown: those that its tokenizer does not know. known: see Conditions.known_words.
    """
    strays = {} if vocabulary is None else dict(vocabulary.strays(prompt))
    if unknown or strays.keys() - _LINKING:
        strays = {word: phrase for word, phrase in strays.items() if word not in _LINKING}
    parts = []
    if unknown:
        named = [_with_nearest(word, known) for word in unknown[:_MAX_NAMED]]
        parts.append(f"the model's tokenizer does not know {_listed(named, len(unknown))}")
    if strays:
        named = [f"{word!r} (as in {phrase!r})" for word, phrase in strays.items()][:_MAX_NAMED]
        parts.append(f"the model knows only within phrases {_listed(named, len(strays))}")
    if not parts:
        return None
    # A tokenizer of parts of words lacks a character; what the model makes of the word is not known.
    effect = "; such words are drawn as nothing, or as anything" if known or vocabulary is not None else ""
    where = "" if vocabulary is None else f"; what it knows: {vocabulary.page}"
    return f"prompt {quoted_prompt(prompt)}: {', and '.join(parts)}{effect}{where}"


def quoted_prompt(prompt: str) -> str:
    """Return a prompt in quotes, cut where it is long."""
    return repr(prompt if len(prompt) <= 60 else f"{prompt[:57]}...")


def _listed(named: Sequence[str], count: int) -> str:
    return ", ".join(named) + (f" and {count - len(named)} more" if count > len(named) else "")


def _with_nearest(word: str, known: Sequence[str]) -> str:
    """Quote a word, cut where it is long, with the known ones that are spelled most like it."""
    close = difflib.get_close_matches(word.lower()[:_MAX_COMPARED], known, n=2, cutoff=_MIN_LIKENESS)
    return shown(word) + (f" (nearest: {' or '.join(map(repr, close))})" if close else "")
