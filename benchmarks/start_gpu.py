"""From the start of a process to the first denoising step of the embedded model, part by part: what a user waits for.

    python -m benchmarks.start_gpu --num-gpus 1 2 --output benchmarks/results/start_gpu.json

The real command runs as a process of its own, `generate PROMPT --num-inference-steps 4`, and every line that it says is
timed when it is read. `cold` has an empty cache (this project's with its remembered imports and FlashAttention-4's
kernels, Triton's and torch.compile's), `warm` what the run before left there, as every command on a machine but its
first; the disk's cache is warm after the first run of all. `alone` are processes that do one thing, the interpreter
included, medians of three; `imports` is one more warm run of one process under `-X importtime`, which slows it down:
seconds by package. Other flags are the command's. About 60 s for one GPU and 60 s more for two on an H200;
`--device cpu` tries every path on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_host

REPOSITORY = Path(__file__).parents[1]
PROMPT = "a red circle moving left"
# What a line begins with, once in this order -> the part that ends with it.
MARKS = {
    "loading shapes": "interpreter, command line, launcher",
    "choosing attention": "imports, model folder, attention chosen",
    "loading the text encoder": "self-check of third-party attention",
    "loading the transformer": "text encoder",
    "loading the decoder": "transformer",
    PROMPT: "decoder, processes in step",
    "text:": "text",
    "denoise: step 1/": "first step",
    "denoise: step 4/": "other steps",
    "decode:": "decode",
    "wrote": "write",
}
FIRST_STEP = "first step"
# What a process does alone, in the order in which a start does it.
ALONE = {
    "interpreter": "pass",
    "command line": "import diffusion_runtime.cli.app",
    "torch": "import torch",
    "torch and this package": "import diffusion_runtime.loading, diffusion_runtime.loading.native_preparation",
    "torch and the device's context": "import torch; torch.zeros(1, device={device!r}).cpu()",
    "torch and triton": "import torch, triton",
    "torch and flash_attn.cute": "import torch, flash_attn.cute",
    "torch and flash_attn.cute, as here": (
        "from diffusion_runtime.startup.importing import import_failure; assert not import_failure('flash_attn.cute')"
    ),
}


def main() -> int:
    arguments = parse_arguments()
    alone, imports, results = seconds_alone(arguments.device), {}, []
    print(json.dumps(alone, indent=1), file=sys.stderr, flush=True)
    for num_gpus in arguments.num_gpus:
        with tempfile.TemporaryDirectory() as caches:
            for index in range(1 + arguments.warm):
                result = {
                    "num_processes": num_gpus,
                    "kernel_cache": "warm" if index else "cold",
                    **run(num_gpus, arguments.device, arguments.extra, Path(caches)),
                }
                results.append(result)
                print(table(result), file=sys.stderr, flush=True)
            if num_gpus == 1:
                imports = import_seconds(arguments.device, arguments.extra, Path(caches))
    document = {
        "schema": "diffusion_runtime.start_gpu/1",
        "machine": describe_host(),
        "device": arguments.device,
        "extra": arguments.extra,
        "alone": alone,
        "torch_has_bytecode": has_bytecode("torch"),
        "imports": imports,
        "runs": results,
    }
    text = json.dumps(document, indent=1) + "\n"
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-gpus", type=int, nargs="+", default=[1])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu")
    parser.add_argument("--warm", type=int, default=2, help="runs with a warm kernel cache")
    parser.add_argument("--output", type=Path)
    # What it does not know is the command's.
    arguments, extra = parser.parse_known_args()
    return argparse.Namespace(**vars(arguments), extra=extra)


def environment_of(**variables: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables}


def seconds_alone(device: str) -> dict[str, float]:
    """By what a process does; without what this machine does not have."""
    found = {}
    for what, code in ALONE.items():
        command, taken = [sys.executable, "-c", code.format(device=device)], []
        for _ in range(3):
            started = time.perf_counter()
            if subprocess.run(command, env=environment_of(), capture_output=True, check=False).returncode:
                break
            taken.append(time.perf_counter() - started)
        if len(taken) == 3:
            found[what] = round(statistics.median(taken), 3)
    return found


def has_bytecode(package: str) -> bool:
    """Whether its modules lie compiled on disk: without, every process compiles what it imports."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.cached is not None and Path(spec.cached).is_file()


def import_seconds(device: str, extra: list[str], caches: Path) -> dict[str, float]:
    """Seconds in modules of each package of one warm command, those of 0.02 s and more, most first."""
    variables = {"PYTHONPROFILEIMPORTTIME": "1"}
    sums: dict[str, float] = {}
    for line in command_lines(1, device, extra, caches, variables)[0]:
        found = re.match(r"import time: +(\d+) \| +\d+ \| +([^. ]+)", line[1])
        if found is not None:
            sums[found[2]] = sums.get(found[2], 0.0) + int(found[1]) / 1e6
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return {package: round(seconds, 3) for package, seconds in ordered if seconds >= 0.02}


def run(num_gpus: int, device: str, extra: list[str], caches: Path) -> dict[str, Any]:
    """One command: seconds of each part, and from the start to the first step."""
    said, total = command_lines(num_gpus, device, extra, caches, {})
    parts = parts_of(said)
    return {
        "seconds_to_first_step": round(sum(list(parts.values())[: list(parts).index(FIRST_STEP) + 1]), 3),
        "parts": parts,
        "total_seconds": round(total, 3),
        "vae": next((line.strip() for _, line in said if line.startswith("vae:")), ""),
        "first_call_imports": [line.strip() for _, line in said if "for its first call" in line],
        "warnings": [line for _, line in said if "anew" in line or "left out" in line],
    }


def command_lines(
    num_gpus: int, device: str, extra: list[str], caches: Path, variables: Mapping[str, str]
) -> tuple[list[tuple[float, str]], float]:
    """What the command says, each line with the seconds since its start, and the seconds until it has ended."""
    environment = environment_of(
        DIFFUSION_RUNTIME_CACHE=str(caches / "runtime"),
        TRITON_CACHE_DIR=str(caches / "triton"),
        TORCHINDUCTOR_CACHE_DIR=str(caches / "inductor"),
        **variables,
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "diffusion_runtime", "generate", PROMPT, "--num-inference-steps", "4"]
        # A GIF, which needs no ffmpeg.
        command += ["--device", device, "--output-path", str(Path(folder) / "clip.gif")]
        command += [] if num_gpus == 1 else ["--num-gpus", str(num_gpus)]
        started = time.perf_counter()
        process = subprocess.Popen(
            [*command, *extra], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        said = [(time.perf_counter() - started, line.decode(errors="replace").rstrip()) for line in process.stderr]
        code = process.wait()
        total = time.perf_counter() - started
    if code != 0:
        raise SystemExit(f"{' '.join(command)} ended with {code}:\n" + "\n".join(line for _, line in said))
    return said, total


def parts_of(said: list[tuple[float, str]]) -> Mapping[str, float]:
    """Seconds of each part, by the first line that ends it. said: (seconds since the start, line)."""
    ends, rest = {}, iter(said)
    for mark, part in MARKS.items():
        found = next((seconds for seconds, line in rest if line.strip().startswith(mark)), None)
        if found is None:
            raise SystemExit(f"no line begins with {mark!r} in\n" + "\n".join(line for _, line in said))
        ends[part] = found
    starts = [0.0, *list(ends.values())[:-1]]
    return {part: round(end - start, 3) for (part, end), start in zip(ends.items(), starts, strict=True)}


def table(result: Mapping[str, Any]) -> str:
    head = f"{result['num_processes']} process(es), {result['kernel_cache']} kernel cache"
    rows = [f"  {seconds:7.2f}  {part}" for part, seconds in result["parts"].items()]
    return "\n".join([head, *rows, f"  {result['seconds_to_first_step']:7.2f}  start to first step"])


if __name__ == "__main__":
    sys.exit(main())
