"""Replicas: the engines of one server, how many of them run, and the one that takes the next batch or question."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.serving.engines import Engines, batch_size
from diffusion_runtime.serving.kept_engine import KeptEngine
from diffusion_runtime.serving.settings import ServerSettings
from diffusion_runtime.serving.unavailable import Unavailable

if TYPE_CHECKING:
    from diffusion_runtime.serving.metrics import Metrics

# States of a replica, of which each has a figure in the metrics.
STATES = ("off", "loading", "ready", "busy", "failed")
_LOOK_SECONDS = 0.05
_logger = logging.getLogger("diffusion_runtime.serving")


class Replicas:
    """All replicas of a server, `settings.replicas` of them: at least and at most. card: what the model is, None until
    one replica has loaded it; it stays while none runs."""

    def __init__(
        self,
        engines: Engines,
        given: Mapping[str, Any],
        settings: ServerSettings,
        on_message: Callable[[KeptEngine, dict[str, Any]], None],
        metrics: Metrics,
    ) -> None:
        self._engines = engines
        self._fewest, most = settings.replicas
        self._idle_seconds = settings.limits.idle
        self._max_batch_size = settings.limits.max_batch_size
        self.card: Mapping[str, Any] | None = None
        self._was_whole = False
        self._failure: Mapping[str, Any] | None = None

        def take(replica: KeptEngine, message: dict[str, Any]) -> None:
            if message["type"] == "ready":
                self.card = message["card"]
                self._was_whole = self._was_whole or all(each.card for each in self.all if each.is_wanted)
            elif message["type"] == "load_failed" and self.failure is None:
                _logger.error("replica %d: no model: %s", replica.index, message["message"])
            on_message(replica, message)

        def engine(index: int) -> KeptEngine:
            each = {**given, "replica": [index, most]}
            return KeptEngine(index, engines, each, take, metrics, settings.limits.hang_timeout)

        self.all = [engine(index) for index in range(most)]
        # One at least: a model that cannot be loaded ends the server before the first request.
        for replica in self.all[: max(1, self._fewest)]:
            replica.want()
        for state in STATES:
            metrics.count_replicas(state, lambda state=state: sum(each.state == state for each in self.all))  # type: ignore[misc]

    @property
    def failure(self) -> Mapping[str, Any] | None:
        """Return why the model cannot be loaded, None where it can: of any replica that refuses it until all of them
        were ready once; else, and where engines end by themselves, once it is so of every replica that is wanted."""
        if self._failure is not None:
            return self._failure
        found = [each for each in self.all if each.failure is not None]
        is_refused = not self._was_whole and any(not each.is_crashing for each in found)
        is_over = is_refused or all(each in found for each in self.all if each.is_wanted)
        return found[0].failure if found and is_over else None

    @property
    def batch_size(self) -> int:
        """Requests that run together."""
        return batch_size(self._max_batch_size, self.card or {})

    @property
    def num_ready(self) -> int:
        return sum(each.card is not None for each in self.all)

    async def run(self) -> None:
        """Run all replicas until this is cancelled."""
        try:
            await self._engines.connect()
        except DiffusionRuntimeError as error:
            self._failure = {"message": str(error), "exit_code": error.exit_code}
            return
        except Exception as error:
            # Else the server would be loading for ever, and nothing would say why.
            _logger.exception("the engines have no place to run")
            self._failure = {"message": f"no place to run: {type(error).__name__}; the log says how", "exit_code": 1}
            return
        tasks = [asyncio.ensure_future(each.run()) for each in self.all]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._engines.close()

    def free(self) -> list[KeptEngine]:
        """Return the replicas that can take a batch now."""
        return [each for each in self.all if each.is_free]

    def scale(self, num_waiting: int) -> None:
        """Want as many replicas as `num_waiting` batches need beside those that are busy, and end those above the
        fewest that nothing was asked of for `Limits.idle` seconds."""
        now = time.monotonic()
        wanted = [each for each in self.all if each.is_wanted]
        num_missing = num_waiting - sum(each.batch is None and each.failure is None for each in wanted)
        for replica in [each for each in self.all if not each.is_wanted][: max(0, num_missing)]:
            replica.want()
        idle = [each for each in wanted if each.is_free and now - each.idle_since > self._idle_seconds]
        for replica in idle[: max(0, len(wanted) - self._fewest)] if not num_waiting else ():
            replica.dismiss()

    def check_ready(self) -> None:
        """Raises Unavailable while no replica has the model and the next request would not start one."""
        if self.num_ready or (self.card is not None and not self._fewest):
            return
        stages = sorted({each.loading for each in self.all if each.is_wanted})
        raise Unavailable("loading", f"the model is not loaded yet: {', '.join(stages)}")

    async def ask(self, kind: str, work: Mapping[str, Any]) -> Any:
        """Return the answer of a replica to `check` or `explain`, of one that is started for it where none runs. Raises
        Refused and Unavailable."""
        self.check_ready()
        while not (ready := [each for each in self.all if each.card is not None]):
            self.scale(1)
            self.check_ready()
            if self.failure is not None:
                raise Unavailable("loading", "no replica can load the model; the server's log says why")
            await asyncio.sleep(_LOOK_SECONDS)
        chosen = min(ready, key=lambda each: each.batch is not None)
        chosen.idle_since = time.monotonic()
        return await chosen.ask(kind, work)

    def seconds_per_job(self, seconds: float) -> float:
        """Return the seconds from one job's end to the next one's, of all replicas together. seconds: of a job."""
        return seconds / max(1, self.num_ready)

    def states(self) -> list[dict[str, Any]]:
        """Return what is to be known of each replica, without a path or a name of a machine."""

        def known(each: KeptEngine) -> dict[str, Any]:
            why = {}
            if each.state == "failed" and each.failure is not None:
                public = "the model cannot be loaded; the server's log says why"
                why = {"reason": each.failure["message"] if each.is_crashing else public}
            return {"replica": each.index, "state": each.state, "restarts": each.restarts, **why}

        return [known(each) for each in self.all]
