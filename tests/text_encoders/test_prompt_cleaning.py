"""Cleaned prompts equal those of diffusers' Wan pipeline."""

from __future__ import annotations

import sys

import pytest
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

from diffusion_runtime.text_encoders.t5 import clean_prompt

PROMPTS = [
    "a red circle moving left",
    "  two \t spaces\n\nand   lines ",
    "caf\u00c3\u00a9 &amp;amp; &lt;bar&gt;",
    "<b>two levels</b> &amp;lt; and &amp;amp;lt;",
    "non\u00a0breaking\u2003and\u3000wide",
    "separators\x1c\x1d\x1e\x1finside\x0b\x0c\x85",
    "\x1c at the edge \x1f",
    "\u201cquotes\u201d \u2026 \ufb01ne \U0001f600",
    "",
    " ",
    "&nbsp;",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_equals_diffusers(prompt: str) -> None:
    assert clean_prompt(prompt) == prompt_clean(prompt)


def test_every_whitespace_character_is_treated_as_diffusers_does() -> None:
    different = [
        hex(code)
        for code in range(sys.maxunicode + 1)
        if (chr(code).isspace() or code < 0x100) and clean_prompt(f"a{chr(code)}b") != prompt_clean(f"a{chr(code)}b")
    ]
    assert different == []
