"""Declaration of an option of RuntimeConfig: metadata of a dataclass field, which resume, `--from` and `tune` read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

_KEY = "runtime_option"


# No field has a default: adding an option means giving all of this.
@dataclass(frozen=True)
class RuntimeOption:
    """The declaration of one option of RuntimeConfig.

    changes_output: whether frames made with another value are other frames, rounding included, so that `--resume` makes
    them again. recorded_as: the part of a recipe (`model`, `attention`) in which `--resume` compares what the option
    led to; None where it compares the option's own value.
    repeated_by_from: whether `--from` takes the value of a recipe; not so for what belongs to the machine.
    written_by_tune: whether the config that `tune` writes has it. is_weight_path: whether it names weights from
    elsewhere than the model's folder.
    """

    changes_output: bool
    recorded_as: str | None
    repeated_by_from: bool
    written_by_tune: bool
    is_weight_path: bool

    def as_metadata(self) -> dict[str, RuntimeOption]:
        """Return the metadata for `dataclasses.field(metadata=...)`."""
        return {_KEY: self}


def options_of(config: type) -> dict[str, RuntimeOption]:
    """Return the declared options of a dataclass by their names. Raises KeyError for a field without."""
    return {field.name: field.metadata[_KEY] for field in dataclasses.fields(config)}


def _option(
    *,
    changes_output: bool,
    recorded_as: str | None = None,
    repeated_by_from: bool,
    written_by_tune: bool,
    is_weight_path: bool = False,
) -> dict[str, Any]:
    option = RuntimeOption(changes_output, recorded_as, repeated_by_from, written_by_tune, is_weight_path)
    return dict(option.as_metadata())


# What changes the frames, by its own value; the weights from elsewhere; what the recipe has as its model.
OUTPUT = _option(changes_output=True, repeated_by_from=True, written_by_tune=True)
WEIGHTS = _option(changes_output=True, repeated_by_from=True, written_by_tune=True, is_weight_path=True)
MODEL = _option(changes_output=True, recorded_as="model", repeated_by_from=True, written_by_tune=True)
# `tune` writes the attention that it found.
ATTENTION = _option(changes_output=True, recorded_as="attention", repeated_by_from=True, written_by_tune=False)
# Another machine may have another device and other packages; processes that share the work change nothing of it.
MACHINE = _option(changes_output=False, repeated_by_from=False, written_by_tune=False)
# The same for what a tuned config records all the same: how it was measured.
SPEED = _option(changes_output=False, repeated_by_from=False, written_by_tune=True)
