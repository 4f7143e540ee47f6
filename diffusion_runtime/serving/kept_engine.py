"""Kept engine: an engine process that is started again when it ends, and what it says of its model."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from diffusion_runtime.serving.engine_process import EngineLost, EngineProcess
from diffusion_runtime.serving.metrics import Metrics
from diffusion_runtime.serving.unavailable import Unavailable

_logger = logging.getLogger("diffusion_runtime.serving")
_LONGEST_PAUSE = 30.0
# An engine that ran for so long is started again at once, though it never was ready.
_LONG = 60.0


class KeptEngine:
    """given: the engine's config. on_message: called with its messages; on_end: called when it ended, before the next
    one. card: what its model is, None until that is loaded; loading: how far that is. failure: why the model cannot be
    loaded, None for no reason."""

    def __init__(
        self,
        given: Mapping[str, Any],
        on_message: Callable[[dict[str, Any]], None],
        on_end: Callable[[], None],
        metrics: Metrics,
    ) -> None:
        self._given = given
        self._on_message = on_message
        self._on_end = on_end
        self._metrics = metrics
        self._engine = EngineProcess(given, self._take)
        self.card: Mapping[str, Any] | None = None
        self.loading = "starting"
        self.failure: Mapping[str, Any] | None = None

    async def run(self) -> None:
        """Run an engine, and another when it ends."""
        pause = 1.0
        while True:
            began = time.monotonic()
            code = await self._engine.run()
            was_ready, self.card = self.card is not None, None
            self.loading = f"the engine ended with code {code}, and is started again"
            _logger.error("the engine ended", extra={"exit_code": code})
            self._metrics.restarts.inc()
            self._on_end()
            is_sound = was_ready or time.monotonic() - began > _LONG
            pause = 0.0 if is_sound else min(_LONGEST_PAUSE, max(1.0, pause * 2))
            await asyncio.sleep(pause)
            # What it was making is the warm-up of the next one.
            self._engine = EngineProcess({**self._given, "warm_up": False}, self._take)

    def check_ready(self) -> None:
        """Raises Unavailable while no model is loaded."""
        if self.card is None:
            raise Unavailable("loading", f"the model is not loaded yet: {self.loading}")

    async def ask(self, kind: str, work: Mapping[str, Any]) -> Any:
        """Return the engine's answer to `check` or `explain`. Raises Refused and Unavailable."""
        self.check_ready()
        try:
            return await self._engine.ask(kind, work)
        except EngineLost as error:
            raise Unavailable("engine_lost", "the engine ended, and is started again; try again") from error

    def send(self, kind: str, /, **values: Any) -> None:
        """Send one message. Raises EngineLost."""
        self._engine.send(kind, **values)

    def kill(self) -> None:
        self._engine.kill()

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "ready":
            self.card = message["card"]
            _logger.info("ready: %s, %s on %s", self.card["family"], self.card["dtype"], self.card["device"])
        elif kind == "loading":
            self.loading = message["stage"]
        elif kind == "warmed" and message["error"] is None:
            _logger.info("a warm-up took %.1f s", message["seconds"])
        elif kind == "warmed":
            _logger.warning("no warm-up: %s", message["error"])
        elif kind == "load_failed":
            self.failure, self.loading = message, message["message"]
        self._on_message(message)
