"""One of two processes that no launcher of torch's started: `late`, the second one leaves a moment after the first;
`dies`, the first one is killed while the second one waits for it."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from diffusion_runtime.parallel.process_info import read_process_info
from diffusion_runtime.parallel.world import World


def main(what: str) -> None:
    place = read_process_info()
    assert place is not None
    world = World.join(place, announce=lambda failure: print(failure.message, flush=True))
    world.open_groups(torch.device("cpu"), 600.0)
    world.agree(None)
    if what == "dies" and world.is_first:
        # Not before the other one has read the last answer from the store.
        world._store.wait(["waits"], give_up=lambda: False)
        os.kill(os.getpid(), signal.SIGKILL)
    if not world.is_first:
        world._store.set("waits", "")
        # The watch ends the process long before that.
        time.sleep(1000.0 if what == "dies" else 1.5)
    world.leave()
    print("left", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
