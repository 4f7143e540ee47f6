"""Maker: which rows run together, and what becomes of them when their engine ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from diffusion_runtime.batches import maker
from diffusion_runtime.batches.maker import Maker, Outcome
from diffusion_runtime.batches.rows import Row
from diffusion_runtime.errors import BackendUnavailableError
from diffusion_runtime.serving.engine_process import EngineLost, Refused

RUNS: list[list[str]] = []
STARTS: list[Mapping[str, Any]] = []


class ScriptedEngine:
    """An engine that ends when it is given `poison`, or once with `fragile`; stands for a process alone."""

    def __init__(self, given: Mapping[str, Any], on_message: Callable[[dict[str, Any]], None]) -> None:
        STARTS.append(given)
        self._say, self._end = on_message, asyncio.get_running_loop().create_future()
        if given.get("refuses"):
            reasons = [["sta", "no"]]
            on_message({"type": "load_failed", "kind": "BackendUnavailableError", "message": "sta", "reasons": reasons})
        on_message({"type": "hello"})
        on_message({"type": "prepared"})

    async def run(self) -> int:
        code: int = await self._end
        return code

    def kill(self) -> None:
        if not self._end.done():
            self._end.set_result(-9)

    async def ask(self, kind: str, work: Mapping[str, Any]) -> Any:
        (request,) = work["requests"]
        if request["prompt"] == "refused":
            raise Refused({"kind": "RequestError", "message": "no such size", "reasons": []})
        return {"requests": [{**request, "num_frames": 1}], "key": str(request["height"])}

    def send(self, kind: str, /, **values: Any) -> None:
        if kind == "load":
            self._say({"type": "ready", "card": {"device": "cuda"}})
            return
        if self._end.done():
            raise EngineLost("gone")
        jobs = [work["job"] for work in values["works"]]
        RUNS.append(jobs)
        for job in jobs:
            if job == "poison" or (job == "fragile" and len(STARTS) == 1):
                self.kill()
                return
            if job == "large":
                self._say({"type": "failed", "job": job, "kind": "DeviceMemoryError", "message": "out of memory"})
            else:
                self._say({"type": "finished", "job": job})
        self._say({"type": "done"})


def row(row_id: str, height: int = 64) -> Row:
    return Row(1, row_id, {"prompt": row_id, "height": height, "seed": 1})


def outcomes(rows: list[Row], found: Any = lambda *_: None, **given: Any) -> dict[str, Outcome]:
    RUNS.clear()
    STARTS.clear()

    async def run() -> dict[str, Outcome]:
        made = Maker(given, "m", 3, lambda row_id, _: Path(f"{row_id}.png"), found)
        await made.start()
        try:
            await made.load()
            return {each.row.id: each async for each in made.make(rows)}
        finally:
            await made.close()

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maker, "EngineProcess", ScriptedEngine)


def test_rows_of_one_key_run_together_and_each_fails_alone() -> None:
    heights = {"a": 64, "b": 128, "c": 64, "large": 64, "d": 128, "e": 64, "refused": 64}
    ended = outcomes([row(name, height) for name, height in heights.items()])
    assert RUNS == [["b", "d"], ["a", "c", "large"], ["e"]]
    kinds = {name: each.failure["kind"] for name, each in ended.items() if each.failure is not None}
    assert kinds == {"large": "DeviceMemoryError", "refused": "RequestError"}
    assert {name for name, each in ended.items() if each.result is not None} == {"a", "b", "c", "d", "e"}


def test_rows_of_an_engine_that_ends_are_made_once_more_each_alone() -> None:
    ended = outcomes([row("a"), row("fragile"), row("b"), row("c")])
    assert RUNS == [["a", "fragile", "b"], ["fragile"], ["b"], ["c"]]
    assert all(each.failure is None for each in ended.values())
    ended = outcomes([row("a"), row("poison"), row("b"), row("c")])
    assert RUNS == [["a", "poison", "b"], ["poison"], ["b"], ["c"]]
    assert len(STARTS) == 3
    failure = ended.pop("poison").failure
    assert failure is not None
    assert (failure["kind"], "twice" in failure["message"]) == ("EngineLost", True)
    assert sorted(ended) == ["a", "b", "c"]
    assert all(each.failure is None for each in ended.values())


def test_a_file_that_is_there_is_not_made_again() -> None:
    ended = outcomes([row("a"), row("b")], lambda row, *_: {"file": 1} if row.id == "a" else None)
    assert RUNS == [["b"]]
    assert (ended["a"].was_there, ended["b"].was_there) == (True, False)
    # Written by an engine that ended before it could say so.
    seen: list[str] = []
    ended = outcomes([row("poison")], lambda row, *_: {"file": 1} if seen.append(row.id) or len(seen) > 1 else None)
    assert ended["poison"].result == {"file": 1}
    assert RUNS == [["poison"]]


def test_a_model_that_cannot_be_loaded_ends_the_batch_with_its_own_error() -> None:
    with pytest.raises(BackendUnavailableError) as raised:
        outcomes([row("a")], refuses=True)
    assert raised.value.reasons == (("sta", "no"),)
