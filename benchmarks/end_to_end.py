"""Whole generations by model and attention backend: `bench generate` of many cases, into one file and one table.

    python -m benchmarks.end_to_end --seconds 540 --output benchmarks/results/end_to_end.json
    python -m benchmarks.end_to_end --models shapes wan2.1-1.3b --settings torch_sdpa fa4 --output FILE
    python -m benchmarks.end_to_end --case "emoji --preset fast" --setting "fp8: --quantization fp8" --output FILE
    python -m benchmarks.end_to_end --write docs/benchmarks.md      # the table of the committed results

Every pair of a case (a model and its size) and a setting (flags of `bench generate`) is a process of its own. One that
the output has for this device is not run again, so the same command goes on where --seconds ended it; --again runs
them anew. What cannot run is a row with its reason and is tried again. A published model has random weights, which the
row says, and so do figures: time alone, no quality.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "end_to_end.json"
SCHEMA = "diffusion_runtime.end_to_end/1"
# Around the table of a page.
BEGIN, END = "<!-- python -m benchmarks.end_to_end --write: begin -->", "<!-- end -->"
# A model and flags of `bench generate` that say what is made. Quick ones first: --seconds may end the list anywhere.
CASES = (
    "shapes",
    "emoji --preset fast",
    "z-image-turbo",
    "flux.1-dev --num-inference-steps 28",
    "wan2.1-1.3b --preset fastwan-3",
    "qwen-image --num-inference-steps 10",
    "ltx-video-0.9.7-dev --num-inference-steps 10",
    "hunyuan-video-1.5-t2v --num-inference-steps 10",
    "ltx-2 --num-inference-steps 10",
    "wan2.2-t2v-a14b --preset lightning-4",
    "wan2.1-14b --num-inference-steps 4",
)
# What the table calls a setting, and its flags.
SETTINGS = {
    "torch_sdpa": "--attention-backend torch_sdpa",
    "fa4": "--attention-backend fa4",
    "cudnn_attn": "--attention-backend cudnn_attn",
    "sage_attn": "--attention-backend sage_attn",
    "video_sparse_attn, sparsity 0.8": "--attention-backend video_sparse_attn --attention-backend-config sparsity=0.8",
}
# A pair that takes longer is ended.
MOST_SECONDS = 300.0


def measured(case: str, flags: str, device: str, repeats: int, seconds: float) -> dict[str, Any]:
    """What `bench generate` says of one pair, or why it says nothing."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        words = [*shlex.split(case), *shlex.split(flags), "--device", device, "--repeats", str(repeats)]
        command = [
            sys.executable,
            "-m",
            "diffusion_runtime",
            "bench",
            "generate",
            *words,
            "--no-diffusers",
            "-o",
            str(out),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"state": "over time", "reason": f"more than {seconds:.0f} s"}
        found = json.loads(out.read_text()) if out.is_file() else None
    if found is None:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        return {"state": "refused", "exit_code": done.returncode, "reason": " ".join(errors[-1:])[:300]}
    [ours] = [row for row in found["rows"] if row["name"] == "ours"]
    kept = {key: found[key] for key in ("model", "device", "dtype", "versions", "remarks", "request")}
    if ours["state"] != "measured":
        return {**kept, "state": ours["state"], "reason": ours["reason"]}
    return {
        **kept,
        "state": "measured",
        "weights": "random" if any("weights" in remark for remark in found["remarks"]) else "of the model",
        "seconds": {key: round(value, 4) for key, value in ours["warm_s"].items()},
        "together_s": round(sum(ours["warm_s"].values()), 3),
        "cold_s": round(sum(ours["cold_s"].values()), 3),
        "load_s": ours["load_s"],
    }


def run(arguments: argparse.Namespace, cases: Sequence[str], settings: Mapping[str, str]) -> None:
    started = time.monotonic()
    document = {"schema": SCHEMA, "rows": []}
    if arguments.output.is_file():
        document = json.loads(arguments.output.read_text())
    rows: list[dict[str, Any]] = document["rows"]
    for case in cases:
        for name, flags in settings.items():
            key = {"case": case, "setting": name, "on": arguments.device, "machine": machine_name(arguments.device)}
            held = [row for row in rows if key.items() <= row.items()]
            if any(row["state"] == "measured" for row in held) and not arguments.again:
                continue
            left = MOST_SECONDS if arguments.seconds is None else arguments.seconds - (time.monotonic() - started)
            if left < arguments.least_seconds:
                print(f"not run, --seconds were over: {case}, {name}", flush=True)
                continue
            row = {
                **key,
                "flags": flags,
                **measured(case, flags, arguments.device, arguments.repeats, min(left, MOST_SECONDS)),
            }
            rows[:] = [each for each in rows if each not in held] + [row]
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")
            print(f"{case}, {name}: {row.get('together_s', row.get('reason'))}", flush=True)


def machine_name(device: str) -> str:
    from benchmarks.machine import describe_machine
    from diffusion_runtime.core.hardware import resolve_device

    return str(describe_machine(resolve_device(device))["device"])


def table(document: Mapping[str, Any]) -> str:
    """Markdown: a row for each model, size and machine, a column for each setting; seconds of one warm generation."""
    rows = document["rows"]
    if not any(row["state"] == "measured" for row in rows):
        return "No run yet."
    names = list(dict.fromkeys(row["setting"] for row in rows))
    lines = [
        "| " + " | ".join(["model, size, steps", "weights", "machine, dtype", *(f"`{name}`" for name in names)]) + " |",
        "|" + "---|" * (3 + len(names)),
    ]
    for case, machine in dict.fromkeys((row["case"], row["machine"]) for row in rows):
        own = {row["setting"]: row for row in rows if (row["case"], row["machine"]) == (case, machine)}
        known = next((row for row in own.values() if row["state"] == "measured"), None)
        if known is None:
            continue
        cells = [cell(own.get(name)) for name in names]
        lines.append(
            "| " + " | ".join([known["model"], known["weights"], f"{machine}, {known['dtype']}", *cells]) + " |"
        )
    return "\n".join(lines)


def cell(row: Mapping[str, Any] | None) -> str:
    """Seconds of all stages; empty for what was not run."""
    if row is None:
        return ""
    return f"{row['together_s']:.2f}" if row["state"] == "measured" else str(row["state"])


def with_table(page: str, document: Mapping[str, Any]) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table(document)}\n{END}{rest.split(END)[1]}"


def committed() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"schema": SCHEMA, "rows": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", nargs="+", help="of the cases listed here, those of these models")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, help="of those listed here")
    parser.add_argument("--case", action="append", help="MODEL and flags, in place of the list; again for each")
    parser.add_argument("--setting", action="append", help="'NAME: FLAGS', in place of the list; again for each")
    parser.add_argument("--repeats", type=int, default=2, help="warm generations, whose median counts")
    parser.add_argument("--seconds", type=float, help="wall clock of all; default: no limit")
    parser.add_argument("--least-seconds", type=float, default=30.0, help="no pair is begun with fewer left")
    parser.add_argument("--again", action="store_true", help="measure what the output has already")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--write", type=Path, help="put the table of the committed results into this page")
    arguments = parser.parse_args()
    if arguments.write:
        arguments.write.write_text(with_table(arguments.write.read_text(), committed()))
        return
    if arguments.output is None:
        parser.error("--output FILE is missing")
    cases = arguments.case or [case for case in CASES if not arguments.models or case.split()[0] in arguments.models]
    settings = {name: SETTINGS[name] for name in arguments.settings or SETTINGS}
    if arguments.setting:
        settings = {name.strip(): flags for name, _, flags in (each.partition(":") for each in arguments.setting)}
    run(arguments, cases, settings)


if __name__ == "__main__":
    main()
