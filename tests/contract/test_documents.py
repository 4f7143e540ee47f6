"""Paths in the documentation: every file or folder that README, ARCHITECTURE, CONTRIBUTING and docs/ name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "diffusion_runtime"
# These name files of this repository alone; docs/ also name those of other projects, models and readers.
OWN = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
DOCUMENTS = [*OWN, *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("benchmarks/", "configs/", "constraints/", "diffusion_runtime/", "docs/", "scripts/", "tests/")
# What a path looks like inside `code` or a table of files; <family> stands for any name.
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
PATH = re.compile(r"(?<![\w./~{$-])[\w<>*.-]+(?:/[\w<>*.-]+)*(?:\.(?:py|yaml|json|md|txt)\b|/(?![\w<]))")
MADE_BY_COMMANDS = {".venv/", "stars/"}


def named_paths(document: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and paths as they are written."""
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        for path in LINK.findall(line):
            yield number, path
        for path in PATH.findall(LINK.sub("", line)):
            if path not in MADE_BY_COMMANDS and (document in OWN or path.startswith(FOLDERS)):
                yield number, path


def exists(path: str, document: Path) -> bool:
    """From the document's folder, the root or the package; a name or the end of a path anywhere in the repository."""
    pattern = re.sub(r"<\w+>\**", "*", path).rstrip("/")
    inside = [PACKAGE.rglob(pattern), *((ROOT / folder).rglob(pattern) for folder in ("benchmarks", "tests"))]
    found = [document.parent.glob(pattern), ROOT.glob(pattern)] if not pattern.startswith("..") else []
    return (document.parent / path).exists() or any(any(matches) for matches in (*found, *inside))


def test_every_path_that_a_document_names_exists() -> None:
    missing = [
        f"{document.name}:{number}: {path}"
        for document in DOCUMENTS
        for number, path in named_paths(document)
        if not exists(path, document)
    ]
    assert missing == []


def test_paths_are_found_in_text_tables_and_links(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("`docs/gone.md`, [page](docs/far.md#part)\nbenchmarks/none/  a table of files\n")
    assert list(named_paths(document)) == [(1, "docs/far.md"), (1, "docs/gone.md"), (2, "benchmarks/none/")]
    assert not any(exists(path, document) for _, path in named_paths(document))


# Ratios of speed in prose and tables of claims: README and the pages that one chooses by.
CLAIMS = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("faster.md", "choosing_a_backend.md"))]
RATIO = re.compile(r"(?<![\w./])\d+(?:\.\d+)?x(?![\w./])")
BASELINE = re.compile(r"\b(over|than|beside)\b")
STRONGEST = re.compile(r"FlashAttention-4.*`torch_sdpa`", re.DOTALL)


def claims_without_baseline(text: str) -> list[str]:
    """Paragraphs and table rows with a ratio of speed that name nothing it is over; those of sparse attention per call
    must name FlashAttention-4 before torch_sdpa, and times of diffusers say whether it was compiled."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    pieces = [piece for block in text.split("\n\n") for piece in re.split(r"\n(?=[|-])", block)]
    bare = [piece for piece in pieces if RATIO.search(piece) and not BASELINE.search(piece)]
    bare += [piece for piece in pieces if "per call" in piece and RATIO.search(piece) and not STRONGEST.search(piece)]
    return bare + [piece for piece in pieces if re.search(r"\(diffusers: \d", piece)]


def test_every_ratio_names_its_baseline_the_strongest_first() -> None:
    found = {str(page): claims_without_baseline(page.read_text(encoding="utf-8")) for page in CLAIMS}
    assert not any(found.values()), found
    for claim in (
        "- faster by 3.1x",
        "| a step | 1.2x |",
        "- 3.1x over `torch_sdpa` per call",
        "| 84 ms (diffusers: 170) |",
    ):
        assert claims_without_baseline(claim), claim


# The longest a document may be, in lines.
# spellings.md is a table, written from spellings.yaml, in which one looks a name up.
MOST_LINES = {"README.md": 120, "ARCHITECTURE.md": 200, "CHANGELOG.md": 40, "docs/spellings.md": 340}
MOST_LINES_OF_A_PAGE = 250


def test_documents_are_short() -> None:
    documents = {*(ROOT / name for name in MOST_LINES), *(ROOT / "docs").glob("*.md")}
    lengths = {
        str(document.relative_to(ROOT)): len(document.read_text(encoding="utf-8").splitlines())
        for document in documents
    }
    too_long = {name: length for name, length in lengths.items() if length > MOST_LINES.get(name, MOST_LINES_OF_A_PAGE)}
    assert too_long == {}


# Links in texts of the package: help, messages, comments of configs.
PAGE_NAME = re.compile(r"\bdocs/(\w+\.md)")


def test_pages_that_the_package_names_exist() -> None:
    texts = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.yaml"), *PACKAGE.rglob("*.json"), *(ROOT / "configs").glob("*")]
    missing = {
        f"{path.relative_to(ROOT)}: {page}"
        for path in texts
        for page in PAGE_NAME.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / "docs" / page).is_file()
    }
    assert missing == set()
