"""Files of the page: HTML, style sheet and ES modules, as `serve` sends them and as one file without an address."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_runtime.untrusted.files import read_file

_MAX_BYTES = 2**20
_FOLDER = Path(__file__).parent
_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
# The components of a page of one file, each behind those that it imports.
_COMPONENTS = ("dom.js", "plots.js", "players.js", "views.js", "single.js")
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./\w+\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=const|function|async function|class)", re.MULTILINE)
# Texts of a line; a text within another one's `${}`; punctuation of which blanks are no part.
_TEXT = re.compile(r"""("(?:[^"\\]|\\.)*"|`[^`]*`)""")
_NESTED_TEXT = re.compile(r"`[^`]*\$\{[^}]*`")
_BLANKS = re.compile(r" ?(=>|===|!==|&&|\|\||\?\?|[=,:?{}()<>*;]) ?")
# Pages of one file hold their clips as data: URLs, and reach nothing else.
_SINGLE_POLICY = "default-src 'none'; img-src data:; media-src data:; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class PageFiles:
    """index: the HTML, in which the other files are named under `digest`, that of all of them: a browser never takes
    files of two versions together. files: content and media type, by name."""

    index: bytes
    digest: str
    files: Mapping[str, tuple[bytes, str]]


@functools.cache
def page_files() -> PageFiles:
    """Return the files of the page that `serve` shows."""
    found = [path for path in sorted(_FOLDER.iterdir()) if _is_sent(path)]
    shorten = {".js": _shortened, ".css": _short_style}
    files = {path.name: (shorten[path.suffix](_read(path)).encode(), _TYPES[path.suffix]) for path in found}
    index = _read(_FOLDER / "index.html").encode()
    digest = hashlib.sha256(b"".join((index, *(content for content, _ in files.values())))).hexdigest()[:16]
    return PageFiles(index.replace(b"{digest}", digest.encode()), digest, files)


def _read(path: Path) -> str:
    return read_file(path, max_bytes=_MAX_BYTES).decode()


def _shortened(text: str) -> str:
    """Return a file without indentation, lines of comments, and blanks beside punctuation outside of texts: a sixth of
    its bytes. No text in it is of two lines."""
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(_short_line(line) for line in lines if line and not line.startswith("//")) + "\n"


def _short_line(line: str) -> str:
    if _NESTED_TEXT.search(line):
        return line
    return "".join(part if at % 2 else _BLANKS.sub(r"\1", part) for at, part in enumerate(_TEXT.split(line)))


def _short_style(text: str) -> str:
    """Return a style sheet without comments and blanks beside punctuation, of which none of ours is of use."""
    return re.sub(r"\s*([{};,])\s*|(?<=:) ", lambda found: found[1] or "", re.sub(r"/\*.*?\*/", "", text))


def _is_sent(path: Path) -> bool:
    return path.suffix in _TYPES and path.name != "single.js"


def single_page(values: Mapping[str, Any]) -> str:
    """Return a page of one file that shows `values`: what `explain` or `compare` found, as JSON, with a `title`. Its
    policy allows this script and this style sheet alone."""
    modules = (_EXPORT.sub("", _IMPORT.sub("", _read(_FOLDER / name))) for name in _COMPONENTS)
    script, style = _shortened("".join(modules)), _short_style(_read(_FOLDER / "page.css"))
    # A `<` in a text could end the element that holds it.
    data = json.dumps(values, allow_nan=False).replace("<", "\\u003c")
    policy = f"{_SINGLE_POLICY}; script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>diffusion-runtime</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<main id="main"></main>\n<noscript>This page needs JavaScript.</noscript>\n'
        f'<script type="application/json" id="data">{data}</script>\n<script type="module">{script}</script>\n'
        "</body>\n</html>\n"
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
