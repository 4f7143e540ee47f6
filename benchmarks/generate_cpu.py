"""What a stranger waits for on a CPU: the real commands from a cold start, their peak memory, the package's size.

    python -m benchmarks.generate_cpu --output benchmarks/results/generate_cpu.json

Every command runs as a process of its own, several times; the median of the wall seconds and the highest peak memory
count (of the process and what it started). `cold` means a new process each time; the disk's cache is warm after the
first run, which is listed apart. Other load on the machine is recorded: figures taken beside other work are worthless.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_host

REPOSITORY = Path(__file__).parents[1]
PROMPT = "a sailboat moving right on the sea at sunset"
MIB = 2**20

# name: (what follows the interpreter, seconds that may pass, MiB of peak memory, None for no limit).
COMMANDS: dict[str, tuple[list[str], float, float | None]] = {
    "help": (["-m", "diffusion_runtime", "generate", "--help"], 0.5, None),
    "import": (["-c", "import diffusion_runtime"], 0.5, None),
    "generate": (["-m", "diffusion_runtime", "generate", PROMPT], 20.0, 2500.0),
    "generate_fast": (["-m", "diffusion_runtime", "generate", PROMPT, "--preset", "fast"], 8.0, 2500.0),
    "generate_draft": (["-m", "diffusion_runtime", "generate", PROMPT, "--preset", "draft"], 8.0, 2500.0),
    "generate_image": (["-m", "diffusion_runtime", "generate", PROMPT, "--num-frames", "1"], 8.0, 2500.0),
}
# 45 MB.
MAX_WHEEL_MIB = 42.9
PACKAGES = ("torch", "diffusers", "transformers", "numpy", "pillow", "imageio-ffmpeg", "typer", "rich")


def main() -> int:
    arguments = parse_arguments()
    model = [] if arguments.model is None else ["--model-path", arguments.model]
    this_machine = {**describe_host(), "num_threads": arguments.threads}
    results: dict[str, Any] = {}
    for name, (command, max_seconds, max_mib) in COMMANDS.items():
        extra = model if name.startswith("generate") else []
        runs = [run(command + extra, arguments.threads) for _ in range(arguments.repeats)]
        results[name] = summarise(runs, max_seconds, max_mib)
        print(f"{name}: {results[name]['median_seconds']} s, {results[name]['peak_mib']} MiB", file=sys.stderr)
    package = measure_package()
    document = {
        "schema": "diffusion_runtime.generate_cpu/1",
        "machine": this_machine,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "model": arguments.model or "emoji",
        "commands": results,
        "package": package,
        "within_limits": all(result["within_limits"] for result in [*results.values(), package]),
    }
    text = json.dumps(document, indent=1) + "\n"
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)
    return 0 if document["within_limits"] else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="a name or the whole path of a folder, instead of the embedded model")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def run(command: list[str], threads: int) -> dict[str, Any]:
    """One run in an empty folder: wall seconds, peak memory in MiB, and what the files it wrote say of their stages."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=said
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{said.read().decode()}")
        stages = [json.loads(path.read_text())["timings"] for path in Path(folder).glob("outputs/*.json")]
    # Linux counts ru_maxrss in KiB; it is the highest of the process and of its children that have ended.
    return {"seconds": seconds, "peak_mib": usage.ru_maxrss / 1024, "stages": stages[0] if stages else {}}


def summarise(runs: list[dict[str, Any]], max_seconds: float, max_mib: float | None) -> dict[str, Any]:
    seconds = [run["seconds"] for run in runs]
    median, peak = statistics.median(seconds), max(run["peak_mib"] for run in runs)
    stages = runs[seconds.index(statistics.median_low(seconds))]["stages"]
    return {
        "median_seconds": round(median, 3),
        "first_seconds": round(seconds[0], 3),
        "all_seconds": [round(value, 3) for value in seconds],
        "peak_mib": round(peak, 1),
        "stages": {name: round(value, 3) for name, value in stages.items()},
        "max_seconds": max_seconds,
        "max_mib": max_mib,
        "within_limits": median <= max_seconds and (max_mib is None or peak <= max_mib),
    }


def measure_package() -> dict[str, Any]:
    """Size of the wheel, and of what it installs, weights included."""
    with tempfile.TemporaryDirectory() as folder:
        # A copy of what belongs to the package: building in place would leave build folders in the checkout.
        source = Path(folder) / "source"
        shutil.copytree(
            REPOSITORY / "diffusion_runtime", source / "diffusion_runtime", ignore=shutil.ignore_patterns("__pycache__")
        )
        for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
            shutil.copy(REPOSITORY / name, source / name)
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder]
        subprocess.run([*command, str(source)], check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            entries = archive.infolist()
        installed = sum(entry.file_size for entry in entries)
        weights = sum(entry.file_size for entry in entries if entry.filename.endswith(".safetensors"))
        return {
            "wheel_mib": round(wheel.stat().st_size / MIB, 2),
            "installed_mib": round(installed / MIB, 2),
            "weights_mib": round(weights / MIB, 2),
            "max_mib": MAX_WHEEL_MIB,
            "within_limits": wheel.stat().st_size <= MAX_WHEEL_MIB * MIB,
        }


if __name__ == "__main__":
    sys.exit(main())
