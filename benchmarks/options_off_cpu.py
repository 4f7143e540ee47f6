"""Cost of options that are off: a request that uses none, in this tree and in one from before they were written.

    OMP_NUM_THREADS=1 python -m benchmarks.options_off_cpu --output benchmarks/results/options_off_cpu.json

The options: normalized attention guidance, context windows, RIFLEx, strength of a picture to start from, segments,
frame interpolation, saved latents, kept encodings. The older tree is a commit before all of them, in a worktree of its
own that is removed. In both, a process makes the same request of the embedded model (29 frames of 64 x 64) and counts
operators of torch by name, those that compute apart from those that return their input or a view of it, and calls of
Python functions. Two numbers of steps give both per step and once. Then processes of both trees take turns: the ratio
of CPU times of a generation is the median of those of neighbours, and two processes of this tree say how much of it is
noise. Exit code 1 where this tree computes an operator more in a step.

Kept encodings are off on this tree's side (`encoding_cache`), so that every generation encodes its text in both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine

# The parent of the commit that kept encodings, the first of the options.
BEFORE = "eaec3ba4^"
STEPS = (4, 12)
TREE = Path(__file__).parents[1]

# Runs in both trees, so it names what both have. Steps, and how many timed generations.
COUNTED = r"""
import json, sys, time
from collections import Counter
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.config import RuntimeConfig

steps, num_timed = json.loads(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
off = {"encoding_cache": False} if "encoding_cache" in RuntimeConfig.__dataclass_fields__ else {}
pipeline = load_pipeline(RuntimeConfig("shapes", device="cpu", dtype="float32", **off))
size = {"num_frames": 29, "height": 64, "width": 64, "seed": 1}
request = {n: pipeline.resolve(GenerationRequest("a ring", num_inference_steps=n, **size)) for n in steps}


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.computed, self.views = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
        is_view = isinstance(out, torch.Tensor) and out.untyped_storage()._cdata in given
        counts = self.views if is_view and not func._schema.is_mutable else self.computed
        counts[str(func)] += 1
        return out


def operators(n):
    with Operators() as counted:
        pipeline(request[n])
    return dict(counted.computed), dict(counted.views)


def calls(n):
    count = Counter()

    def on_event(frame, event, _):
        if event == "call":
            count[frame.f_globals.get("__name__", "?").partition(".")[0]] += 1

    sys.setprofile(on_event)
    try:
        pipeline(request[n])
    finally:
        sys.setprofile(None)
    return dict(count)


pipeline(request[steps[0]])
found = {"operators": {}, "views": {}, "calls": {}, "seconds": []}
if num_timed:
    for _ in range(num_timed):
        begin = time.process_time()
        pipeline(request[steps[0]])
        found["seconds"].append(time.process_time() - begin)
else:
    for n in steps:
        (found["operators"][n], found["views"][n]), found["calls"][n] = operators(n), calls(n)
print(json.dumps(found))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE, help="the commit of the older tree")
    parser.add_argument("--repeats", type=int, default=8, help="processes of each tree that are timed")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        older = Path(folder) / "older"
        git("worktree", "add", "--detach", str(older), arguments.before)
        try:
            trees = {"before": older, "now": TREE}
            counted = {name: run(tree, 0) for name, tree in trees.items()}
            turns = {**trees, "now again": TREE}
            seconds: dict[str, list[float]] = {name: [] for name in turns}
            for index in range(arguments.repeats):
                # By turns, and each first as often as the others.
                order = list(turns)[index % 3 :] + list(turns)[: index % 3]
                for name in order:
                    seconds[name].append(statistics.median(run(turns[name], 3)["seconds"]))
            commit = git("rev-parse", "--short", arguments.before)
        finally:
            git("worktree", "remove", "--force", str(older))
    document = {
        "schema": "diffusion_runtime.options_off_cpu/1",
        "machine": describe_machine("cpu"),
        "before": commit,
        "steps": STEPS,
        **compared(counted),
        "cpu_seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "ratio_to_before": ratio(seconds["now"], seconds["before"]),
        "ratio_to_itself": ratio(seconds["now again"], seconds["now"]),
    }
    text = json.dumps(document, indent=1) + "\n"
    if arguments.output is not None:
        arguments.output.write_text(text)
    print(text, end="")
    return 1 if any(count > 0 for count in document["more_operators_per_step"].values()) else 0


def git(*command: str) -> str:
    """Return the output of a git command in this tree."""
    return subprocess.run(["git", "-C", str(TREE), *command], check=True, capture_output=True, text=True).stdout.strip()


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Return the median and the extremes of the ratios of neighbours."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def run(tree: Path, num_timed: int) -> dict[str, Any]:
    """Return what a process of a tree counts, or times."""
    command = [sys.executable, "-c", COUNTED, json.dumps(STEPS), str(num_timed)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=tree)
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


def compared(counted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return operators and calls of a step and of the rest of a request, in both trees, and what this one has more."""
    rows: dict[str, Any] = {}
    parts: dict[str, dict[str, Counter[str]]] = {}
    for kind in ("operators", "views", "calls"):
        for name, found in counted.items():
            few, many = (Counter(found[kind][str(steps)]) for steps in STEPS)
            step = Counter({each: (many[each] - few[each]) / (STEPS[1] - STEPS[0]) for each in many})
            once = Counter({each: few[each] - STEPS[0] * step[each] for each in few})
            parts[f"{kind} {name}"] = {"per_step": step, "once": once}
            rows.setdefault(f"{kind}_per_step", {})[name] = sum(step.values())
            rows.setdefault(f"{kind}_once", {})[name] = sum(once.values())
        for when in ("per_step", "once"):
            now, before = parts[f"{kind} now"][when], parts[f"{kind} before"][when]
            more = {each: now[each] - before[each] for each in sorted({*now, *before}) if now[each] != before[each]}
            rows[f"more_{kind}_{when}"] = more
    return rows


if __name__ == "__main__":
    sys.exit(main())
