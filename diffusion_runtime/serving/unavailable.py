"""Unavailable: the server cannot take a job now, and may later."""

from __future__ import annotations


class Unavailable(Exception):
    """The server cannot take a job now. code: for the client; seconds: when to try again."""

    def __init__(self, code: str, message: str, seconds: int = 5) -> None:
        super().__init__(message)
        self.code = code
        self.seconds = seconds
