"""The size of the package, held: files at the root, lines by folder, large classes, docstrings that are no sentence."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

PACKAGE = Path(__file__).parents[2] / "diffusion_runtime"
BUDGETS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "budgets.yaml").read_text())
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_METHODS, MOST_FIELDS = 20, 20
# A function's docstring begins with its verb, a value's with its noun. A sentence that begins with one of these is
# found by no search.
FRAGMENTS = frozenset("Of Those That As What Whether Whose How Where Why See".split())


def folder_of(path: Path) -> str:
    """Return the folder of the package that holds `path`, "." for its root."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "."


def lines_by_folder() -> Counter[str]:
    counts: Counter[str] = Counter()
    for path in MODULES:
        counts[folder_of(path)] += len(path.read_text().splitlines())
    return counts


def is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)


def large_classes() -> Iterator[str]:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                if methods > MOST_METHODS or sum(map(is_field, node.body)) > MOST_FIELDS:
                    yield f"{path.relative_to(PACKAGE).as_posix()}:{node.name}"


def fragments() -> Iterator[tuple[str, str]]:
    """Yield the folder and the place of every docstring that begins with a fragment."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if text and text.split()[0].strip(",.:") in FRAGMENTS:
                    line = 1 if isinstance(node, ast.Module) else node.lineno
                    yield folder_of(path), f"{path.relative_to(PACKAGE)}:{line}: {text.splitlines()[0]}"


def test_the_root_holds_what_everybody_imports() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= BUDGETS["root_files"]


def test_files_and_lines_stay_within_their_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """Print the change of every folder; the totals are held, so that a line can move between folders."""
    found, known = lines_by_folder(), BUDGETS["lines"]
    changes = {name: found[name] - known.get(name, 0) for name in sorted({*found, *known})}
    with capsys.disabled():
        table = [f"  {name:20} {found[name]:7,} {change:+6}" for name, change in changes.items() if change]
        print(f"\nlines of the package: {found.total():,} in {len(MODULES)} files", *table, sep="\n")
    assert found.total() <= BUDGETS["most_lines"], "raise `most_lines` in budgets.yaml, with the reason in the commit"
    assert len(MODULES) <= BUDGETS["most_files"], "raise `most_files` in budgets.yaml, with the reason in the commit"


def test_large_classes_have_a_reason() -> None:
    found, allowed = set(large_classes()), set(BUDGETS["large_classes"])
    assert found - allowed == set(), f"more than {MOST_METHODS} methods or {MOST_FIELDS} fields"
    assert allowed - found == set(), "no longer large: take the row out of budgets.yaml"


def test_docstrings_are_sentences() -> None:
    found = Counter(folder for folder, _ in fragments())
    allowed = Counter(BUDGETS["fragments"] or {})
    more = {folder for folder in found if found[folder] > allowed[folder]}
    assert [place for folder, place in fragments() if folder in more] == [], f"begins with one of {sorted(FRAGMENTS)}"
    assert {folder for folder in allowed if allowed[folder] > found[folder]} == set(), "lower its row in budgets.yaml"
