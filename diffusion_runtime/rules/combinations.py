"""Combinations: which two features do not go together, and what a refusal says, in one table (combinations.yaml), to
which the options of RuntimeConfig add what a pipeline of diffusers' own does not take."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diffusion_runtime.config import RuntimeConfig, runtime_options
from diffusion_runtime.core.runtime_options import Refusal, flag_name
from diffusion_runtime.errors import ConfigError, RequestError
from diffusion_runtime.rules.features import ChosenRequest, ChosenRuntime
from diffusion_runtime.untrusted.yaml_text import read_packaged_yaml

_FILE = Path(__file__).with_name("combinations.yaml")


@dataclass(frozen=True)
class Combination:
    """Two features that do not go together. says: the refusal, with names in braces. at: the module that refuses the
    pair, where what it needs to know is in a file, a layer or a running process; empty for `check_combinations`."""

    pair: tuple[str, str]
    says: str
    at: str = ""

    def is_chosen(self, chosen: ChosenRequest | ChosenRuntime) -> bool:
        """Return whether both features are chosen. A name in backquotes is a field or an option that is set."""
        return all(chosen.is_set(name[1:-1]) if name[0] == "`" else chosen.features[name]() for name in self.pair)


@functools.cache
def combinations() -> Mapping[str, tuple[Combination, ...]]:
    """Return the table: the rows by what they are about."""
    return {
        about: tuple(Combination(tuple(row["pair"]), row["says"], row.get("at", "")) for row in rows)
        for about, rows in read_packaged_yaml(_FILE).items()
    }


def check_combinations(about: str, chosen: ChosenRequest | ChosenRuntime) -> None:
    """Raises RequestError or ConfigError, with its words, for the first pair of a part of the table that is chosen."""
    for row in combinations()[about]:
        if not row.at and row.is_chosen(chosen):
            error = RequestError if isinstance(chosen, ChosenRequest) else ConfigError
            raise error(row.says.format_map(chosen.values()))


def pipeline_combinations() -> tuple[Combination, ...]:
    """Return the rows of pipelines of diffusers' own, which the options declare."""
    names: dict[Refusal, list[str]] = {}
    for name, declared in runtime_options().items():
        if declared.refusal is not None:
            names.setdefault(declared.refusal, []).append(name)
    rows = []
    for each, (first, *others) in names.items():
        says = each.says if others else each.says.replace("{name}", first).replace("{flag}", flag_name(first))
        rows.append(Combination(("diffusers' own pipeline", each.feature or f"`{first}`"), says))
    return tuple(rows)


def check_pipeline_options(config: RuntimeConfig) -> None:
    """Raises ConfigError for the first option whose value a pipeline of diffusers' own does not take."""
    for name, declared in runtime_options().items():
        value = getattr(config, name)
        if declared.refusal is not None and declared.is_refused(value):
            raise ConfigError(declared.refusal.says.format(name=name, flag=flag_name(name), value=value))


def refusal(first: str, second: str, chosen: ChosenRuntime) -> ConfigError:
    """Return the error of a pair of the table for the module that refuses it."""
    rows = [row for part in combinations().values() for row in part]
    return ConfigError(next(row.says for row in rows if row.pair == (first, second)).format_map(chosen.values()))
