"""Dry runs for devices that are not here: their dtype, their backends, their memory; what is said and refused."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from cli_support import Command
from tables import table

from diffusion_runtime import RuntimeConfig
from diffusion_runtime.core.hardware import Hardware, installed_packages
from diffusion_runtime.core.planned_device import NAMED_CARDS, named_device
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.loading import inspect_pipeline, prepare

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, which is planned for")


def words_of(text: str) -> str:
    return " ".join(text.split())


@WITHOUT_CUDA
def test_the_first_command_of_the_page_prints_what_stands_there(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    typed = re.search(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    shown = re.search(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert typed is not None
    assert shown is not None
    result = command(*shlex.split(typed[1])[1:])
    said = words_of(result.said)
    for line in shown[1].splitlines():
        assert line == "..." or words_of(line) in said, line
    assert "Assumed there: this torch in a CUDA build" in said


@table("name", NAMED_CARDS)
def test_a_named_card_is_planned_by_its_dtype_backends_and_memory(name: str) -> None:
    prepared = prepare(RuntimeConfig("shapes"), is_dry_run=True, plan_for=name)
    description = prepared.planned_for(()).description
    assert (description.device, description.dtype) == ("cuda", "bfloat16")
    assert description.planned_on is not None
    assert description.memory is not None
    assert description.memory.limit == description.planned_on.free
    assert 9e9 < description.memory.limit < 200e9
    backends = {row.decision.backend for row in description.attention}
    # By default cuDNN's attention comes first on Blackwell alone; other packages are those of this machine.
    is_blackwell = description.planned_on.hardware.architecture == "Blackwell"
    assert ("cudnn_attn" in backends) == is_blackwell
    assert description.planned_on.hardware.packages == installed_packages()
    with pytest.raises(ConfigError, match="is not here, and no weights are loaded for it"):
        prepared.load()


def test_packages_that_are_here_are_those_of_the_planned_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"flash-attn": "2.8.3"}
    monkeypatch.setattr("diffusion_runtime.core.planned_device.installed_packages", lambda: packages)
    description = inspect_pipeline(RuntimeConfig("shapes"), plan_for="l40s")
    assert {row.decision.backend for row in description.attention} == {"fa"}
    planned_on = description.planned_on
    assert planned_on is not None
    assert "flash-attn 2.8.3" in planned_on.note
    assert planned_on.hardware == Hardware(
        "cuda",
        "NVIDIA L40S",
        (8, 9),
        (9, 10),
        planned_on.hardware.torch_version,
        packages,
        planned_on.hardware.programs,
    )


def test_json_and_explain_say_what_is_planned(command: Command) -> None:
    for verb in (("generate", "x", "--dry-run"), ("explain",)):
        result = command(*verb, "--plan-for", "H100", "--json")
        assert result.code == 0, result.said
        answer = result.json
        assert answer["planned_on"]["device_name"] == "NVIDIA H100 80GB HBM3"
        assert answer["planned_on"]["assumed"] == named_device("h100").note


@table(
    ("words", "said"),
    [
        (("generate", "x", "--plan-for", "h100"), "no weights are loaded for a GPU that is not here; add --dry-run"),
        (("generate", "x", "--plan-for", "h10", "--dry-run"), "got 'h10'. Did you mean 'h100'"),
        (("generate", "x", "--plan-for", "h100", "--device", "cpu", "--dry-run"), "leave one of them out"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: tuple[str, ...], said: str, command: Command) -> None:
    result = command(*words)
    assert result.code == 2
    assert said in words_of(result.said)


@WITHOUT_CUDA
def test_a_card_of_which_nothing_is_known_is_not_planned(command: Command) -> None:
    result = command("generate", "x", "--device", "cuda", "--dry-run")
    assert result.code == 2
    assert "planned for by --plan-for a100 or" in words_of(result.said)
    result = command("generate", "x", "--device", "cuda", "--memory-limit", "24GB")
    assert result.code == 2
