"""A model is opened once: what was decided is what is loaded."""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import tiny_arguments
from tiny_models import TINY_SIZES
from tiny_pipelines import write_tiny_video_pipeline

from diffusion_runtime import GenerationRequest, RuntimeConfig
from diffusion_runtime.cli.app import run
from diffusion_runtime.config import ParallelConfig
from diffusion_runtime.errors import ConfigError, PipelineClosedError
from diffusion_runtime.generation.interface import GenerationPipeline
from diffusion_runtime.loading import Prepared, prepare
from diffusion_runtime.models.family import Model

REQUEST = GenerationRequest("a red circle", **{**TINY_SIZES, "num_inference_steps": 1})


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folder of every transformer that was built."""
    found: list[Path] = []
    build = Model.build_transformer

    def counted(model: Any, policy: Any) -> Any:
        found.append(model.folder)
        return build(model, policy)

    monkeypatch.setattr(Model, "build_transformer", counted)
    return found


# An audit hook cannot be removed: one for the process, which counts where a test asks for it.
_counted: list[Counter[Path]] = []


def _count(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _counted and isinstance(arguments[0], str | os.PathLike):
        _counted[-1][Path(arguments[0])] += 1


@functools.cache
def _add_hook() -> None:
    sys.addaudithook(_count)


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[Path]]:
    """How often each file was opened, by whomever."""
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "134217728")
    _add_hook()
    _counted.append(Counter())
    yield _counted[-1]
    _counted.pop()


def test_a_command_builds_its_model_once(
    tiny_wan_folder: Path, builds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "134217728")
    assert run(["generate", "a star", *tiny_arguments(tiny_wan_folder), "-o", f"{tmp_path}/"]) == 0
    assert len(builds) == 1


def test_what_was_decided_is_loaded_and_can_be_loaded_again(tiny_wan_folder: Path, builds: list[Path]) -> None:
    prepared: Prepared = prepare(RuntimeConfig(str(tiny_wan_folder), device="cpu", attention="reference"))
    assert {layer.decisions.possible[0][1].backend for layer in prepared.layers} == {"reference"}
    stages: list[str] = []
    first: Any = prepared.load(stages.append)
    assert len(builds) == 1
    assert [stage.rpartition(" ")[2] for stage in stages] == ["attention", "encoder", "transformer", "decoder"]
    second: Any = prepared.load()
    assert first.transformer is not second.transformer
    assert (first(REQUEST).frames == second(REQUEST).frames).all()


@pytest.mark.parametrize("write", [None, write_tiny_video_pipeline])
def test_a_closed_pipeline_holds_no_model(
    write: Callable[[Path], Path] | None, tiny_wan_folder: Path, tmp_path: Path
) -> None:
    folder = tiny_wan_folder if write is None else write(tmp_path / "video")
    pipeline: GenerationPipeline = prepare(RuntimeConfig(str(folder), device="cpu")).load()
    pipeline.close()
    assert not [value for value in vars(pipeline).values() if isinstance(value, torch.nn.Module)]
    assert not {"pipeline", "transformer", "decoder", "text_encoder"} & set(vars(pipeline))
    for use in (lambda: pipeline(REQUEST), pipeline.close):
        with pytest.raises(PipelineClosedError, match="load it again"):
            use()


def test_processes_that_were_not_joined_are_an_error_before_the_weights(tiny_wan_folder: Path) -> None:
    prepared = prepare(RuntimeConfig(str(tiny_wan_folder), device="cpu", parallel=ParallelConfig(num_gpus=2)))
    stages: list[str] = []
    with pytest.raises(ConfigError, match="2 processes are asked for, and this one has joined no others"):
        prepared.load(stages.append)
    assert stages == []


@pytest.mark.parametrize("write", [None, write_tiny_video_pipeline])
@pytest.mark.parametrize("command", ["generate", "dry run"])
def test_a_command_reads_its_model_folder_once(
    command: str, write: Callable[[Path], Path] | None, tiny_wan_folder: Path, tmp_path: Path, opens: Counter[Path]
) -> None:
    folder = tiny_wan_folder if write is None else write(tmp_path / "video")
    opens.clear()
    flags = ["--dry-run"] if command == "dry run" else []
    assert run(["generate", "a star", *tiny_arguments(folder), "-o", f"{tmp_path}/out/", *flags]) == 0
    # diffusers reads a folder of its own accord.
    by_diffusers = 1 if write is not None and not flags else 0
    assert opens[folder / "model_index.json"] == 1 + by_diffusers
    # The first one tells a Git LFS pointer or a FIFO from a file, before libraries open it by name.
    assert opens[folder / "transformer" / "config.json"] == 2 + by_diffusers
