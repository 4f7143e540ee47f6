"""`doctor`, mostly as a process of its own: what is found, what is said, and the exit code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from broken_packages import install_broken_sage, install_crashing_xformers, publish_backends
from cli_support import REPOSITORY, Command, Result, process_environment
from warm_python import run_python

from diffusion_runtime.diagnosis import examination

WITHOUT_GPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


@pytest.fixture(autouse=True)
def no_choice_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIFFUSION_ATTENTION_BACKEND", raising=False)


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what does not depend on packages, each of which is imported in a process of its own."""
    monkeypatch.setattr(examination, "check_packages", lambda *_: [])


# Each package is imported in a process of its own: diffusers and transformers take 6 s of CPU time.
FEW_PACKAGES = """
from diffusion_runtime.diagnosis import packages
packages.PACKAGES = ("safetensors", *packages.ATTENTION_PACKAGES)
from diffusion_runtime.__main__ import main
main()
"""


def doctor(folder: Path, *arguments: str, program: Sequence[str] = ("-m", "diffusion_runtime")) -> Result:
    environment = process_environment(PYTHONPATH=os.pathsep.join([str(REPOSITORY), str(folder)]))
    done = run_python(*program, "doctor", "--device", "cpu", *arguments, cwd=folder, env=environment)
    return Result(done.returncode, done.stdout, done.stderr)


def problems_of(result: Result) -> dict[str, dict[str, object]]:
    """The problems by the name of the backend or package they are about."""
    return {problem["what"].split()[1]: problem for problem in result.json["problems"]}


def test_a_broken_package_that_nobody_asked_for_is_a_problem_and_no_failure(tmp_path: Path) -> None:
    install_broken_sage(tmp_path)
    result = doctor(tmp_path, "--attention-backend", "sdpa")
    assert result.code == 0, result.err
    assert "sageattention   1.0.6    BROKEN: OSError: libbroken.so: cannot open" in result.out
    said = " ".join(result.out.split())
    assert "1. package sageattention 1.0.6 is installed and cannot be imported: OSError: libbroken.so" in said
    assert "fix: pip uninstall sageattention, or again: pip install 'diffusion-runtime[sage]'" in said
    assert "embedded model whole, 11,281,728 parameters" in said
    assert "ffmpeg" in said
    assert any(line.split()[:3] == ["torch_sdpa", "fp32", "19/19"] for line in result.out.splitlines())
    assert max(len(line) for line in result.out.splitlines() if "fix:" not in line) <= 80
    assert result.err.splitlines()[0] == "reading the machine"
    assert "testing torch_sdpa" in result.err
    assert "Defaulting" not in result.err


def test_what_was_asked_for_and_does_not_work(tmp_path: Path) -> None:
    """With a package that cannot be imported, and one that kills the process which imports it: not this one."""
    publish_backends(tmp_path)
    install_broken_sage(tmp_path)
    install_crashing_xformers(tmp_path)
    asked = "torch_sdpa,on_sage,sage_attn_3,on_xformers,wrong_scale"
    result = doctor(tmp_path, "--attention-backend", asked, "--json", "--quiet", program=("-c", FEW_PACKAGES))
    assert (result.code, result.err) == (1, "")
    assert result.json["schema"] == "diffusion_runtime.doctor/1"
    assert result.json["exit_code"] == 1
    problems = problems_of(result)
    assert set(problems) == {"wrong_scale", "on_sage", "sage_attn_3", "sageattention", "on_xformers", "xformers"}
    assert "fails 6 of 6 self-tests; the first (plain, float32, head size 64): the error" in str(
        problems["wrong_scale"]["what"]
    )
    assert "libbroken.so" in str(problems["on_sage"]["what"])
    assert "runs on cuda, not on cpu" in str(problems["sage_attn_3"]["what"])
    ends = "importing xformers.ops ends the process with SIGSEGV"
    assert ends in str(problems["on_xformers"]["what"])
    assert ends in str(problems["xformers"]["what"])
    # diffusers imports the xformers that it finds: that one is a failure, asked for or not.
    assert [name for name, problem in problems.items() if not problem["is_failure"]] == ["sageattention"]
    assert all(problem["fix"] for problem in problems.values())
    tests = result.json["self_tests"]
    # wrong_scale comes behind the one that crashed: the others are tested all the same.
    assert {test["backend"] for test in tests} == {"torch_sdpa", "wrong_scale"}
    assert all(test["passed"] == (test["backend"] == "torch_sdpa") for test in tests)
    states = {package["name"]: package["state"] for package in result.json["packages"]}
    assert (states["sageattention"], states["xformers"], states["flash-attn"]) == ("broken", "broken", "not installed")
    assert result.json["model"]["state"] == "not looked at", "diffusers imports the xformers that it finds"


@WITHOUT_GPU
@pytest.mark.usefixtures("no_packages")
def test_no_gpu_is_said_plainly_and_a_gpu_that_was_asked_for_is_missed(command: Command) -> None:
    asked = command("doctor", "--device", "cuda", "--verbose")
    assert asked.code == 1
    said = " ".join(asked.out.split())
    assert "GPU none that torch can use; the CPU runs everything" in said
    assert "device cannot be used" in said
    assert "1. device: 'cuda' was asked for, and " in said
    assert "fix: diffusion-runtime doctor --device auto" in said


@pytest.mark.usefixtures("no_packages")
def test_every_single_test(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", "sage_attn_3")
    shown = command("doctor", "--device", "cpu", "--attention-backend", "reference", "--verbose")
    assert shown.code == 0
    said = " ".join(shown.out.split())
    assert "padded cross-attention, float32, head size 64 (eager" in said
    assert "DIFFUSION_ATTENTION_BACKEND is 'sage_attn_3', which cannot run here" in said
    assert "fix: unset DIFFUSION_ATTENTION_BACKEND" in said
    assert max(map(len, shown.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--attention-backend", "torch_spda"], "Did you mean 'torch_sdpa'"),
        (["--attention-backend", "fp8"], "Did you mean 'fp8_attn'"),
        (["--device", "gpu"], "device: expected auto, cpu, cuda"),
    ],
)
def test_what_is_no_backend_and_no_device(arguments: list[str], said: str, command: Command) -> None:
    result = command("doctor", *arguments, "--json")
    assert result.code == 2
    assert said in result.said
    assert result.json["schema"] == "diffusion_runtime.doctor/1"


def test_help_fits_and_shows_examples(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = command("doctor", "--help")
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "\n diffusion-runtime doctor --device cuda:1 --json" in shown.out
