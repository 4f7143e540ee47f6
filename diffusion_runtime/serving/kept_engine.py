"""Kept engine (supervisor of one replica): an engine that is started when it is wanted, again when it ends, and
replaced when it hangs; and what it says of its model."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from diffusion_runtime.serving.engines import SILENT_SECONDS, Engine, EngineLost, Engines, skew
from diffusion_runtime.serving.unavailable import Unavailable

if TYPE_CHECKING:
    from diffusion_runtime.serving.metrics import Metrics

_logger = logging.getLogger("diffusion_runtime.serving")
_LONGEST_PAUSE = 30.0
# An engine that ran for so long is started again at once, though it never was ready.
_LONG = 60.0
# What it may take from its start to its first message: importing torch from a cold disk, meeting other ranks.
_START_SECONDS = 600.0
_LOOK_SECONDS = 0.5
# Between two looks of a server that was itself stopped or starved, whose engines are then not judged.
_ASLEEP_SECONDS = 5.0


class KeptEngine:
    """One replica. given: the engine's config. on_message: called with this and each message. hang_timeout: seconds
    without progress of a batch after which it is replaced.

    card: what its model is, None until that is loaded; loading: how far that is. failure: why the model cannot be
    loaded, None for no reason. batch: of the dispatcher, while one runs; it has its result when the engine is done, and
    raises EngineLost where that ends before. idle_since: of time.monotonic, when it last became free.
    """

    def __init__(
        self,
        index: int,
        engines: Engines,
        given: Mapping[str, Any],
        on_message: Callable[[KeptEngine, dict[str, Any]], None],
        metrics: Metrics,
        hang_timeout: float,
    ) -> None:
        self.index = index
        self._engines = engines
        self._given = given
        self._on_message = on_message
        self._metrics = metrics
        self._hang_timeout = hang_timeout
        self._engine: Engine | None = None
        self._wanted = asyncio.Event()
        self._is_connected = False
        self._heard = self._moved = self.idle_since = time.monotonic()
        self.card: Mapping[str, Any] | None = None
        self.loading = "not wanted"
        self.failure: Mapping[str, Any] | None = None
        self.batch: asyncio.Future[None] | None = None
        self.restarts = 0

    @property
    def is_wanted(self) -> bool:
        return self._wanted.is_set()

    @property
    def is_free(self) -> bool:
        """True where a batch can begin."""
        return self.card is not None and self.batch is None

    @property
    def state(self) -> str:
        """Return `off`, `loading`, `ready`, `busy` or `failed`."""
        if not self.is_wanted:
            return "off"
        if self.card is None:
            return "loading" if self.failure is None else "failed"
        return "ready" if self.batch is None else "busy"

    def want(self) -> None:
        """Have an engine run."""
        self._wanted.set()

    def dismiss(self) -> None:
        """Let go of the engine, and start none until one is wanted."""
        self._wanted.clear()
        if self._engine is not None:
            self._engine.release()

    async def run(self) -> None:
        """Run an engine while one is wanted, and another when it ends."""
        pause, given = 1.0, self._given
        while True:
            if not self.is_wanted:
                self.loading = "not wanted"
                await self._wanted.wait()
            began = self._heard = time.monotonic()
            self.loading, self._is_connected = "starting", False
            self._engine = self._engines.engine(self.index, given, self._take)
            watch = asyncio.ensure_future(self._watch())
            try:
                code = await self._engine.run()
            finally:
                watch.cancel()
            was_ready, self.card = self.card is not None, None
            self._lose_batch()
            if not self.is_wanted:
                continue
            self.restarts += 1
            self.loading = f"the engine ended with code {code}, and is started again"
            _logger.error("the engine ended", extra={"exit_code": code, "replica": self.index})
            self._metrics.restarts.inc()
            is_sound = was_ready or time.monotonic() - began > _LONG
            pause = 0.0 if is_sound else min(_LONGEST_PAUSE, max(1.0, pause * 2))
            await asyncio.sleep(pause)
            # What it was making is the warm-up of the next one.
            given = {**self._given, "warm_up": False}

    async def ask(self, kind: str, work: Mapping[str, Any]) -> Any:
        """Return the engine's answer to `check` or `explain`. Raises Refused and Unavailable."""
        try:
            if self._engine is None:
                raise EngineLost("the engine has ended")
            return await self._engine.ask(kind, work)
        except EngineLost as error:
            raise Unavailable("engine_lost", "the engine ended, and is started again; try again") from error

    def send(self, kind: str, /, **values: Any) -> None:
        """Send one message. Raises EngineLost."""
        if self._engine is None:
            raise EngineLost("the engine has ended")
        self._moved = time.monotonic()
        self._engine.send(kind, **values)

    def kill(self) -> None:
        if self._engine is not None:
            self._engine.kill()

    def _lose_batch(self) -> None:
        if self.batch is not None and not self.batch.done():
            self.batch.set_exception(EngineLost("the engine ended"))

    async def _watch(self) -> None:
        """End an engine that gives no sign of life, or whose batch does not move."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            if now - looked > _ASLEEP_SECONDS:
                self._heard = self._moved = now
            looked = now
            silence = min(SILENT_SECONDS, self._hang_timeout) if self._is_connected else _START_SECONDS
            is_stuck = self.batch is not None and now - self._moved > self._hang_timeout
            if is_stuck or now - self._heard > silence:
                why = "its batch does not move" if is_stuck else "it gives no sign of life"
                _logger.error("the engine hangs: %s", why, extra={"replica": self.index})
                self.kill()
                return

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        self._heard, self._is_connected = time.monotonic(), True
        if kind == "alive":
            return
        self._moved = self._heard
        if kind == "hello":
            if (difference := skew(message["versions"])) is not None:
                self.failure = {"message": f"replica {self.index}: {difference}", "exit_code": 1}
                self.kill()
            return
        if kind == "ready":
            self.card, self.failure = message["card"], None
            self.idle_since = self._heard
            _logger.info("ready: %s, %s on %s", self.card["family"], self.card["dtype"], self.card["device"])
        elif kind == "loading":
            self.loading = message["stage"]
        elif kind == "warmed" and message["error"] is None:
            _logger.info("a warm-up took %.1f s", message["seconds"])
        elif kind == "warmed":
            _logger.warning("no warm-up: %s", message["error"])
        elif kind == "load_failed":
            self.failure, self.loading = message, message["message"]
        elif kind == "done" and self.batch is not None and not self.batch.done():
            self.batch.set_result(None)
        self._on_message(self, message)
