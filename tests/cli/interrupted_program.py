"""Commands that are interrupted at moments that no test could hit from outside. Started as a script of its own with a
folder and a command line; each case of CASES runs in a fork of it, as NAME.out, NAME.err, NAME.code and a folder NAME.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusion_runtime.cli import app, generation
from diffusion_runtime.media import file_writer, generated

LONG = 1000


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def twice_while_writing() -> None:
    def encode(*_: Any) -> None:
        """In the file writer's thread, which what is unwound then waits for."""
        interrupt()
        time.sleep(2)
        interrupt()
        time.sleep(LONG)

    file_writer.encode = encode


def after_publishing() -> None:
    publish = generated.publish_pair

    def published(*arguments: Any, **options: Any) -> Path:
        path = publish(*arguments, **options)
        interrupt()
        return path

    generated.publish_pair = published


def at_the_summary() -> None:
    report_end = generation._report_end
    calls: list[int] = []

    def said(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            interrupt()
        report_end(*arguments)

    generation._report_end = said


def while_it_exits() -> None:
    def slow() -> None:
        interrupt()
        time.sleep(LONG)

    atexit.register(slow)


CASES: tuple[Callable[[], None], ...] = (twice_while_writing, after_publishing, at_the_summary, while_it_exits)


def main(folder: Path, arguments: list[str]) -> None:
    # Whatever all of them need, once.
    import diffusion_runtime.loading

    assert diffusion_runtime.loading
    for case in CASES:
        child = os.fork()
        if child == 0:
            for stream, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(folder / f"{case.__name__}.{name}", os.O_CREAT | os.O_WRONLY), stream)
            case()
            sys.argv[1:] = [*arguments, "-o", f"{folder / case.__name__}/"]
            app.main()
        _, status = os.waitpid(child, 0)
        (folder / f"{case.__name__}.code").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
