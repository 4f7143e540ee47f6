"""Bytecode of a package whose folder holds none, and gets none from Python, is kept in the cache folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from diffusion_runtime.startup.bytecode import keep_bytecode
keep_bytecode("a_package")
import a_package
print(sys.pycache_prefix)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "site" / "a_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("VALUE = 1\n")
    return folder


def kept_in(package: Path, *flags: str, **variables: str) -> tuple[str, list[str]]:
    """(sys.pycache_prefix of a process that imports the package, the package's files of bytecode in the cache)."""
    cache = package.parents[1] / "cache"
    names = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"PYTHONPATH": f"{package.parent}{os.pathsep}{ROOT}", "DIFFUSION_RUNTIME_CACHE": str(cache)}
    words = [sys.executable, *flags, "-c", SCRIPT]
    done = subprocess.run(words, env=environment | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = cache.joinpath("bytecode").rglob("a_package/*.pyc")
    return done.stdout.strip(), [path.name for path in found]


def test_bytecode_is_kept_where_python_keeps_none(package: Path) -> None:
    prefix, files = kept_in(package, PYTHONDONTWRITEBYTECODE="1")
    assert prefix == str(package.parents[1] / "cache" / "bytecode")
    assert len(files) == 1
    assert not (package / "__pycache__").exists()
    # Bytecode is code: a folder that others can write to is not read.
    os.chmod(prefix, 0o777)
    assert kept_in(package, PYTHONDONTWRITEBYTECODE="1")[0] == "None"


@pytest.mark.parametrize(
    ("flags", "variables", "prefix"),
    [
        ((), {}, "None"),  # Python writes beside the source
        (("-B",), {}, "None"),
        ((), {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/nowhere"}, "/nowhere"),
    ],
)
def test_what_the_user_has_chosen_stays(
    package: Path, flags: tuple[str, ...], variables: dict[str, str], prefix: str
) -> None:
    assert kept_in(package, *flags, **variables) == (prefix, [])


def test_a_package_with_bytecode_is_left_as_it_is(package: Path) -> None:
    assert kept_in(package)[0] == "None"
    assert (package / "__pycache__").is_dir()
    assert kept_in(package, PYTHONDONTWRITEBYTECODE="1") == ("None", [])
