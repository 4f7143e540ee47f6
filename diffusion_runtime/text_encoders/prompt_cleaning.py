"""Prompt cleaning before tokenization: the same as in diffusers' Wan pipeline."""

from __future__ import annotations

import html
import importlib.util
import re

# The separators U+001C to U+001F are whitespace in Python, but not in Unicode, which diffusers follows here.
_WHITESPACE = re.compile(r"[^\S\x1c-\x1f]+")


def clean_prompt(prompt: str) -> str:
    """The prompt without html entities and with single spaces; mojibake is repaired where ftfy is installed."""
    if importlib.util.find_spec("ftfy") is not None:
        import ftfy

        prompt = ftfy.fix_text(prompt)
    prompt = html.unescape(html.unescape(prompt)).strip()
    return _WHITESPACE.sub(" ", prompt).strip()
