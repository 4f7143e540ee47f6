"""Write the tables of docs/scaling.md that follow from benchmarks/scaling_model.py and the committed measurements:
python scripts/write_scaling_tables.py            # the page, made anew
python scripts/write_scaling_tables.py --check    # exit code 1 where the page says something else
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Run as a script too, whose path has its own folder alone.
sys.path.insert(0, str(ROOT))

from benchmarks.scaling_measured import measured_rows  # noqa: E402
from benchmarks.scaling_model import (  # noqa: E402
    Constants,
    Degrees,
    fit,
    models,
    predict,
    programs,
    results_of,
)
from benchmarks.scaling_rows import plan, predicted  # noqa: E402

PAGE = ROOT / "docs" / "scaling.md"
START, END = "<!-- scaling: scripts/write_scaling_tables.py -->\n", "<!-- end of the scaling -->\n"
# Ulysses degrees of the plans, by the number of GPUs: one row of the table shows both plans.
_SHARES = {(4, 4): "N", (8, 8): "N", (4, 2): "N/2", (8, 4): "N/2", (8, 2): "2"}
# Of a guided step of Wan 1.3B, beyond one host too.
ON_PAPER = (
    Degrees(ulysses=4, branches=2, num_head_groups=2),
    Degrees(ulysses=6, branches=2, num_head_groups=2),
    Degrees(ulysses=4, ring=4, branches=2, num_head_groups=2),
    Degrees(ulysses=4, ring=8, branches=2, num_head_groups=2),
)


def tables() -> str:
    constants = fit()
    return f"{_measured(constants)}\n{_planned(constants)}\n{_on_paper(constants)}"


def _measured(constants: Constants) -> str:
    lines = [
        f"Fitted: attention {constants.attention_rate / 1e9:.0f} TFLOP/s, {constants.fixed_ms:.2f} ms per layer for "
        f"what is not shared, all-to-all {constants.all_to_all / 1e6:.0f} GB/s, all-reduce "
        f"{constants.all_reduce / 1e6:.0f} GB/s; of an all-to-all that overlaps {100 * constants.exposed:.0f} % are "
        f"exposed, and attention loses {constants.slowed:.2f} ms per ms of the rest.\n",
        "| measured on two H200s | ms, or as it says | predicted | off by |",
        "|---|---|---|---|",
    ]
    for row in measured_rows(constants):
        note = " (fitted)" if row.is_fitted else ""
        lines.append(f"| {row.name} | {row.milliseconds:.1f} | {row.predicted:.1f} | {100 * row.off:+.1f} %{note} |")
    for program in programs(2):
        assert program.measured is not None
        off = 100 * (program.predicted / program.measured - 1)
        value, made = (f"{each:.3g} {program.unit}" for each in (program.measured, program.predicted))
        lines.append(f"| {program.name} | {value} | {made} | {off:+.1f} % |")
    return "\n".join(lines) + "\n"


def _planned(constants: Constants) -> str:
    lines = [
        "| one step, never measured | 4 GPUs, ms | over one | 8 GPUs, ms | over one | bound by |",
        "|---|---|---|---|---|---|",
    ]
    cells: dict[str, dict[int, tuple[float, float, str]]] = {}
    for num in (4, 8):
        alone: dict[tuple[str, ...], float] = {}
        for row in plan(num):
            # `benchmarks.scaling_gpu --list` has them all.
            if row.kind != "step" or "1 head group" in row.name or row.name.startswith("wan2.1-1.3b 720p"):
                continue
            found = predicted(row, constants)
            milliseconds = found["predicted_ms"]
            if row.degrees.num_processes == 1:
                alone[row.alone] = milliseconds
                continue
            speedup = (2 if row.is_guided else 1) * alone[row.alone] / milliseconds
            name = re.sub(r"ulysses (\d+)", lambda part, num=num: f"ulysses {_SHARES[num, int(part[1])]}", row.name)
            name = re.sub(rf"(ring|tensor) {num}", r"\1 N", name)
            cells.setdefault(name, {})[num] = milliseconds, speedup, found["predicted_bound"]
    for name, found in cells.items():
        columns = [f"{found[num][0]:.0f} | {found[num][1]:.2f}x" if num in found else " | " for num in (4, 8)]
        lines.append(f"| {name} | {' | '.join(columns)} | {list(found.values())[-1][2]} |")
    clip = next(row for row in plan(8) if row.kind == "clip" and row.bar is not None)
    seconds = predicted(clip, constants)
    start = [next(each for each in programs(num) if each.name.startswith("start")) for num in (4, 8)]
    gang = next(each for each in programs(4) if "gang" in each.name)
    of_one = results_of("replicas_gpu")["embedded"]["rows"][0]["seconds_per_request"]
    lines += [
        "",
        f"{clip.name}, {clip.num_steps} forwards: {seconds['predicted_s']:.1f} s, of which decoding "
        f"{seconds['predicted_decode_s']:.2f} s. Replicas: as many times one. Start to the first step, warm, without "
        f"FlashAttention-4's import: {start[0].predicted:.1f} s with 4 processes, {start[1].predicted:.1f} s with 8. A "
        f"request of `shapes` on a gang of 4: {gang.predicted:.2f} s, on one GPU {of_one:.2f} s: the host "
        "launches.",
    ]
    return "\n".join(lines) + "\n"


def _on_paper(constants: Constants) -> str:
    wan = models()["wan2.1-1.3b"]
    one = predict(wan, Degrees(), constants, is_guided=True).total
    shown = []
    for degrees in ON_PAPER:
        made = predict(wan, degrees, constants, is_guided=True)
        share = 100 * made.exchanges / made.total
        shown.append(
            f"{one / made.total:.1f}x on {degrees.num_processes} GPUs (branches {degrees.branches} x ulysses "
            f"{degrees.ulysses} x ring {degrees.ring}, {share:.0f} % of it exchanges)"
        )
    return (
        f"A guided step of Wan 1.3B at 480p, on paper: {', '.join(shown)}. Assumed: 20 us to start an exchange, eight "
        "GPUs per host, one 400 Gb/s link per GPU between hosts.\n"
    )


def with_tables(page: str) -> str:
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{tables()}{END}{after}"


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    made = with_tables(page)
    if "--check" in sys.argv[1:]:
        return int(made != page)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
