"""From the start of a process to the first denoising step of the embedded model, part by part: what a user waits for.

    python -m benchmarks.start_gpu --num-gpus 1 2 --output benchmarks/results/start_gpu.json

The real command runs as a process of its own, `generate PROMPT --num-inference-steps 4`, and every line that it says is
timed when it is read. `cold` has an empty kernel cache (this project's, FlashAttention-4's in it, Triton's and
torch.compile's), `warm` what the run before left there; the disk's cache is warm after the first run of all. Other
flags are the command's. About 45 s for one GPU and 60 s for two on an H200; `--device cpu` tries every path on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
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


def main() -> int:
    arguments = parse_arguments()
    results = []
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
    document = {
        "schema": "diffusion_runtime.start_gpu/1",
        "machine": describe_host(),
        "device": arguments.device,
        "extra": arguments.extra,
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


def run(num_gpus: int, device: str, extra: list[str], caches: Path) -> dict[str, Any]:
    """One command: seconds of each part, and from the start to the first step."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH", "")))),
        "PYTHONUNBUFFERED": "1",
        "DIFFUSION_RUNTIME_CACHE": str(caches / "runtime"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
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
    parts = parts_of(said)
    return {
        "seconds_to_first_step": round(sum(list(parts.values())[: list(parts).index(FIRST_STEP) + 1]), 3),
        "parts": parts,
        "total_seconds": round(total, 3),
        "vae": next((line.strip() for _, line in said if line.startswith("vae:")), ""),
        "warnings": [line for _, line in said if "anew" in line or "left out" in line],
    }


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
