"""How a pipeline is loaded (load time). Never merged with GenerationRequest (call time)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from diffusion_runtime.errors import ConfigError, nearest

RUNTIME_BACKENDS = ("auto", "native")


@dataclass(frozen=True)
class ParallelConfig:
    """How one generation is spread over processes; the product of the degrees is the number of processes.

    num_gpus: processes, one a device.
    ulysses_degree, ring_degree: processes that share a sequence by heads, and by blocks of keys.
    cfg_parallel: whether the two guidance branches run on two groups of processes.
    """

    num_gpus: int = 1
    ulysses_degree: int = 1
    ring_degree: int = 1
    cfg_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("num_gpus", "ulysses_degree", "ring_degree"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"parallel.{name}: expected a whole number of 1 or more, got {value!r}")
        if max(self.num_gpus, self.ulysses_degree, self.ring_degree) > 1 or self.cfg_parallel:
            raise ConfigError(
                "parallel: this version runs on one process; leave out --num-gpus, --ulysses-degree, --ring-degree "
                "and --cfg-parallel, or set them to 1"
            )


@dataclass(frozen=True)
class RuntimeConfig:
    """What is loaded, where, and which attention it may use.

    model_path: `shapes` (the embedded model), a diffusers folder, or a hub id: `Wan-AI/Wan2.1-T2V-1.3B-Diffusers`.
    backend: `native` runs our own transformer; `auto` picks it where the model's class is one of ours.
    device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`, ...
    dtype: `auto` (bfloat16 on an accelerator, float32 on the CPU), `float32`, `bfloat16` or `float16`.
    attention: every form that AttentionConfig.parse takes; None leaves it to the environment and the platform.
    attention_override: the same, one level higher: what the command line says.
    parallel: how the work is spread over processes.
    """

    model_path: str = "shapes"
    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    attention: Any = None
    attention_override: Any = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        if self.backend not in RUNTIME_BACKENDS:
            raise ConfigError(f"backend: unknown value {self.backend!r}.{nearest(self.backend, RUNTIME_BACKENDS)}")
        for name in ("model_path", "device", "dtype"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f"{name}: expected a text, got {getattr(self, name)!r}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The configuration a mapping describes. Raises ConfigError that names an unknown key and the nearest one."""
        known = [item.name for item in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"runtime: unknown key {key!r}.{nearest(key, known)}")
        plain = dict(values)
        if isinstance(plain.get("parallel"), Mapping):
            plain["parallel"] = _parallel_from_dict(plain["parallel"])
        return cls(**plain)


def _parallel_from_dict(values: Mapping[str, Any]) -> ParallelConfig:
    known = [item.name for item in dataclasses.fields(ParallelConfig)]
    for key in values:
        if key not in known:
            raise ConfigError(f"parallel: unknown key {key!r}.{nearest(key, known)}")
    return ParallelConfig(**values)
