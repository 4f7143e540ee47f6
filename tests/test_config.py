"""RuntimeConfig: what may be loaded."""

from __future__ import annotations

from typing import Any

import pytest
from tables import table

from diffusion_runtime import RuntimeConfig
from diffusion_runtime.config import ParallelConfig
from diffusion_runtime.errors import ConfigError


@table(
    ("values", "message"),
    [
        ({"modle_path": "shapes"}, "'modle_path'.*'model_path'"),
        ({"model_path": ""}, "model_path"),
        ({"dtype": 16}, "dtype"),
        ({"backend": "natve"}, "'natve'.*'native'"),
        ({"parallel": {"ulyses_degree": 1}}, "'ulyses_degree'.*'ulysses_degree'"),
        ({"parallel": {"num_gpus": 0}}, r"parallel\.num_gpus"),
        ({"parallel": {"ring_degree": 1.5}}, r"parallel\.ring_degree"),
        ({"parallel": {"tensor_parallel_size": 0}}, r"parallel\.tensor_parallel_size: expected a whole number of 1"),
        ({"parallel": {"tensor_parallel_size": 2, "num_gpus": 3}}, "tensor_parallel_size 2 does not give 3 processes"),
        ({"parallel": {"cfg_parallel": 2}}, r"parallel\.cfg_parallel: expected true or false"),
        ({"parallel": {"order": "ulysses_in_ring"}}, "'ulysses_in_ring'.*'ulysses_inside_ring'"),
        ({"parallel": {"timeout": 0}}, r"parallel\.timeout"),
        ({"parallel": {"num_gpus": 4, "ulysses_degree": 3}}, "ulysses_degree 3 does not give 4 processes"),
        ({"parallel": {"num_gpus": 2, "cfg_parallel": True, "ulysses_degree": 2}}, "does not give 2 processes"),
        (
            {"parallel": {"num_gpus": 8, "ulysses_degree": 2, "ring_degree": 2, "cfg_parallel": False}},
            "ulysses_degree 2 x ring_degree 2 x guidance branches 1 does not give 8 processes",
        ),
    ],
)
def test_mistakes_name_the_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RuntimeConfig.from_dict(values)


def test_from_dict() -> None:
    config = RuntimeConfig.from_dict({"model_path": "shapes", "parallel": {"num_gpus": 1}, "attention": {"x": 1}})
    assert config.parallel == ParallelConfig(num_gpus=1)
    assert config.attention == {"x": 1}


@table(
    ("asked", "num_heads", "is_guided", "expected"),
    [
        ({}, 12, True, (1, 1, 1)),
        ({"num_gpus": 2}, 12, True, (1, 1, 2)),
        ({"num_gpus": 2}, 12, False, (2, 1, 1)),
        ({"num_gpus": 3}, 4, True, (1, 3, 1)),
        ({"num_gpus": 3}, 12, True, (3, 1, 1)),
        ({"num_gpus": 8}, 12, True, (4, 1, 2)),
        ({"num_gpus": 8}, 12, False, (4, 2, 1)),
        ({"num_gpus": 16}, 40, True, (8, 1, 2)),
        ({"num_gpus": 4, "cfg_parallel": False}, 12, True, (4, 1, 1)),
        ({"num_gpus": 4, "ring_degree": 2}, 12, True, (1, 2, 2)),
        ({"num_gpus": 4, "ring_degree": 2}, 12, False, (2, 2, 1)),
        ({"num_gpus": 4, "ulysses_degree": 4}, 12, True, (4, 1, 1)),
        ({"num_gpus": 6, "ulysses_degree": 3}, 12, True, (3, 1, 2)),
        ({"ulysses_degree": 2, "cfg_parallel": True}, 12, False, (2, 1, 2)),
        ({"ulysses_degree": 5}, 12, True, (5, 1, 1)),
        ({"tensor_parallel_size": 2}, 12, True, (1, 1, 1)),
        ({"num_gpus": 4, "tensor_parallel_size": 2}, 12, True, (1, 1, 2)),
        ({"num_gpus": 8, "tensor_parallel_size": 4}, 12, False, (1, 2, 1)),
        ({"num_gpus": 16, "tensor_parallel_size": 2}, 12, True, (2, 2, 2)),
        ({"num_gpus": 4, "tensor_parallel_size": 2, "ulysses_degree": 2}, 12, True, (2, 1, 1)),
    ],
)
def test_degrees_are_settled(
    asked: dict[str, Any], num_heads: int, is_guided: bool, expected: tuple[int, int, int]
) -> None:
    degrees = ParallelConfig(**asked).choose_degrees(num_heads, is_guided=is_guided)
    assert (degrees.ulysses, degrees.ring, degrees.branches) == expected
    assert degrees.num_processes == ParallelConfig(**asked).num_processes
    assert degrees.tensor == asked.get("tensor_parallel_size", 1)


def test_too_many_processes_for_the_heads_name_the_degrees_that_do() -> None:
    with pytest.raises(ConfigError, match=r"16 processes cannot share 12 .* 1 to 12, .*: 1, 2, 3, 4, 6, 12\."):
        ParallelConfig(ulysses_degree=16).choose_degrees(12, is_guided=False)
    with pytest.raises(ConfigError, match=r"8 processes cannot share 12 .* evenly; .*: 1, 2, 3, 4, 6, 12\."):
        ParallelConfig(tensor_parallel_size=8).choose_degrees(12, is_guided=False)
    with pytest.raises(ConfigError, match=r"4 processes cannot share 3 attention heads that each of 4 tensor"):
        ParallelConfig(tensor_parallel_size=4, ulysses_degree=4).choose_degrees(12, is_guided=False)


def test_what_runs_already_must_be_what_was_asked_for() -> None:
    assert ParallelConfig(ring_degree=2).with_world(4).choose_degrees(4, is_guided=True).ring == 2
    with pytest.raises(ConfigError, match="4 processes are asked for, 2 were started"):
        ParallelConfig(num_gpus=4).with_world(2)
    with pytest.raises(ConfigError, match="ulysses_degree 4 does not give 6 processes"):
        ParallelConfig(ulysses_degree=4).with_world(6)


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("vae_tiling", False, "off"),
        ("vae_tiling", True, "on"),
        ("compile", False, "off"),
        ("quantization", False, "none"),
    ],
)
def test_a_bare_on_or_off_of_yaml_is_taken_as_meant(name: str, given: bool, meant: str) -> None:
    assert getattr(RuntimeConfig.from_dict({name: given}), name) == meant


@pytest.mark.parametrize("name", ["compile", "quantization"])
def test_a_bare_on_says_no_mode(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: unknown value True"):
        RuntimeConfig.from_dict({name: True})
