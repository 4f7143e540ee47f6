"""Standard error, for people: lines, warnings, the package's log. Standard output is for paths and JSON alone."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from diffusion_runtime.errors import OutputError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_PACKAGE_LOGGER = "diffusion_runtime"
# Libraries that talk while they load; what they say is of use to whoever looks for a fault.
_LIBRARY_LOGGERS = ("diffusers", "transformers", "huggingface_hub", "torch", "py.warnings")


class Terminal:
    """For people. quiet: errors only. verbose: tracebacks, and the log down to debug, libraries included.

    silent: nothing at all, for a process that another one speaks for.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False, silent: bool = False) -> None:
        from rich.console import Console

        self.quiet = quiet or silent
        self.verbose = verbose
        self.silent = silent
        self.console: Console = Console(stderr=True, highlight=False)

    @property
    def is_live(self) -> bool:
        """Whether lines can be redrawn."""
        return self.console.is_terminal and not self.console.is_dumb_terminal and not self.quiet

    def say(self, text: str, style: str = "") -> None:
        if not self.quiet:
            self._line(text, style)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}", "yellow")

    def error(self, text: str, trace: str = "") -> None:
        if self.verbose and trace:
            self._line(trace.rstrip(), "dim")
        self._line(f"error: {text}", "red")

    def show(self, renderable: RenderableType) -> None:
        """A table or the like."""
        if not self.quiet:
            self.console.print(renderable)

    def _line(self, text: str, style: str) -> None:
        from rich.text import Text

        if self.silent:
            return
        # Text and not a string: a prompt may look like markup. soft_wrap: a path must stay in one piece.
        self.console.print(Text(printable(text), style=style), soft_wrap=True)

    @contextlib.contextmanager
    def log(self) -> Iterator[None]:
        """Show the package's log here while the block runs, and the libraries' with `verbose`."""
        level = logging.DEBUG if self.verbose else logging.ERROR if self.quiet else logging.INFO
        handler = _TerminalHandler(self)
        loggers = [logging.getLogger(name) for name in (_PACKAGE_LOGGER, *_LIBRARY_LOGGERS)]
        before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
        logging.captureWarnings(True)
        for logger in loggers:
            logger.handlers, logger.propagate = [handler], False
            logger.setLevel(level if logger.name == _PACKAGE_LOGGER or self.verbose else logging.ERROR)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            for logger, (handlers, propagate, old_level) in zip(loggers, before, strict=True):
                logger.handlers, logger.propagate = handlers, propagate
                logger.setLevel(old_level)


class _TerminalHandler(logging.Handler):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.levelno >= logging.ERROR:
                self._terminal.error(text)
            elif record.levelno >= logging.WARNING:
                self._terminal.warn(text)
            elif text not in self._said or record.levelno < logging.INFO:
                # Once a command: what a look at the model says is said again when the model is loaded.
                self._said.add(text)
                self._terminal.say(text, "dim")
        except Exception:
            self.handleError(record)


def printable(text: str) -> str:
    """`text` without control characters, which in a stranger's file could drive the terminal; lines and tabs stay."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs"))


def put_on_stdout(text: str) -> None:
    """One line on standard output, at once, so that whoever reads a pipe has it. A reader that left is no error.

    Raises OutputError when it cannot be written, as on a full disk; later lines go nowhere.
    """
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        # What is still buffered would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise OutputError(f"cannot write to standard output: {error.strerror or error}") from error


def put_failure_on_stdout(schema: str, failure: Mapping[str, Any]) -> None:
    """The JSON object of a verb that failed, which standard error has said already."""
    with contextlib.suppress(OutputError):
        put_on_stdout(json_text({"schema": schema, "items": [], **failure}))


def json_text(value: dict[str, Any]) -> str:
    import json

    return json.dumps(value, indent=2, ensure_ascii=False, default=str)
