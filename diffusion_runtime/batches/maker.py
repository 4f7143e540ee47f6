"""Maker: an engine process that makes rows in batches of equal settings. One that ends is started again; what it was
making is made once more, row by row."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_runtime import errors
from diffusion_runtime.batches.result_folder import ROW_KEY
from diffusion_runtime.batches.rows import Row
from diffusion_runtime.errors import BackendUnavailableError, DiffusionRuntimeError
from diffusion_runtime.media.publish import publish_bytes
from diffusion_runtime.serving.engine_process import EngineProcess
from diffusion_runtime.serving.engines import EngineLost, Refused, batch_size
from diffusion_runtime.untrusted.media_kinds import HEAD_BYTES, container_of

# Of a row: where its file goes, by its number of frames; what is known of one that is there.
Target = Callable[[str, int], Path]
Found = Callable[[Row, str, Path], "dict[str, Any] | None"]


@dataclass(frozen=True)
class Outcome:
    """The end of one row: what was made at `target`, or why it failed, as `engine.described` has it. was_there: an
    earlier run had made it."""

    row: Row
    digest: str
    target: Path | None = None
    result: Mapping[str, Any] | None = None
    failure: Mapping[str, Any] | None = None
    was_there: bool = False


@dataclass(frozen=True)
class _Checked:
    row: Row
    digest: str
    key: str
    target: Path
    work: Mapping[str, Any]
    request: Mapping[str, Any]
    names: Mapping[str, str]


class Maker:
    """given: the engine's `config.json`. model: as of Row.digest. target, found: of the folder of results. say: told
    what the engine does."""

    def __init__(
        self,
        given: Mapping[str, Any],
        model: str,
        max_batch_size: int | None,
        target: Target,
        found: Found,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._given = {**given, "warm_up": False, "preview": "off", "names": {}, "waits": True}
        self._model = model
        self._max_batch_size = max_batch_size
        self._target = target
        self._found = found
        self._say = say
        self._inputs = tempfile.TemporaryDirectory(prefix="diffusion-runtime-")

    async def start(self) -> None:
        """Start the engine, which decides and reads no weights yet. Raises what `prepare` raises."""
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._engine = EngineProcess(self._given, self._inbox.put_nowait)
        self._ended = asyncio.create_task(self._run(self._engine, self._inbox))
        try:
            await self._until("prepared")
        except BaseException:
            await self.close()
            raise

    async def load(self) -> None:
        """Read the weights. Raises what `load_pipeline` raises."""
        self._engine.send("load")
        self._batch_size = batch_size(self._max_batch_size, (await self._until("ready"))["card"])

    async def close(self) -> None:
        """End the engine at once."""
        self._engine.kill()
        await self._ended
        self._inputs.cleanup()

    async def refusal(self, row: Row) -> str | None:
        """Return why a row cannot be made, None where it can."""
        with self._paths(row) as (paths, _):
            try:
                await self._engine.ask("check", row.work(paths))
            except Refused as error:
                return str(error)
        return None

    async def make(self, rows: Sequence[Row]) -> AsyncIterator[Outcome]:
        """Make rows, sorted by what may run together, and yield the outcome of each."""
        with contextlib.ExitStack() as files:
            checked: list[_Checked] = []
            for row in rows:
                outcome = await self._checked(row, files)
                if isinstance(outcome, Outcome):
                    yield outcome
                else:
                    checked.append(outcome)
            checked.sort(key=lambda each: each.key)
            while checked:
                group = [each for each in checked[: self._batch_size] if each.key == checked[0].key]
                del checked[: len(group)]
                async for outcome in self._make(group):
                    yield outcome

    async def _checked(self, row: Row, files: contextlib.ExitStack) -> _Checked | Outcome:
        digest = ""
        try:
            digest = row.digest(self._model)
            paths, names = files.enter_context(self._paths(row))
            work = row.work(paths)
            answer = await self._asked(work)
            target = self._target(row.id, answer["requests"][0]["num_frames"])
        except Refused as error:
            return Outcome(row, digest, failure=error.details)
        except DiffusionRuntimeError as error:
            return Outcome(row, digest, failure=_failure(error))
        if (result := self._found(row, digest, target)) is not None:
            return Outcome(row, digest, target, result, was_there=True)
        return _Checked(row, digest, answer["key"], target, work, answer["requests"][0], names)

    async def _asked(self, work: Mapping[str, Any]) -> Any:
        try:
            return await self._engine.ask("check", work)
        except EngineLost:
            await self._start_again()
            return await self._engine.ask("check", work)

    async def _make(self, group: Sequence[_Checked], *, is_again: bool = False) -> AsyncIterator[Outcome]:
        """Make rows of one key together."""
        waiting = {each.row.id: each for each in group}
        started = time.monotonic()
        shared = {name: group[0].work[name] for name in ("preset", "attention", "loras")}
        works = [
            {
                "job": each.row.id,
                "index": 0,
                "request": each.request,
                "target": str(each.target),
                "names": each.names,
                "recipe": {ROW_KEY: {"id": each.row.id, "digest": each.digest}},
            }
            for each in group
        ]
        try:
            self._engine.send("run", works=works, previews=0, profile=None, pictures=False, **shared)
            while (message := await self._inbox.get())["type"] != "done":
                if message["type"] == "ended":
                    raise EngineLost(f"the engine ended with code {message['exit_code']}")
                if message["type"] == "finished":
                    each = waiting.pop(message["job"])
                    seconds = round((time.monotonic() - started) / len(group), 4)
                    yield Outcome(each.row, each.digest, each.target, {**message, "seconds": seconds})
                elif message["type"] == "failed":
                    each = waiting.pop(message["job"])
                    yield Outcome(each.row, each.digest, failure=message)
        except EngineLost as error:
            await self._start_again()
            for each in tuple(waiting.values()):
                if (result := self._found(each.row, each.digest, each.target)) is not None:
                    yield Outcome(each.row, each.digest, each.target, result)
                elif is_again:
                    failure = {"kind": "EngineLost", "message": f"{error} twice while it made this row"}
                    yield Outcome(each.row, each.digest, failure=failure)
                else:
                    async for outcome in self._make([each], is_again=True):
                        yield outcome

    async def _start_again(self) -> None:
        self._say("the engine ended, and is started again")
        self._engine.kill()
        await self._ended
        await self.start()
        await self.load()

    async def _run(self, engine: EngineProcess, inbox: asyncio.Queue[dict[str, Any]]) -> None:
        code = await engine.run()
        inbox.put_nowait({"type": "ended", "exit_code": code})

    async def _until(self, kind: str) -> dict[str, Any]:
        """Read messages until one of a kind comes, and return it. Raises the error for which the model cannot be
        loaded."""
        while (message := await self._inbox.get())["type"] != kind:
            if message["type"] == "load_failed":
                raise error_of(message)
            if message["type"] == "ended":
                raise EngineLost(f"the engine ended with code {message['exit_code']} before its model was loaded")
            if message["type"] == "loading":
                self._say(f"loading: {message['stage']}")
        return message

    @contextlib.contextmanager
    def _paths(self, row: Row) -> Iterator[tuple[dict[str, list[str]], dict[str, str]]]:
        """Context manager: the paths of a row's input files by field, and what recipes call each."""
        paths: dict[str, list[str]] = {}
        names: dict[str, str] = {}
        written: list[Path] = []
        try:
            for field, sources in (row.inputs or {}).items():
                for source in sources:
                    path = content = source.content
                    if isinstance(content, bytes):
                        is_named = ":" not in source.name
                        # Readers of videos and sounds go by the name.
                        suffix = Path(source.name).suffix if is_named else container_of(content[:HEAD_BYTES]) or ""
                        path = Path(self._inputs.name) / f"{row.id}-{len(written)}{suffix}"
                        publish_bytes(path, content)
                        written.append(path)
                    paths.setdefault(field, []).append(str(path))
                    names[str(path)] = source.name
            yield paths, names
        finally:
            for path in written:
                path.unlink(missing_ok=True)


def error_of(message: Mapping[str, Any]) -> DiffusionRuntimeError:
    """Return the error that an engine described."""
    kind: Any = getattr(errors, message["kind"], None)
    text = str(message["message"])
    if kind is BackendUnavailableError:
        return BackendUnavailableError(text, [(name, reason) for name, reason in message["reasons"]])
    is_ours = isinstance(kind, type) and issubclass(kind, DiffusionRuntimeError)
    error: DiffusionRuntimeError = kind(text) if is_ours else DiffusionRuntimeError(text)
    return error


def _failure(error: DiffusionRuntimeError) -> dict[str, Any]:
    reasons = [list(pair) for pair in error.reasons] if isinstance(error, BackendUnavailableError) else []
    return {"kind": type(error).__name__, "message": str(error), "reasons": reasons}
