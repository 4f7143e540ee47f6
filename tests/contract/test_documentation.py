"""What pages say of the code is what the code says: backends, platform defaults, environment variables, the index."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

from diffusion_runtime.attention.backends.packages import PackageBackend
from diffusion_runtime.attention.backends.registry import available_names, find_backend
from diffusion_runtime.attention.select import platform_candidates
from diffusion_runtime.core.hardware import Hardware

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
VARIABLE = re.compile(r"[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+_?|RANK|CXX|PYTHON[A-Z]{3,}")


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def environment_variables(folder: Path) -> dict[str, str]:
    """Name -> file, of texts that look like a variable's name in modules that read or hand on the environment."""
    found = {}
    for path in folder.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "os.environ" not in source and "_VARIABLE = " not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
                found[node.value] = path.name
    # Names of os.sysconf.
    return {name: path for name, path in found.items() if not name.startswith("SC_")}


def test_every_environment_variable_is_documented(tmp_path: Path) -> None:
    variables = environment_variables(ROOT / "diffusion_runtime")
    assert {"DIFFUSION_ATTENTION_BACKEND", "DIFFUSION_RUNTIME_CACHE", "HF_HUB_OFFLINE", "RANK"} <= set(variables)
    text = page("environment.md")
    missing = {name: path for name, path in variables.items() if f"`{name}`" not in text}
    assert missing == {}, "docs/environment.md says nothing of these"
    (tmp_path / "new.py").write_text("import os\nos.environ.get('DIFFUSION_NEW')\n")
    assert environment_variables(tmp_path) == {"DIFFUSION_NEW": "new.py"}


def test_variables_in_the_page_exist() -> None:
    tables = [line.split("|")[1] for line in page("environment.md").splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`(\w+)`", " ".join(tables)))
    assert named == set(environment_variables(ROOT / "diffusion_runtime"))


def test_the_table_of_backends_is_what_they_declare() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "write_backend_table.py"))
    text = page("backends.md")
    assert script["START"] + script["table"]() + script["END"] in text, "python scripts/write_backend_table.py"
    assert f"**{len(available_names())} attention backends**" in (ROOT / "README.md").read_text(encoding="utf-8")
    for name in available_names():
        backend = find_backend(name)
        # A command that a refusal names is on the page, in whole or in its parts.
        if isinstance(backend, PackageBackend):
            commands = re.split(r" && |, or ", backend.install)
            assert any(command in text for command in commands), (name, backend.install)


def test_platform_defaults_are_those_of_selection() -> None:
    rows = [
        re.findall(r"`(\w+)`", line.split("|")[2])
        for line in page("environment.md").partition("## Platform defaults")[2].splitlines()
        if line.startswith("| ") and "`torch_sdpa`" in line
    ]

    def order(platform: str, capability: tuple[int, int] | None = None) -> list[str]:
        return list(platform_candidates(Hardware(platform, platform, capability, (9, 10), "2.13.0")))

    assert rows == [
        order("cpu"),
        order("cuda", (9, 0)),
        order("cuda", (12, 0)),
        order("cuda", (7, 5)),
        order("rocm"),
        order("mps"),
    ]
    assert order("cuda", (8, 0)) == order("cuda", (8, 9)) == order("cuda", (9, 0))
    assert order("cuda", (10, 0)) == order("cuda", (10, 3)) == order("cuda", (12, 0)) == order("cuda", (12, 1))
    assert order("xpu") == order("npu") == order("mps")


def test_the_index_names_every_page_once() -> None:
    listed = re.findall(r"^- \[[^\]]+\]\((\w+)\.md\)", page("index.md"), flags=re.MULTILINE)
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert sorted(listed) == sorted(pages)
