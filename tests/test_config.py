"""RuntimeConfig: what may be loaded."""

from __future__ import annotations

from typing import Any

import pytest

from diffusion_runtime import RuntimeConfig
from diffusion_runtime.config import ParallelConfig
from diffusion_runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle_path": "shapes"}, "'modle_path'.*'model_path'"),
        ({"model_path": ""}, "model_path"),
        ({"dtype": 16}, "dtype"),
        ({"backend": "natve"}, "'natve'.*'native'"),
        ({"parallel": {"ulyses_degree": 1}}, "'ulyses_degree'.*'ulysses_degree'"),
        ({"parallel": {"num_gpus": 0}}, r"parallel\.num_gpus"),
        ({"parallel": {"num_gpus": 2}}, "runs on one process"),
        ({"parallel": {"cfg_parallel": True}}, "runs on one process"),
    ],
)
def test_mistakes_name_the_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RuntimeConfig.from_dict(values)


def test_from_dict() -> None:
    config = RuntimeConfig.from_dict({"model_path": "shapes", "parallel": {"num_gpus": 1}, "attention": {"x": 1}})
    assert config.parallel == ParallelConfig()
    assert config.attention == {"x": 1}
