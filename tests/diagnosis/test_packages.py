"""What packages lead to; tests/cli/test_doctor.py imports broken ones in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffusion_runtime.diagnosis.packages import NEEDED, PackageCheck, check_packages, package_problems
from diffusion_runtime.hardware import ATTENTION_PACKAGES


def test_missing_packages_are_a_problem_where_they_are_needed() -> None:
    checks = [PackageCheck(name, None, is_needed=name in NEEDED, install=f"get {name}") for name in ATTENTION_PACKAGES]
    assert package_problems(checks) == []
    needed = PackageCheck("diffusers", None, is_needed=True, install="get diffusers")
    (problem,) = package_problems([*checks, needed])
    assert (problem.what, problem.fix) == ("package diffusers is not installed", "get diffusers")


def test_states() -> None:
    assert PackageCheck("triton", None).state == "not installed"
    assert PackageCheck("triton", "3.9.0").state == "ok"
    broken = PackageCheck("triton", "3.9.0", error="ImportError", install="get triton")
    assert broken.state == "broken"
    (problem,) = package_problems([broken])
    assert problem.fix == "pip uninstall triton, or again: get triton"
    assert not problem.is_failure


def test_what_diffusers_loads_its_own_pipelines_with_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "accelerate.py").write_text("raise OSError('libbroken.so: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names: list[str] = []
    problems = package_problems(check_packages(names.append))
    assert "accelerate" in names
    (problem,) = [problem for problem in problems if problem.what.startswith("package accelerate ")]
    assert "libbroken.so" in problem.what
    assert problem.fix == "pip install --force-reinstall accelerate"
