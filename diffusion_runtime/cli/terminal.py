"""Standard error: lines, warnings and the log, as text or JSON lines. Standard output is for paths and JSON alone."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_runtime.cli.consoles import console_on_stderr
from diffusion_runtime.cli.log_lines import LOG_FORMATS, LogLines
from diffusion_runtime.cli.progress import show_progress
from diffusion_runtime.errors import ConfigError, OutputError, nearest, shown
from diffusion_runtime.untrusted.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from diffusion_runtime.session.reporter import ProgressView

_PACKAGE_LOGGER = "diffusion_runtime"
# Libraries that log while they load; shown with --verbose, for debugging.
_LIBRARY_LOGGERS = ("diffusers", "transformers", "huggingface_hub", "torch", "py.warnings")


class Terminal:
    """quiet: errors only. verbose: tracebacks, and the log down to debug, libraries included.

    silent: nothing at all, for ranks other than 0, whose output rank 0 writes. log_format: `text` (None too), for
    people, or `json`, one object per line (log_lines.py). Raises ConfigError for another.
    """

    def __init__(
        self, *, quiet: bool = False, verbose: bool = False, silent: bool = False, log_format: str | None = None
    ) -> None:
        if log_format not in (None, *LOG_FORMATS):
            raise ConfigError(f"--log-format: unknown value {shown(log_format)}.{nearest(log_format, LOG_FORMATS)}")
        self.quiet = quiet or silent
        self.verbose = verbose
        self.silent = silent
        self.log_format = log_format
        self._lines = LogLines() if log_format == "json" else None
        # Lines of the log that stand above the next line, and above no error: of a command that is refused, they say
        # what would have run.
        self._held: list[tuple[str, str, str]] = []

    @cached_property
    def console(self) -> Console:
        """Made at its first use: importing rich takes a tenth of a second."""
        return console_on_stderr()

    @property
    def is_live(self) -> bool:
        """True where lines can be redrawn."""
        if self.quiet or self._lines is not None:
            return False
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def say(self, text: str, style: str = "", *, wraps: bool = False) -> None:
        """wraps: at words, with an indent, where a terminal is narrower; for lines without paths to copy."""
        if not self.quiet:
            self._put("info", self._wrapped(text) if wraps else text, style)

    def warn(self, text: str) -> None:
        if not self.quiet:
            self._put("warning", text, "yellow", "warning: ")

    def error(self, text: str, trace: str = "", kind: str = "", exit_code: int | None = None) -> None:
        """kind, exit_code: of the failure that ends the command, for programs."""
        if self._lines is not None:
            details: dict[str, Any] = {"kind": kind, "exit_code": exit_code, "trace": trace if self.verbose else ""}
            self._put("error", text, "", event="error", **{name: value for name, value in details.items() if value})
            return
        if self.verbose and trace:
            self._put("error", trace.rstrip(), "dim")
        self._put("error", text, "red", "error: ")

    def show(self, renderable: RenderableType) -> None:
        """A table or the like."""
        if self.quiet:
            return
        self._release(shown=True)
        if self._lines is not None:
            from diffusion_runtime.cli.tables import table_values

            title, columns, rows = table_values(renderable)
            self._put("info", title, "", event="table", columns=columns, rows=rows)
        else:
            self._print(renderable)

    def log_record(self, level: str, text: str, logger: str) -> None:
        """One record of a logger. level: info, or debug."""
        if self.quiet:
            return
        if self.verbose or self._lines is not None:
            self._put(level, text, "dim", **({} if self._lines is None else {"event": "log", "logger": logger}))
        else:
            self._held.append((level, text, "dim"))

    def count(self, text: str, **values: Any) -> None:
        """One line of progress; values: for programs, beside those of every line."""
        if not self.quiet:
            self._put("info", text, "", **({} if self._lines is None else {"event": "progress", **values}))

    def progress(self, title: str) -> AbstractContextManager[ProgressView]:
        """Shows the progress of one generation below a line with its title."""
        self._release(shown=True)
        if self._lines is not None and not self.quiet:
            return self._lines.progress(title)
        return show_progress(title, self.say, self.console if self.is_live else None)

    def _put(self, level: str, text: str, style: str, prefix: str = "", **values: Any) -> None:
        if self.silent:
            return
        self._release(shown=level != "error")
        if self._lines is not None:
            self._lines.put(level, text, **values)
        else:
            self._line(f"{prefix}{text}", style)

    def _release(self, *, shown: bool) -> None:
        """Print the lines of the log that wait, or drop them."""
        held, self._held = self._held, []
        for _, text, style in held if shown and not self.silent else ():
            self._line(text, style)

    def _line(self, text: str, style: str) -> None:
        from rich.text import Text

        # Text and not a string: a prompt may look like markup. soft_wrap: a path must stay in one piece.
        self._print(Text(printable(text), style=style), soft_wrap=True)

    def _wrapped(self, text: str) -> str:
        """Return the text in lines that fit the terminal; as it is for a file, a pipe and JSON lines, which programs
        read line by line. A word that is longer than a line, such as a path, stays in one piece."""
        if self._lines is not None or not self.console.is_terminal:
            return text
        from rich.cells import cell_len

        lines = [""]
        for word in printable(text).split(" "):
            longer = f"{lines[-1]} {word}" if lines[-1] else word
            if lines[-1].strip() and cell_len(longer) > self.console.width:
                lines.append(f"  {word}")
            else:
                lines[-1] = longer
        return "\n".join(lines)

    def _print(self, renderable: RenderableType, *, soft_wrap: bool = False) -> None:
        try:
            self.console.print(renderable, soft_wrap=soft_wrap)
        except OSError:
            # Standard error cannot be written, on a full disk for example. The command goes on.
            self.console.quiet = True

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
            self._release(shown=True)
        finally:
            logging.captureWarnings(False)
            for logger, (handlers, propagate, old_level) in zip(loggers, before, strict=True):
                logger.handlers, logger.propagate = handlers, propagate
                logger.setLevel(old_level)


class _TerminalHandler(logging.Handler):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal
        self._logged: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.levelno >= logging.ERROR:
                self._terminal.error(text)
            elif record.levelno >= logging.WARNING:
                self._terminal.warn(text)
            elif text not in self._logged or record.levelno < logging.INFO:
                # Once per command: preparing the model logs what loading it logs again.
                self._logged.add(text)
                self._terminal.log_record("info" if record.levelno >= logging.INFO else "debug", text, record.name)
        except Exception:
            self.handleError(record)


def prepare_standard_streams() -> bool:
    """For a process of its own, before anything else: no output can end a run. Returns whether there is a standard
    output, which results go to.

    A standard stream that is closed leads nowhere from here on; else the next file that is opened would get its number,
    and whatever is printed. What standard output cannot show in its encoding (ascii, latin-1, cp1252) is escaped, as
    Python does on standard error.
    """
    has_output = True
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            has_output = has_output and number != 1
            # The lowest free number is the one that is given.
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    return has_output


def put_path_on_stdout(path: Path) -> None:
    """A result's path, for programs: where the stream's encoding lacks a character, in the bytes of the file's name."""
    text = str(path)
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper) and not stream.isatty() and not _can_encode(text, stream.encoding):
        _put(lambda: stream.buffer.write(os.fsencode(text) + b"\n"))
        return
    put_on_stdout(text)


def put_on_stdout(text: str) -> None:
    """One line on standard output, at once, so that whoever reads a pipe has it. A reader that left is no error. A pipe
    and a file get it as it is, a terminal without what would drive it.

    Raises OutputError when it cannot be written, as on a full disk; later lines go nowhere.
    """
    _put(lambda: sys.stdout.write((printable(text) if sys.stdout.isatty() else text) + "\n"))


def _put(write: Callable[[], object]) -> None:
    try:
        write()
        sys.stdout.flush()
    except OSError as error:
        # What is still buffered would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise OutputError(f"cannot write to standard output: {error.strerror or error}") from error


def _can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def put_failure_on_stdout(schema: str, failure: Mapping[str, Any]) -> None:
    """The JSON object of a verb that failed; standard error has the message already."""
    with contextlib.suppress(OutputError):
        put_on_stdout(json_text({"schema": schema, "items": [], **failure}))


def json_text(value: dict[str, Any]) -> str:
    """In ASCII: any stream can carry it, and names of files that are not UTF-8 too."""
    import json

    return json.dumps(value, indent=2, ensure_ascii=True, default=str)
