"""Log of a server on standard error: lines of text, or JSON objects with the request's id."""

from __future__ import annotations

import datetime
import json
import logging

from diffusion_runtime.untrusted.printable import printable

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonRecords(logging.Formatter):
    """One JSON object per record: time, level, logger, message, and what the record has beside them."""

    def format(self, record: logging.LogRecord) -> str:
        own = {name: value for name, value in vars(record).items() if name not in _PLAIN}
        now = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        line = {"time": now.replace("+00:00", "Z"), "level": record.levelname.lower(), "logger": record.name}
        trace = {"trace": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**line, "message": record.getMessage(), **own, **trace}, default=str)


class TextRecords(logging.Formatter):
    """One line per record, without control characters of a client."""

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", "")
        seconds = getattr(record, "seconds", None)
        after = f" {seconds:.3f} s" if seconds is not None else ""
        line = f"{record.levelname.lower()} {printable(record.getMessage())}{after} {request_id}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def log_to_stderr(log_format: str | None) -> None:
    """Send the server's records to standard error. log_format: `json`, or text."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonRecords() if log_format == "json" else TextRecords())
    for name, level in (("diffusion_runtime", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
