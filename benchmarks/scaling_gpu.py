"""What 2, 4 or 8 GPUs of one host give: every row of a plan in one call of under ten minutes, the most valuable first.

    python -m benchmarks.scaling_gpu --plan eight --output $OUT/scaling_8_gpus.json      # one line per row as it ends
    python -m benchmarks.scaling_gpu --plan eight --device cpu --small --output /tmp/8.json    # every path, tiny, gloo

It starts the ranks itself. Rows in succession that need the same processes share them; a row that fails or exceeds its
seconds is kept with its reason, its processes are killed, and the next row begins with fresh ones. The file is written
after each row, so a run that is cut short leaves what it measured; what no time was left for is listed as `left out`.

Kinds of rows, all with random weights. `step`: a forward pass, or a guided step of two: two blocks against one GPU in
float32 first, then the median of the slowest rank, GB of weights and at most, NCCL's milliseconds and how many of them
nothing hid. `clip`: a whole generation, with what its decoding by bands or tiles takes. `stream`: a causal stream.
`program`: another benchmark as a process. Beside each stands what `scaling_model.py` says, with the difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.scaling_model import Constants, fit
from benchmarks.scaling_processes import Failed, Team, run_program
from benchmarks.scaling_ranks import run_rank
from benchmarks.scaling_rows import Row, plan, predicted

SCHEMA = "diffusion_runtime.scaling_gpu/1"
# What stays of the whole time for the last row's processes to be killed and the file to be written.
LAST_SECONDS = 5.0


@dataclass
class _Document:
    """The rows so far, written after each."""

    path: Path
    values: dict[str, Any]
    constants: Constants
    is_small: bool
    alone: dict[tuple[str, str, str, str], float] = field(default_factory=dict)

    def add(self, row: Row, found: Mapping[str, Any]) -> None:
        kept: dict[str, Any] = {
            "name": row.name,
            "kind": row.kind,
            "num_processes": row.num_processes,
            "degrees": dataclasses.asdict(row.degrees),
            "quantization": row.quantization,
            "is_guided": row.is_guided,
            "bar": row.bar,
            **found,
        }
        # Tiny sizes have other times.
        kept |= {} if self.is_small else predicted(row, self.constants)
        time_of = kept.get("ms", kept.get("s"))
        if time_of is not None:
            if row.degrees.num_processes == 1 and (row.kind == "step" or row.num_processes == 1):
                self.alone[row.alone] = time_of
            if row.alone in self.alone:
                kept["speedup"] = (2 if row.is_guided else 1) * self.alone[row.alone] / time_of
        for unit in ("ms", "s"):
            if unit in kept and f"predicted_{unit}" in kept:
                kept["predicted_off_percent"] = 100 * (kept[f"predicted_{unit}"] / kept[unit] - 1)
        self.values["rows"].append(kept)
        self.write()
        print(shown(kept), flush=True)

    @property
    def wrong_rows(self) -> list[str]:
        return [row["name"] for row in self.values["rows"] if row.get("reason", "").startswith("WRONG")]

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.values, indent=1) + "\n")


def shown(row: Mapping[str, Any]) -> str:
    """One line of a row."""
    parts = [f"{row['name']}:"]
    for key, form in (
        ("ms", "{:.1f} ms"),
        ("s", "{:.2f} s"),
        ("speedup", "{:.2f}x"),
        ("bar", "bar {}"),
        ("predicted_ms", "predicted {:.1f}"),
        ("predicted_s", "predicted {:.1f}"),
        ("predicted_decode_s", "of which decoding {:.2f}"),
        ("predicted", "predicted {}"),
        ("predicted_off_percent", "off {:+.1f} %"),
        ("nccl_ms", "nccl {:.1f}"),
        ("exposed_ms", "exposed {:.1f}"),
        ("peak_gb", "{:.1f} GB"),
        ("error", "error {:.1e}"),
        ("stages_s", "{}"),
        ("reason", "REASON: {}"),
        ("seconds", "({:.0f} s)"),
    ):
        if row.get(key) is not None:
            value = row[key]
            if isinstance(value, Mapping):
                value = {name: round(each, 3) for name, each in value.items()}
            parts.append(form.format(value))
    return " ".join(parts)


def teams(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows in succession that share processes; a program is one alone."""
    team: list[Row] = []
    for row in rows:
        if team and (row.kind == "program" or row.team != team[0].team):
            yield team
            team = []
        team.append(row)
    if team:
        yield team


def run_all(rows: Sequence[Row], arguments: argparse.Namespace, document: _Document) -> None:
    """Run every row, within the seconds of all of them."""
    deadline = time.monotonic() + arguments.seconds - LAST_SECONDS
    factor = arguments.row_factor
    for of_team in teams(rows):
        left = list(of_team)
        may_not_begin = True
        while left and time.monotonic() < deadline:
            if left[0].kind == "program":
                row = left.pop(0)
                began = time.perf_counter()
                found = run_program(row, min(factor * row.seconds, deadline - time.monotonic()), arguments)
                document.add(row, {**found, "seconds": round(time.perf_counter() - began, 2)})
                continue
            team = Team(left, arguments)
            try:
                while left:
                    row = left.pop(0)
                    document.add(row, team.result_of(row, min(factor * row.seconds, deadline - time.monotonic())))
                team.end(10.0)
            except Failed as error:
                if not team.has_begun and may_not_begin:
                    # The ranks did not meet, or a module cannot be imported: once more, then no row of them can run.
                    may_not_begin = False
                    left.insert(0, row)
                    continue
                document.add(row, {"reason": str(error)})
                while not team.has_begun and left:
                    document.add(left.pop(0), {"reason": "left out: its processes did not begin"})
            finally:
                team.end()
        for row in left:
            document.add(row, {"reason": "left out: no time was left"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=("two", "four", "eight"), required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=580.0, help="of all rows together")
    parser.add_argument("--row-factor", type=float, default=1.0, help="of the seconds that each row may take")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--skip", type=int, default=0, help="rows to begin after, in the order of the plan")
    parser.add_argument("--list", action="store_true", help="print the rows and what is predicted")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny models and sizes, to try every path")
    parser.add_argument("--rank-rows", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rows = plan({"two": 2, "four": 4, "eight": 8}[arguments.plan])
    if arguments.rank_rows is not None:
        names = json.loads(arguments.rank_rows)
        run_rank(
            [row for row in rows if row.name in names],
            is_cuda=arguments.device == "cuda",
            is_small=arguments.small,
        )
        return
    rows = [row for row in rows[arguments.skip :] if arguments.only in row.name]
    constants = fit()
    if arguments.list:
        for row in rows:
            print(shown({"name": row.name, "bar": row.bar, **predicted(row, constants)}))
        return
    if arguments.output is None:
        parser.error("--output: expected a file")
    # So that its ranks end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    machine = describe_machine(arguments.device)
    values = {"schema": SCHEMA, "machine": machine, "plan": arguments.plan, "small": arguments.small, "rows": []}
    document = _Document(arguments.output, values, constants, arguments.small)
    run_all(rows, arguments, document)
    if wrong := document.wrong_rows:
        sys.exit(f"further from float32 than one GPU is: {', '.join(wrong)}")


if __name__ == "__main__":
    try:
        main()
    except Exception:
        if "RANK" not in os.environ:
            raise
        traceback.print_exc()
        sys.stderr.flush()
        # Not by way of what torch does at an exit: the others may never come to it.
        os._exit(1)
