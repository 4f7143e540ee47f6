"""Seconds of the first command of the embedded model on a GPU, from the start of its process to its file.

    python -m benchmarks.start_gpu --only cold-warm --output start_gpu.json
    python -m benchmarks.start_gpu --num-gpus 1 2 --bytecode --output benchmarks/results/start_gpu.json

The real command runs as a process of its own, `generate PROMPT`, and every line that it says is timed when it is read.
`cold` has empty caches of kernels (this project's, Triton's, torch.compile's, the driver's), `warm` what the run before
left there, as every command on a machine but its first. Their frames must be the same. The disk's cache is another
matter: libraries are read once first, which takes 90 s on a machine that has just started, and their seconds are kept
apart. `alone` are processes that do one thing, the interpreter included; `imports` is one more warm run under
`-X importtime`, which slows it down: seconds by package.

Each process has --seconds at most, and one that fails or takes longer is shown and gives no figure: the exit code is 1.
The file is written after every result. Other flags are the command's. --bytecode: Python keeps the bytecode of what it
imports, as an installation by pip does, where a machine forbids it. `--device cpu` tries every path on a CPU. On an
H200 `cold-warm` takes about 30 s besides the libraries, `alone` 40 s and `imports` 15 s.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageSequence

from benchmarks.machine import describe_host

REPOSITORY = Path(__file__).parents[1]
PROMPT = "a red circle moving left"
COLD_WARM, ALONE_PART, IMPORTS_PART = PARTS = ("cold-warm", "alone", "imports")
FIRST_STEP = "first steps, until one is said"
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
# What brings the files of a start into the disk's cache: modules, and the libraries of a first product and convolution.
_TOUCH = (
    "import torch, diffusion_runtime.cli.app, diffusion_runtime.loading.native_preparation; "
    "x = torch.ones(1, 8, 8, 8, device={device!r}); torch.nn.functional.conv2d(x, x[:, :, :3, :3]); "
    "(x @ x).sum().item()"
)
_CHUNK = 2**24
_REMARKS = ("compile", "eager", "anew", "left out", "for its first call", "first use", "passed over")


class NoFigureError(Exception):
    """A process failed or took too long, so that there is no figure of it."""


@dataclass
class Document:
    """The results so far, written to `path` whenever one is added."""

    path: Path | None
    values: dict[str, Any]
    failures: list[str] = field(default_factory=list)

    def note(self, **values: Any) -> None:
        self.values.update(values)
        self.write()

    def write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({**self.values, "failures": self.failures}, indent=1) + "\n")

    @contextlib.contextmanager
    def tried(self, what: str) -> Iterator[None]:
        """Context manager: a process of it that gives no figure is shown and listed, and the next part begins."""
        try:
            yield
        except NoFigureError as error:
            say(f"NO FIGURE of {what}: {error}")
            self.failures.append(f"{what}: {error}")
            self.write()


@dataclass(frozen=True)
class Runner:
    """Starts processes. seconds: that each of them may take. variables: of all of them."""

    seconds: float
    variables: Mapping[str, str]

    def lines(self, command: Sequence[str], **variables: str) -> tuple[list[tuple[float, str]], float]:
        """Return the lines of standard error with the seconds since the start, and the seconds until the process ended.

        Raises NoFigureError, with what it said, where it fails or is stopped after `seconds`.
        """
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **self.variables, **variables}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH", ""))))
        if "PYTHONPYCACHEPREFIX" in self.variables:
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
        started = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        stopped = threading.Event()

        def stop() -> None:
            stopped.set()
            with contextlib.suppress(ProcessLookupError):
                # With those that it started, which hold the pipe too.
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(self.seconds, stop)
        timer.start()
        try:
            assert process.stderr is not None
            said = [(time.perf_counter() - started, line.decode(errors="replace").rstrip()) for line in process.stderr]
            code = process.wait()
        except BaseException:
            stop()
            raise
        finally:
            timer.cancel()
        total = time.perf_counter() - started
        if stopped.is_set() or code != 0:
            how = f"was stopped after {self.seconds:.0f} s" if stopped.is_set() else f"ended with {code}"
            last = "\n".join(f"  {seconds:7.2f}  {line}" for seconds, line in said[-20:])
            raise NoFigureError(f"{' '.join(command)} {how}; its last lines:\n{last}")
        return said, total


def main() -> int:
    arguments = parse_arguments()
    parts = arguments.only or PARTS
    document = Document(arguments.output, {"schema": "diffusion_runtime.start_gpu/2", "machine": describe_host()})
    document.note(device=arguments.device, extra=arguments.extra, num_inference_steps=arguments.num_inference_steps)
    with tempfile.TemporaryDirectory() as folder:
        prefix = {"PYTHONPYCACHEPREFIX": str(Path(folder) / "bytecode")} if arguments.bytecode else {}
        runner = Runner(arguments.seconds, prefix)
        document.note(torch_has_bytecode=arguments.bytecode or has_bytecode("torch"))
        document.note(disk=fill_disk_cache(runner, arguments.device, arguments.library_seconds, document))
        if ALONE_PART in parts:
            measure_alone(runner, arguments.device, document)
        for num_gpus in arguments.num_gpus if COLD_WARM in parts or IMPORTS_PART in parts else ():
            caches = Path(folder) / f"caches-{num_gpus}"
            measure_command(runner, arguments, num_gpus, caches, document, parts)
    if arguments.output is None:
        print(json.dumps({**document.values, "failures": document.failures}, indent=1))
    return 1 if document.failures else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to measure; all without it")
    parser.add_argument("--num-gpus", type=int, nargs="+", default=[1])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu")
    parser.add_argument("--warm", type=int, default=1, help="runs with warm caches of kernels")
    parser.add_argument("--num-inference-steps", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=90.0, help="that one process may take")
    parser.add_argument("--library-seconds", type=float, default=150.0, help="that reading libraries may take")
    parser.add_argument("--bytecode", action="store_true", help="keep bytecode, as an installation by pip does")
    parser.add_argument("--output", type=Path)
    # What it does not know is the command's.
    arguments, extra = parser.parse_known_args()
    if arguments.num_inference_steps < 9:
        parser.error("--num-inference-steps: expected 9 or more, whose last step is not the first that is said")
    return argparse.Namespace(**vars(arguments), extra=extra)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fill_disk_cache(runner: Runner, device: str, seconds: float, document: Document) -> dict[str, Any]:
    """Read the libraries of torch and CUDA one after the other, which is faster than what maps them, and import once.
    Returns the bytes and seconds."""
    libraries = sorted(each for folder in library_folders() for each in folder.glob("*.so*") if each.is_file())
    started, num_bytes, deadline = time.perf_counter(), 0, time.monotonic() + seconds

    def read(path: Path) -> int:
        done = 0
        with path.open("rb", buffering=0) as file:
            while time.monotonic() < deadline and (chunk := file.read(_CHUNK)):
                done += len(chunk)
        return done

    say(f"reading {len(libraries)} libraries")
    with ThreadPoolExecutor(4) as pool:
        for path, count in zip(libraries, pool.map(read, libraries), strict=True):
            num_bytes += count
            if count > 2**28:
                say(f"  {time.perf_counter() - started:7.2f}  {num_bytes / 2**30:5.2f} GiB, {path.name}")
    found: dict[str, Any] = {"library_bytes": num_bytes, "library_seconds": round(time.perf_counter() - started, 2)}
    found["complete"] = num_bytes == sum(path.stat().st_size for path in libraries)
    # Twice: what the first one takes is the disk's, and the bytecode's where it is kept.
    for name in ("first", "second"):
        with document.tried(f"{name} import"):
            found[f"{name}_import_seconds"] = round(
                runner.lines([sys.executable, "-c", _TOUCH.format(device=device)])[1], 2
            )
    say(f"disk's cache: {found}")
    return found


def library_folders() -> list[Path]:
    """Folders of the libraries of torch and of the packages of CUDA next to it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    return [torch / "lib", *torch.parent.glob("nvidia/*/lib")]


def has_bytecode(package: str) -> bool:
    """Whether its modules lie compiled on disk: without, every process compiles what it imports."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.cached is not None and Path(spec.cached).is_file()


def measure_alone(runner: Runner, device: str, document: Document) -> None:
    """Seconds by what a process does; without what this machine does not have."""
    alone: dict[str, float] = {}
    for what, code in ALONE.items():
        try:
            alone[what] = round(runner.lines([sys.executable, "-c", code.format(device=device)])[1], 3)
        except NoFigureError as error:
            say(f"{what}: no figure, {error}")
            continue
        say(f"  {alone[what]:7.2f}  {what}")
        document.note(alone=alone)


def measure_command(
    runner: Runner,
    arguments: argparse.Namespace,
    num_gpus: int,
    caches: Path,
    document: Document,
    parts: Sequence[str],
) -> None:
    """Run the command cold and warm, and once more for its imports."""
    command = Command(runner, arguments.device, arguments.num_inference_steps, num_gpus, arguments.extra, caches)
    runs: list[dict[str, Any]] = []
    every = document.values.setdefault("runs", [])
    digests = set()
    for index in range(1 + arguments.warm) if COLD_WARM in parts else ():
        kernel_cache = "warm" if index else "cold"
        if index and not runs:
            # The caches are not those of a run that went well.
            break
        with document.tried(f"{num_gpus} process(es), {kernel_cache}"):
            result = {"num_processes": num_gpus, "kernel_cache": kernel_cache, **command.timed()}
            runs.append(result)
            every.append(result)
            digests.add(result["frames"])
            document.write()
            say(table(result))
    if len(digests) > 1:
        document.failures.append(f"{num_gpus} process(es): the frames differ from cold to warm")
        say(document.failures[-1])
        document.write()
    if IMPORTS_PART in parts and num_gpus == 1:
        with document.tried("imports"):
            document.note(imports=command.import_seconds())
            say(json.dumps(document.values["imports"]))


@dataclass(frozen=True)
class Command:
    """The real command. caches: the folder of its caches of kernels, empty before the first run."""

    runner: Runner
    device: str
    num_steps: int
    num_gpus: int
    extra: Sequence[str]
    caches: Path

    def timed(self) -> dict[str, Any]:
        """Run once: seconds of each part, to the first step and to the file. Raises NoFigureError."""
        said, total, frames = self._run({})
        parts = self._parts_of(said)
        return {
            "seconds_to_file": round(sum(parts.values()), 3),
            "total_seconds": round(total, 3),
            "seconds_to_first_step": round(sum(list(parts.values())[: list(parts).index(FIRST_STEP) + 1]), 3),
            "parts": parts,
            "vae": next((line.strip() for _, line in said if line.startswith("vae:")), ""),
            "remarks": [line.strip() for _, line in said if any(word in line for word in _REMARKS)],
            "frames": frames,
        }

    def import_seconds(self) -> dict[str, float]:
        """Seconds in modules of each package of one run, those of 0.02 s and more, most first."""
        sums: dict[str, float] = {}
        for _, line in self._run({"PYTHONPROFILEIMPORTTIME": "1"})[0]:
            found = re.match(r"import time: +(\d+) \| +\d+ \| +([^. ]+)", line)
            if found is not None:
                sums[found[2]] = sums.get(found[2], 0.0) + int(found[1]) / 1e6
        ordered = sorted(sums.items(), key=lambda item: -item[1])
        return {package: round(seconds, 3) for package, seconds in ordered if seconds >= 0.02}

    def _run(self, variables: Mapping[str, str]) -> tuple[list[tuple[float, str]], float, str]:
        """Lines and seconds as of Runner.lines, and a digest of the frames."""
        caches = {
            "DIFFUSION_RUNTIME_CACHE": str(self.caches / "runtime"),
            "TRITON_CACHE_DIR": str(self.caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.caches / "inductor"),
            "CUDA_CACHE_PATH": str(self.caches / "cuda"),
        }
        with tempfile.TemporaryDirectory() as folder:
            # A GIF, which needs no ffmpeg.
            path = Path(folder) / "clip.gif"
            command = [sys.executable, "-m", "diffusion_runtime", "generate", PROMPT, "--device", self.device]
            command += ["--model-path", "shapes", "--num-inference-steps", str(self.num_steps), "-o", str(path)]
            command += [] if self.num_gpus == 1 else ["--num-gpus", str(self.num_gpus)]
            said, total = self.runner.lines([*command, *self.extra], **caches, **variables)
            if not path.is_file():
                raise NoFigureError(f"{' '.join(command)} ended well and left no file")
            with Image.open(path) as image:
                digest = hashlib.sha256()
                for frame in ImageSequence.Iterator(image):
                    digest.update(frame.convert("RGB").tobytes())
        return said, total, digest.hexdigest()[:16]

    def _parts_of(self, said: list[tuple[float, str]]) -> dict[str, float]:
        """Seconds of each part, by the first line that ends it. said: (seconds since the start, line)."""
        marks = {
            "loading shapes": "interpreter, command line, launcher",
            "choosing attention": "imports, model folder, attention chosen",
            "loading the text encoder": "self-check of third-party attention",
            "loading the transformer": "text encoder",
            "loading the decoder": "transformer",
            PROMPT: "decoder, processes in step",
            "text:": "text",
            # Of more than eight steps every second one or fewer is said.
            "denoise: step ": FIRST_STEP,
            f"denoise: step {self.num_steps}/": "other steps",
            "decode:": "decode",
            "wrote": "write",
        }
        ends, rest = {}, iter(said)
        for mark, part in marks.items():
            found = next((seconds for seconds, line in rest if line.strip().startswith(mark)), None)
            if found is None:
                raise NoFigureError(f"no line begins with {mark!r} in\n" + "\n".join(line for _, line in said))
            ends[part] = found
        starts = [0.0, *list(ends.values())[:-1]]
        return {part: round(end - start, 3) for (part, end), start in zip(ends.items(), starts, strict=True)}


def table(result: Mapping[str, Any]) -> str:
    head = f"{result['num_processes']} process(es), {result['kernel_cache']} caches of kernels"
    rows = [f"  {seconds:7.2f}  {part}" for part, seconds in result["parts"].items()]
    last = [
        f"  {result['seconds_to_first_step']:7.2f}  start to the first step that is said",
        f"  {result['seconds_to_file']:7.2f}  start to file; frames {result['frames']}",
        f"  {result['total_seconds']:7.2f}  start to end",
    ]
    return "\n".join([head, *rows, *last, *(f"    {line}" for line in result["remarks"])])


if __name__ == "__main__":
    sys.exit(main())
