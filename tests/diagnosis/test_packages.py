"""What packages lead to; tests/cli/test_doctor.py imports broken ones in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffusion_runtime.core.hardware import ATTENTION_PACKAGES
from diffusion_runtime.diagnosis import examination, packages
from diffusion_runtime.diagnosis.examination import examine
from diffusion_runtime.diagnosis.packages import NEEDED, PACKAGES, PackageCheck, check_packages, package_problems


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
    assert "accelerate" in PACKAGES
    # Of all packages, one: each is imported in a process of its own.
    monkeypatch.setattr(packages, "PACKAGES", ("accelerate",))
    problems = package_problems(check_packages(lambda _: None))
    (problem,) = [problem for problem in problems if problem.what.startswith("package accelerate ")]
    assert "libbroken.so" in problem.what
    assert problem.fix == "pip install --force-reinstall accelerate"


def test_a_package_that_keeps_diffusers_from_being_imported_is_a_failure_that_says_which_to_remove() -> None:
    error = "ModuleNotFoundError: No module named 'flash_attn.flash_attn_interface'"
    both = [PackageCheck("xformers", "0.0.35", error=error), PackageCheck("flash-attn-4", "4.0.0b36")]
    (problem,) = package_problems(both)
    assert problem.is_failure
    assert problem.what == (
        f"package xformers 0.0.35 is installed and cannot be imported: {error}; diffusers imports it wherever it is "
        "installed, so nothing that needs diffusers can be loaded. It takes flash-attn-4 4.0.0b36 for FlashAttention-2"
    )
    assert problem.fix == "pip uninstall xformers, which keeps the faster fa4; or pip uninstall flash-attn-4"
    (alone,) = package_problems([PackageCheck("xformers", "0.0.35", error="OSError: no CUDA 12")])
    assert (alone.is_failure, alone.fix) == (True, "pip uninstall xformers")


def test_the_embedded_model_is_not_called_damaged_where_diffusers_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [PackageCheck("xformers", "0.0.35", error="OSError: no CUDA 12"), PackageCheck("diffusers", "0.42.1")]
    monkeypatch.setattr(examination, "check_packages", lambda *_: found)
    diagnosis = examine("cpu", ["reference"], tmp_path, lambda stage, what: None)
    assert diagnosis.exit_code == 1
    assert diagnosis.model.state == "not looked at"
    (problem,) = [problem for problem in diagnosis.problems if problem.is_failure]
    assert (problem.what.split()[1], problem.fix) == ("xformers", "pip uninstall xformers")
