"""Whether torch, the driver and the GPUs fit each other, read off values of machines that are not here."""

from __future__ import annotations

import dataclasses
import json
import os

import torch
from tables import table

from diffusion_runtime.diagnosis.machine import (
    Driver,
    Gpu,
    Machine,
    inspect_machine,
    machine_problems,
    parse_version,
    runs_on,
)

H200 = Gpu("NVIDIA H200", (9, 0), 150 * 2**30, 149 * 2**30)
DRIVER = Driver("580.65.06", (13, 0), ("NVIDIA H200",))
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
GOOD = Machine(
    python="3.12.3",
    executable="/usr/bin/python3",
    system="Linux x86_64",
    num_cpus=16,
    memory=128 * 2**30,
    torch_version="2.11.0+cu130",
    torch_build="CUDA 13.0",
    cuda_build=(13, 0),
    architectures=ARCHITECTURES,
    driver=DRIVER,
    gpus=(H200,),
)
CPU_BUILD = {"torch_build": "CPU", "cuda_build": None, "gpus": (), "architectures": ()}


@table(
    "changes",
    [
        {},
        # Within a CUDA generation every driver serves every build.
        {"driver": Driver("525.85.12", (12, 0), ("A100",)), "cuda_build": (12, 8)},
        {"driver": dataclasses.replace(DRIVER, cuda=(13, 1)), "cuda_build": (12, 6)},
        # No GPU is no problem, whatever torch is built for.
        {**CPU_BUILD, "driver": None},
        {"driver": None, "gpus": (), "cuda_error": "Found no NVIDIA driver on your system."},
        {"driver": dataclasses.replace(DRIVER, gpus=()), "gpus": ()},
        {**CPU_BUILD, "torch_build": "ROCm 7.0"},
    ],
)
def test_machines_without_a_problem(changes: dict[str, object]) -> None:
    assert machine_problems(dataclasses.replace(GOOD, **changes)) == []  # type: ignore[arg-type]


@table(
    ("changes", "what", "fix"),
    [
        (CPU_BUILD, "is a build for the CPU; the driver sees NVIDIA H200", "/whl/cu130"),
        (
            {"driver": Driver("535.54.03", (12, 2), ("NVIDIA H200",)), "gpus": ()},
            "driver 535.54.03 supports CUDA up to 12.2, torch 2.11.0+cu130 is built for CUDA 13.0",
            "update the driver to 580.65.06 or newer, or: pip install --force-reinstall torch --index-url "
            "https://download.pytorch.org/whl/cu126",
        ),
        ({"gpus": (), "visible_devices": ""}, "CUDA_VISIBLE_DEVICES is '', which hides", "unset CUDA_VISIBLE_DEVICES"),
        ({"gpus": (), "cuda_error": "system not yet initialized"}, "does not: system not yet init", "nvidia-smi"),
        (
            {"gpus": (dataclasses.replace(H200, name="Tesla V100", capability=(7, 0)),)},
            "has no kernels for Tesla V100 (sm_70)",
            "pip install --upgrade torch",
        ),
    ],
)
def test_what_is_wrong_and_what_to_type(changes: dict[str, object], what: str, fix: str) -> None:
    (problem,) = machine_problems(dataclasses.replace(GOOD, **changes))  # type: ignore[arg-type]
    assert what in problem.what
    assert fix in problem.fix
    assert not problem.is_failure


@table(
    ("architectures", "capability", "expected"),
    [
        (("sm_80",), (8, 0), True),
        (("sm_80",), (8, 9), True),
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_120a",), (12, 1), False),
        (("sm_100f",), (10, 3), True),
        (("compute_80",), (12, 0), True),
        (("compute_90a",), (10, 0), False),
        (("compute_100",), (9, 0), False),
        ((), (9, 0), True),
    ],
)
def test_which_kernels_run_on_which_chip(
    architectures: tuple[str, ...], capability: tuple[int, int], expected: bool
) -> None:
    assert runs_on(architectures, capability) is expected


def test_versions() -> None:
    assert [parse_version(text) for text in ("13.0", "12.8.1", "13")] == [(13, 0), (12, 8), (13, 0)]


def test_this_machine() -> None:
    machine = inspect_machine()
    assert machine.torch_version == torch.__version__
    assert machine.torch_build.split()[0] in ("CPU", "CUDA", "ROCm")
    assert 1 <= machine.num_cpus <= (os.cpu_count() or 1)
    assert machine.memory is None or machine.memory > 2**28
    assert (machine.gpus != ()) == torch.cuda.is_available()
    assert json.loads(json.dumps(machine.to_dict()))["python"] == machine.python
