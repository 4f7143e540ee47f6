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
# Seconds before the third engine in a row that was of no use, doubled before each further one; the second one is
# started at once.
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 30.0
# An engine that was ready and ran for so long was of use, though nobody gave it a job.
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
    loaded, None for no reason; is_crashing: that is because its engines end by themselves, and the next one is started
    all the same. batch: of the dispatcher, while one runs; it has its result when the engine is done, and raises
    EngineLost where that ends before. idle_since: of time.monotonic, when it last became free.
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
        self.loading = "starting"
        self.failure: Mapping[str, Any] | None = None
        self.is_crashing = False
        self._useless = 0
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
        given = self._given
        while True:
            if not self.is_wanted:
                self.loading = "not wanted"
                await self._wanted.wait()
            began = self._heard = time.monotonic()
            self.loading, self._is_connected = "starting", False
            ended = await self._run_one(given)
            # A job may end every engine that takes it; that fails the job, and no other one's server.
            is_of_use = self.batch is not None or (self.card is not None and time.monotonic() - began > _LONG)
            self.card = None
            self._lose_batch()
            if not self.is_wanted:
                continue
            self.restarts += 1
            self._useless = 0 if is_of_use else self._useless + 1
            self.loading = f"the engine {ended}, and is started again"
            _logger.error("the engine %s", ended, extra={"replica": self.index})
            self._metrics.restarts.inc()
            if self._useless >= self._engines.max_starts and self.failure is None:
                self._give_up(ended)
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (min(self._useless, 8) - 2))
            await asyncio.sleep(pause if self._useless > 1 else 0)
            # What it was making is the warm-up of the next one.
            given = {**self._given, "warm_up": False}

    async def _run_one(self, given: Mapping[str, Any]) -> str:
        """Run one engine, and return how it ended."""
        watch = asyncio.ensure_future(self._watch())
        try:
            self._engine = self._engines.engine(self.index, given, self._take)
            return f"ended with code {await self._engine.run()}"
        except Exception as error:
            # The end of this replica's task would be that of all replicas, without a word.
            _logger.exception("an engine could not be run", extra={"replica": self.index})
            return f"could not be run ({(isinstance(error, OSError) and error.strerror) or type(error).__name__})"
        finally:
            watch.cancel()

    def _give_up(self, ended: str) -> None:
        message = f"replica {self.index}: {self._useless} engines in a row did not stay, the last one {ended}"
        self.failure, self.is_crashing = {"message": message, "exit_code": 1}, True
        self.loading = message
        _logger.error("%s", message, extra={"replica": self.index})

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
            self.card, self.failure, self.is_crashing = message["card"], None, False
            self.idle_since = self._heard
            _logger.info("ready: %s, %s on %s", self.card["family"], self.card["dtype"], self.card["device"])
        elif kind == "loading":
            self.loading = message["stage"]
        elif kind == "warmed" and message["error"] is None:
            _logger.info("a warm-up took %.1f s", message["seconds"])
        elif kind == "warmed":
            _logger.warning("no warm-up: %s", message["error"])
        elif kind == "load_failed":
            self.failure, self.is_crashing, self.loading = message, False, message["message"]
        elif kind == "done" and self.batch is not None and not self.batch.done():
            self._useless = 0
            self.batch.set_result(None)
        self._on_message(self, message)
