"""No family's name stands outside its folder, the registry and configs/: what families share has names of the field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "diffusion_runtime"
FAMILIES = sorted(path.parent.name for path in (PACKAGE / "models").glob("*/family.py"))
# The registry names what it registers, and the bridge knows the models of diffusers by their classes.
EXEMPT = ("models/registry.py", "diffusers_bridge/")
# In a family.py: the family that it is declared from, by dataclasses.replace.
DECLARED_FROM = re.compile(r"^from diffusion_runtime\.models\.\w+\.family import FAMILY as \w+$", re.MULTILINE)
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if not path.relative_to(PACKAGE).as_posix().startswith(EXEMPT))


def test_there_are_families() -> None:
    assert {"wan", "flux1", "qwen_image", "hunyuan_video", "z_image"} <= set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_named_in_its_own_folder_alone(family: str) -> None:
    """In code: imports, identifiers and strings. A docstring may name a model as an example."""
    folder = PACKAGE / "models" / family
    name = re.compile(rf"models\.{family}\b|\b{family}\.|\b{family}_(?!\d)|['\"]{family}['\"]")
    for path in MODULES:
        if folder in path.parents:
            continue
        is_declaration = path.name == "family.py"
        for number, line in enumerate(_code_lines(path), 1):
            if is_declaration and DECLARED_FROM.search(line):
                continue
            assert not name.search(line), f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"


def _code_lines(path: Path) -> list[str]:
    """Lines with comments and docstrings blanked."""
    text = re.sub(r'""".*?"""', lambda match: "\n" * match.group().count("\n"), path.read_text(), flags=re.DOTALL)
    return [line.partition("#")[0] for line in text.splitlines()]


def test_every_family_has_the_same_few_files() -> None:
    """One that is declared from another family has its family.py alone."""
    for family in FAMILIES:
        if DECLARED_FROM.search((PACKAGE / "models" / family / "family.py").read_text()):
            continue
        names = {path.name for path in (PACKAGE / "models" / family).glob("*.py")}
        expected = {"config.py", "transformer.py", "weights.py", "family.py", "lora_names.py"}
        assert expected <= names, f"{family} lacks {sorted(expected - names)}"
