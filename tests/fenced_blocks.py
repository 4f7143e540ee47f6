"""The fenced code blocks of the documentation, for the tests that run them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
# The first line of a block that no CPU can run says so, and why: readers see it too.
NOT_RUN = "# not run by the tests: "


@dataclass(frozen=True)
class Block:
    """A fenced block. line: of its first line in the document."""

    document: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    @property
    def is_run(self) -> bool:
        return not self.text.startswith(NOT_RUN)

    def command_lines(self) -> Iterator[list[str]]:
        """The words of each command of a shell block, without comments; `a && b` is two."""
        for line in self.text.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|")
            lexer.whitespace_split, lexer.commenters = True, "#"
            words: list[str] = []
            for word in lexer:
                if set(word) <= set("&;|"):
                    yield words
                    words = []
                else:
                    words.append(word)
            if words:
                yield words


def blocks(*languages: str) -> list[Block]:
    """Of README, CONTRIBUTING and every page of docs/, in their order."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            if match[1] in languages:
                line = text.count("\n", 0, match.start(2)) + 1
                found.append(Block(document, line, match[1], match[2]))
    return found
