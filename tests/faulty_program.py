"""The command, with faults or an ear in it: what `plan.json` beside this file says. Started as a script of its own.

`{"latents": FILE}`: the first process saves there what it decodes. `{"faults": [{"rank": R, "stage": S, "step": N,
"fault": F}]}`: process R does F when its progress gets there: `kill`, `stop`, `interrupt` or `terminate` itself
(`terminate often`: many times, and in a finalizer first; `terminate late`: when the others wait for it), `raise` an
error, `hang`, be `deaf` to interruptions for ever, or be `busy` in one call that keeps the interpreter.
Stages beside those of the progress: `start`, before anything is imported; `import`, when signals are handled and the
verb imports; `join`, before the processes meet; `load`, before weights are read; `write`, between the first process's
temporary files and their names; `chunk`, before a stream's chunk of this number, from 1; `end`, when all items are
made. `{"seconds": {NAME: SECONDS}}`: limits of
signs_of_life. The file `happened` is there once a fault has begun, `heard` once a deaf process was interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PLAN = json.loads((HERE / "plan.json").read_text())
# Longer than the limit on silence that the tests set.
BUSY_SECONDS = 6.0
# For another process to import and to wait for this one; the outcome is the same where that takes longer.
LATE_SECONDS = 2.0


def misbehave(stage: str, step: int = 1) -> None:
    for fault in PLAN.get("faults", ()):
        if (os.environ.get("RANK"), stage, step) == (str(fault["rank"]), fault["stage"], fault.get("step", 1)):
            (HERE / "happened").touch()
            FAULTS[fault["fault"]]()


def be_deaf() -> None:
    signal.signal(signal.SIGINT, lambda *_: (HERE / "heard").touch())
    while True:
        time.sleep(1)


def be_busy() -> None:
    """In one call into C at last, as a compiler is: other threads get no turn."""
    num_items, seconds = 1_000_000, 0.0
    while seconds < BUSY_SECONDS / 2:
        started = time.process_time()
        sum(range(num_items))
        seconds = time.process_time() - started
        num_items *= 2


class _TerminatedInFinalizer:
    """The handler of SIGTERM runs in its finalizer, where what it raises is lost."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)


def be_terminated_often() -> None:
    """By whoever finds that the run is over: in a finalizer, and again and again while this process ends."""

    def terminate() -> None:
        while True:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.0005)

    _TerminatedInFinalizer()
    threading.Thread(target=terminate, daemon=True).start()
    time.sleep(1000)


def be_terminated_late() -> None:
    time.sleep(LATE_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise RuntimeError("a fault of the test")


FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "terminate late": be_terminated_late,
    "terminate often": be_terminated_often,
    "raise": fail,
    "hang": lambda: time.sleep(1000),
    "deaf": be_deaf,
    "busy": be_busy,
}


def meddle() -> None:
    """Put hooks around the parts that a process has."""
    import numpy

    from diffusion_runtime.cli import app, generation
    from diffusion_runtime.decoders.causal_video_decoder import CausalVideoDecoder
    from diffusion_runtime.decoders.interface import LatentDecoder
    from diffusion_runtime.decoders.shared_decoder import SharedDecoder
    from diffusion_runtime.generation.chunked_denoiser import ChunkStream
    from diffusion_runtime.loading import native_model
    from diffusion_runtime.media import generated
    from diffusion_runtime.parallel import signs_of_life
    from diffusion_runtime.parallel.world import World
    from diffusion_runtime.pipeline import Pipeline

    # With several processes each decodes a part of what this one is given.
    decoder: type[LatentDecoder] = SharedDecoder if "RANK" in os.environ else CausalVideoDecoder
    call, decode, publish = Pipeline.__call__, decoder.stream, generated.publish_pair

    def watched_call(self: Pipeline, request: Any, *, on_progress: Any = None, open_sink: Any = None) -> Any:
        def watched(progress: Any) -> None:
            misbehave(progress.stage, progress.step)
            on_progress(progress)

        return call(self, request, on_progress=watched, open_sink=open_sink)

    def saving_stream(self: Any, latents: Any, bands: Any = None) -> Any:
        if "latents" in PLAN and os.environ.get("RANK", "0") == "0":
            numpy.save(PLAN["latents"], latents.cpu().numpy())
        return decode(self, latents, bands)

    def watched_publish(*arguments: Any, **options: Any) -> Any:
        misbehave("write")
        return publish(*arguments, **options)

    for name, seconds in PLAN.get("seconds", {}).items():
        setattr(signs_of_life, name, seconds)
    join, check = World.join, native_model.check_component_files

    def watched_join(*arguments: Any, **options: Any) -> World:
        misbehave("join")
        return join(*arguments, **options)

    def watched_check(*arguments: Any) -> None:
        misbehave("load")
        check(*arguments)

    World.join = watched_join  # type: ignore[method-assign]
    native_model.check_component_files = watched_check

    following = ChunkStream.__next__
    num_chunks = 0

    def watched_chunk(self: ChunkStream) -> Any:
        nonlocal num_chunks
        num_chunks += 1
        misbehave("chunk", num_chunks)
        return following(self)

    ChunkStream.__next__ = watched_chunk  # type: ignore[method-assign]

    rewrite = app.rewrite_dotted_flags

    def watched_rewrite(arguments: Sequence[str]) -> list[str]:
        misbehave("import")
        return rewrite(arguments)

    app.rewrite_dotted_flags = watched_rewrite

    report_end = generation._report_end

    def watched_end(*arguments: Any) -> None:
        misbehave("end")
        report_end(*arguments)

    generation._report_end = watched_end
    Pipeline.__call__ = watched_call  # type: ignore[method-assign]
    decoder.stream = saving_stream  # type: ignore[method-assign]
    generated.publish_pair = watched_publish


if __name__ == "__main__":
    misbehave("start")
    from diffusion_runtime.cli.app import main

    meddle()
    main()
