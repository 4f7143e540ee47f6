"""What flags about several processes lead to, before any is started."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch
from cli_support import Command

from diffusion_runtime.benchmark.step_model import open_step_model
from diffusion_runtime.cli.launching import CommandLine, piped_prompts
from diffusion_runtime.config import ParallelConfig, RuntimeConfig
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.wan.family import FAMILY
from diffusion_runtime.parallel.groups import planned_mesh


def test_a_dry_run_says_how_processes_would_share_the_work(command: Command, tiny_flags: tuple[str, ...]) -> None:
    arguments = ("generate", "a star", *tiny_flags, "--device", "cpu", "--num-gpus", "4", "--dry-run")
    assert "4: guidance branches 2 x ulysses 2 x ring 1" in command(*arguments).said
    planned = command(*arguments, "--json").json["parallel"]
    assert (planned["branches"], planned["ulysses"], planned["ring"]) == (2, 2, 1)
    assert "parallel" not in command("generate", "a star", *tiny_flags, "--dry-run", "--json").json
    # Without guidance there is one branch, and the run would find that out as well.
    planned = command(*arguments, "--guidance-scale", "1", "--json").json["parallel"]
    assert (planned["branches"], planned["ulysses"], planned["ring"]) == (1, 4, 1)


def test_a_dry_run_counts_a_part_of_weights_that_processes_share(command: Command, tiny_flags: tuple[str, ...]) -> None:
    """The tiny model has four heads."""
    arguments = ("generate", "a star", *tiny_flags, "--device", "cpu", "--dry-run")
    share = ("--tensor-parallel-size", "2")
    assert "2: guidance branches 1 x ulysses 1 x ring 1 x tensor parallel 2" in command(*arguments, *share).said
    alone, shared = command(*arguments, "--json").json, command(*arguments, *share, "--json").json
    assert shared["parallel"]["tensor"] == 2
    assert shared["runtime"]["parallel"]["tensor_parallel_size"] == 2
    weights = [each["memory"]["weights"]["transformer"] for each in (alone, shared)]
    assert weights[1] < 0.75 * weights[0]
    refused = command(*arguments, "--tensor-parallel-size", "3")
    assert refused.code == 2
    assert "3 processes cannot share 4 attention heads evenly; degrees that divide them: 1, 2, 4" in refused.said


def test_blocks_of_a_gguf_file_are_not_shared(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    file = mock.Mock(component="transformer", path=str(path), place=path)
    with pytest.raises(ConfigError, match=r"model\.gguf: the blocks of a GGUF file are not shared by processes"):
        dataclasses.replace(open_step_model("wan2.1-1.3b", 1).model.weights, files=(file,)).shared_by(
            planned_mesh(1, 1, 1, 2).tensor
        )


def test_a_backend_that_a_ring_cannot_serve_fails_before_processes_start(
    command: Command, tiny_flags: tuple[str, ...]
) -> None:
    arguments = ("generate", "a star", *tiny_flags, "--device", "cpu", "--ring-degree", "2", "--no-cfg-parallel")
    result = command(*arguments, "--attention-config.per_role.self.backend", "vmoba_attn")
    assert result.code == 3, result.err
    assert "vmoba_attn" in result.said
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_processes_without_gpus_need_a_word(command: Command, tiny_flags: tuple[str, ...]) -> None:
    result = command("generate", "a star", *tiny_flags, "--num-gpus", "2")
    assert result.code == 2
    assert "2 processes need 2 GPUs, this machine has none; --device cpu runs them on the CPU" in result.said


def test_a_family_that_cannot_be_cut(tiny_wan_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dataclasses.replace(FAMILY, shared_heads=lambda config: None)
    monkeypatch.setattr("diffusion_runtime.loading.native_preparation.family_for_folder", lambda folder: whole)
    config = RuntimeConfig(str(tiny_wan_folder), device="cpu", parallel=ParallelConfig(num_gpus=2))
    with pytest.raises(ConfigError, match="wan models run on one process in this version"):
        inspect_pipeline(config)


def test_prompts_from_standard_input_reach_every_process(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    piped = piped_prompts("-", ["typed", "first", "second"], num_others=1)
    for flag in (["--prompt-file", "-"], ["--prompt-file=-"]):
        again = CommandLine(("generate", "typed", *flag, "--num-gpus", "2"), piped).again(file)
        assert again[-3:] == (str(file), "--num-gpus", "2") or again[2] == f"--prompt-file={file}"
        assert file.read_text() == "first\nsecond\n"
    assert piped_prompts("file.txt", ["a", "b"], 0) == ()
    unchanged = ("generate", "-", "--num-gpus", "2")
    assert CommandLine(unchanged).again(file) == unchanged
