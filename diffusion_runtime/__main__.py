"""The `diffusion-runtime` command, and `python -m diffusion_runtime`."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the command. An interruption while its modules are imported ends it with one line, not with a traceback."""
    is_rank = "RANK" in os.environ
    if not is_rank and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)
    from diffusion_runtime.cli.app import main as run_command

    run_command()


def _end_at_once(*_: object) -> None:
    os.write(2, b"error: interrupted: nothing was finished\n")
    os._exit(130)


if __name__ == "__main__":
    main()
