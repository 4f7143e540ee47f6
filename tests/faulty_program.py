"""The command, with a fault or an ear in it: what `plan.json` beside this file says. Started as a script of its own.

`{"latents": FILE}`: the first process saves there what it decodes. `{"rank": R, "stage": S, "step": N, "fault": F}`:
process R does F when its progress gets there: `kill` or `stop` itself, `raise` an error or `hang`. The stage `write` is
the first process's writing, between its temporary files and their names; `end` comes when all items are made. The file
`happened` says when, in seconds of the system's clock.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

HAPPENED = "happened"
PLAN = json.loads(Path(__file__).with_name("plan.json").read_text())


def misbehave(stage: str, step: int) -> None:
    if (os.environ.get("RANK"), stage, step) != (str(PLAN.get("rank")), PLAN.get("stage"), PLAN.get("step")):
        return
    Path(__file__).with_name(HAPPENED).write_text(str(time.time()))
    fault = PLAN["fault"]
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    elif fault == "raise":
        raise RuntimeError("a fault of the test")
    else:
        time.sleep(1000)


def meddle() -> None:
    """Put hooks around the parts that a process has."""
    import numpy

    from diffusion_runtime.cli import generation
    from diffusion_runtime.media import generated
    from diffusion_runtime.models.interface import LatentDecoder
    from diffusion_runtime.models.shared_decoder import SharedDecoder
    from diffusion_runtime.models.wan.codec import WanDecoder
    from diffusion_runtime.pipeline import Pipeline

    # With several processes each decodes a part of what this one is given.
    decoder: type[LatentDecoder] = SharedDecoder if "RANK" in os.environ else WanDecoder
    call, decode, publish = Pipeline.__call__, decoder.decode, generated.publish_pair

    def watched_call(self: Pipeline, request: Any, *, on_progress: Any = None) -> Any:
        def watched(progress: Any) -> None:
            misbehave(progress.stage, progress.step)
            on_progress(progress)

        return call(self, request, on_progress=watched)

    def heard_decode(self: Any, latents: Any) -> Any:
        if "latents" in PLAN and os.environ.get("RANK", "0") == "0":
            numpy.save(PLAN["latents"], latents.cpu().numpy())
        return decode(self, latents)

    def watched_publish(*arguments: Any, **options: Any) -> Any:
        misbehave("write", 1)
        return publish(*arguments, **options)

    say_end = generation._say_end

    def watched_end(*arguments: Any) -> None:
        misbehave("end", 1)
        say_end(*arguments)

    generation._say_end = watched_end
    Pipeline.__call__ = watched_call  # type: ignore[method-assign]
    decoder.decode = heard_decode  # type: ignore[method-assign]
    generated.publish_pair = watched_publish


if __name__ == "__main__":
    from diffusion_runtime.cli.app import main

    meddle()
    main()
