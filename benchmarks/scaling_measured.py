"""Committed measurements of steps on two GPUs, each beside what `scaling_model.py` predicts of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.scaling_model import Constants, Degrees, models, predict, results_of, rows_of
from benchmarks.scaling_rows import SIZES, WAN_1B, WAN_14B, num_tokens_of

_LABELS = {WAN_1B: "Wan 1.3B", WAN_14B: "Wan 14B"}
# The names that scaling_rows.step makes: model, size, what is split.
_NAME = re.compile(r"(\S+) (.+?): (.+)")
# Fields of a row of scaling_gpu.py: those that say what ran, and those that came out.
_SAYS = {"name", "kind", "num_processes", "degrees", "quantization", "is_guided"}
_FOUND = {
    *("ms", "rounds_ms", "first_ms", "weights_gb", "peak_gb", "error", "error_of_one_gpu", "nccl_ms", "exposed_ms"),
    *("s", "stages_s", "seconds", "bar", "reason", "speedup"),
    *("predicted", "predicted_ms", "predicted_s", "predicted_decode_s", "predicted_bound", "predicted_off_percent"),
}


@dataclass(frozen=True)
class Measured:
    """A step on two GPUs. name: for people; milliseconds: measured; is_fitted: whether a constant of the model is from
    this very row."""

    name: str
    model: str
    degrees: Degrees
    milliseconds: float
    predicted: float
    is_fitted: bool = False

    @property
    def off(self) -> float:
        """The prediction over the measurement, less one; below zero the model is optimistic."""
        return self.predicted / self.milliseconds - 1


def measured_rows(constants: Constants) -> list[Measured]:
    """Return every committed step of two GPUs."""
    scaled, _ = scaled_rows(results_of("scaling_gpu"), constants)
    return [*_parallel_rows(constants), *_tensor_rows(constants), *scaled]


def _parallel_rows(constants: Constants) -> list[Measured]:
    rows, wan, found = rows_of("parallel_gpu"), models()[WAN_1B], []
    ones = {"forward": "one GPU", "guided": "one GPU, guided, two passes", "sparse": "one GPU, VSA 0.9"}
    for row in rows.values():
        degrees = Degrees(
            row["ulysses"], row["ring"], 2 if row["splits_branches"] else 1, num_head_groups=row["num_head_groups"]
        )
        if degrees.num_processes == 1:
            continue
        is_guided = row["kind"] == "guided"
        one = rows[ones[row["kind"]]]["ms"] / (2 if is_guided else 1)
        made = predict(wan, degrees, constants, is_guided=is_guided, one_ms=one)
        if row["kind"] == "sparse":
            # A gate travels as well: five tensors in place of four.
            made = replace(made, exchanges=made.exchanges * row["sent_bytes"] / rows["ulysses 2"]["sent_bytes"])
        is_fitted = row["name"] in ("ulysses 2", "ulysses 2, 2 head groups")
        found.append(Measured(f"Wan 1.3B, {row['name']}", WAN_1B, degrees, row["ms"], made.total, is_fitted))
    return found


def _tensor_rows(constants: Constants) -> list[Measured]:
    found = []
    for row in rows_of("tensor_parallel_gpu").values():
        degrees = Degrees(ulysses=row["ulysses"], tensor=row["tensor"], num_head_groups=row["num_head_groups"])
        if degrees.num_processes == 1:
            continue
        made = predict(models()[WAN_14B], degrees, constants, quantization=row["quantization"])
        is_fitted = row["name"] == "tensor parallel 2"
        found.append(Measured(f"Wan 14B, {row['name']}", WAN_14B, degrees, row["ms"], made.total, is_fitted))
    return found


def scaled_rows(document: Mapping[str, Any], constants: Constants) -> tuple[list[Measured], dict[str, str]]:
    """Return the steps of two GPUs in a document of scaling_gpu.py, each predicted from its own step on one GPU; and by
    name why others have no prediction. Raises ValueError for tiny models, and for a row that says what this cannot
    read: it would be compared with a prediction of something else."""
    if document["small"]:
        raise ValueError("its models are tiny (--small): nothing is predicted of them")
    found: list[Measured] = []
    skipped: dict[str, str] = {}
    alone: dict[tuple[str, str, str], float] = {}
    for row in document["rows"]:
        name, scheme = row["name"], row["name"].partition(": ")[2]
        if unknown := row.keys() - _SAYS - _FOUND:
            raise ValueError(f"{name}: unknown fields {', '.join(sorted(unknown))}: read them in scaling_measured.py")
        if row["kind"] != "step":
            skipped[name] = f"a {row['kind']} is no step"
        elif "ms" not in row:
            skipped[name] = f"has no time: {row.get('reason')}"
        elif "=" in scheme:
            skipped[name] = f"what {scheme.rpartition(', ')[2]} costs is measured and not predicted"
        else:
            model, size, degrees = *_model_and_size(name), Degrees(**row["degrees"])
            key, passes = (model, size, row["quantization"]), 2 if row["is_guided"] else 1
            if degrees.num_processes == 1:
                alone[key] = row["ms"] / passes
            elif degrees.num_processes != 2:
                skipped[name] = f"of {degrees.num_processes} GPUs"
            elif key not in alone:
                skipped[name] = "no step of one GPU is before it"
            else:
                # The model in this size: the step on one GPU is of it too.
                sized = replace(models()[model], num_tokens=num_tokens_of(model, size))
                made = predict(sized, degrees, constants, is_guided=row["is_guided"], one_ms=alone[key])
                label = _LABELS.get(model, model) + ("" if size == "480p" else f" {size}")
                shown = f"{label} (one GPU {alone[key]:.0f} ms), {scheme}"
                found.append(Measured(shown, model, degrees, row["ms"], made.total))
    return found, skipped


def _model_and_size(name: str) -> tuple[str, str]:
    parts = _NAME.fullmatch(name)
    if parts is None or parts[1] not in models() or parts[2] not in SIZES:
        raise ValueError(f"{name}: expected MODEL SIZE: SCHEME, of {', '.join(models())} and {', '.join(SIZES)}")
    return parts[1], parts[2]
