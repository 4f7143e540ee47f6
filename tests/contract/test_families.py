"""No family's name stands outside its folder, the registry and configs/: what families share has names of the field.

A family stands on another by a declaration in its package, `BASED_ON = "flux1"`: its files then import the other's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "diffusion_runtime"
# The registry names what it registers, and the bridge knows the models of diffusers by their classes.
EXEMPT = ("models/registry.py", "diffusers_bridge/")
BASED_ON = re.compile(r"^BASED_ON = \"(\w+)\"$", re.MULTILINE)
FILES = {"config.py", "transformer.py", "weights.py", "family.py"}


def families_of(package: Path) -> dict[str, str | None]:
    """Family -> the one it declares to stand on, or None."""
    found: dict[str, str | None] = {}
    for path in sorted((package / "models").glob("*/family.py")):
        declared = BASED_ON.search((path.parent / "__init__.py").read_text())
        found[path.parent.name] = declared and declared[1]
    return found


def strayed_names(package: Path) -> Iterator[str]:
    """Lines that name a family outside its folder, in code: imports, identifiers and strings. A docstring may name a
    model as an example, and a family imports the one it stands on."""
    families = families_of(package)
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        if place.as_posix().startswith(EXEMPT):
            continue
        owner = place.parts[1] if place.parts[0] == "models" and place.parts[1] in families else None
        for number, line in enumerate(_code_lines(path), 1):
            for family in families.keys() - {owner}:
                # Not of a family whose name is longer.
                longer = "".join(rf"|{each[len(family) + 1 :]}\b" for each in families if each.startswith(f"{family}_"))
                name = re.compile(rf"models\.{family}\b|\b{family}\.|\b{family}_(?!\d{longer})|['\"]{family}['\"]")
                if name.search(line) and not (owner and families[owner] == family and _stands_on(family, line)):
                    yield f"{place}:{number}: {line.strip()}"


def _stands_on(family: str, line: str) -> bool:
    imports = re.match(rf"from diffusion_runtime\.models\.{family}(\.\w+)* import ", line)
    return imports is not None or line == f'BASED_ON = "{family}"'


def _code_lines(path: Path) -> list[str]:
    """Lines with comments and docstrings blanked."""
    text = re.sub(r'""".*?"""', lambda match: "\n" * match.group().count("\n"), path.read_text(), flags=re.DOTALL)
    return [line.partition("#")[0] for line in text.splitlines()]


def missing_files(package: Path) -> dict[str, set[str]]:
    """Files that a family lacks: one that stands on another needs its family.py alone."""
    expected = {name: {"family.py"} if base else FILES for name, base in families_of(package).items()}
    found = {name: {path.name for path in (package / "models" / name).glob("*.py")} for name in expected}
    return {name: files - found[name] for name, files in expected.items() if files - found[name]}


def test_there_are_families() -> None:
    assert {"wan", "flux1", "qwen_image", "hunyuan_video", "z_image"} <= families_of(PACKAGE).keys()


def test_a_family_is_named_in_its_own_folder_alone() -> None:
    assert list(strayed_names(PACKAGE)) == []


def test_every_family_has_the_same_few_files() -> None:
    assert missing_files(PACKAGE) == {}


def test_a_family_stands_on_another_that_itself_stands_alone() -> None:
    families = families_of(PACKAGE)
    assert {base for base in families.values() if base} <= {name for name, base in families.items() if base is None}


def test_a_declaration_allows_imports_and_nothing_else(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        path = tmp_path / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    imports = "from diffusion_runtime.models.first.transformer import Blocks\n"
    for name in ("__init__.py", *FILES):
        write(f"first/{name}", "")
    write("second/__init__.py", '"""Blocks of first."""\n\nBASED_ON = "first"\n')
    write("second/family.py", imports)
    assert list(strayed_names(tmp_path)) == []
    assert missing_files(tmp_path) == {}
    # Not the other way, not from elsewhere, and no name that is compared with.
    write("first/config.py", "from diffusion_runtime.models.second.family import FAMILY\n")
    write("shared.py", imports)
    write("second/text.py", 'is_other = name == "first"\n')
    assert [line.partition(":")[0] for line in strayed_names(tmp_path)] == [
        "models/first/config.py",
        "models/second/text.py",
        "models/shared.py",
    ]
    write("second/__init__.py", "")
    assert sum(line.startswith("models/second/family.py") for line in strayed_names(tmp_path)) == 1
    assert missing_files(tmp_path) == {"second": {"config.py", "transformer.py", "weights.py"}}
