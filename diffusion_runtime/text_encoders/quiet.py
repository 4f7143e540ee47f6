"""Silences transformers' progress bars and reports; this runtime has its own messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside the block transformers logs errors alone; afterwards the previous verbosity is restored."""
    from transformers.utils import logging as typed_logging

    logging: Any = typed_logging  # Some of its functions have no annotations.
    verbosity, had_progress_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress_bars:
            logging.enable_progress_bar()
