"""Rows on a Ray cluster by Ray Data: one task reads them on this node, a pool of actors with an engine each makes them,
and this process writes the manifest.

Ray Data's own checkpoints are not used: they are written by its sinks alone, a block at a time, and compare nothing but
an identifier, so that a row that was edited would be left out. Results go to the folder where the actors see it, else
through the object store.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diffusion_runtime.batches.batch_job import BatchJob, Tally
from diffusion_runtime.batches.maker import Maker, Outcome, error_of
from diffusion_runtime.batches.result_folder import ResultFolder
from diffusion_runtime.batches.row_files import RowFile
from diffusion_runtime.batches.rows import Row, row_from_json, row_to_json
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, MissingPackageError
from diffusion_runtime.media.publish import publish_bytes, publish_text
from diffusion_runtime.serving.engines import EngineLost
from diffusion_runtime.serving.files import sync
from diffusion_runtime.untrusted.files import read_file
from diffusion_runtime.untrusted.json_text import parse_json

# Of a result that goes through the object store.
_MAX_RESULT = 2**30
# What belongs to a result, the file itself last: once it is there, the others are.
_SUFFIXES = (".json", ".wav")


def run_on_ray(job: BatchJob, folder: ResultFolder, tally: Tally) -> Iterator[Outcome]:
    """Yield the outcome of every row that is not made yet. Raises ConfigError where there is no such cluster,
    MissingPackageError without Ray, and what loading a model raises on its nodes."""
    ray, data = _ray()
    source = _RowSource(job, folder)
    if folder.has_any:
        tally.was_there = (tally.num_rows or 0) - sum(1 for _ in source.rows())
        if tally.was_there == tally.num_rows:
            return
    probe = folder.folder / f".probe-{secrets.token_hex(8)}"
    began = not ray.is_initialized()
    try:
        if began:
            ray.init(address=job.ray, logging_level=logging.ERROR, log_to_driver=False)
        publish_text(probe, probe.name)
        for each in _made(job, data, source, {**_values(job, folder), "probe": str(probe)}):
            yield from outcomes_of(folder, each)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"--ray {job.ray}: {str(error)[:200]}; start a cluster with `ray start --head`, or give --ray local"
        ) from error
    except ray.exceptions.RayError as error:
        raise EngineLost(f"Ray: {str(error).strip()[-400:]}; --resume goes on") from error
    finally:
        probe.unlink(missing_ok=True)
        if began:
            ray.shutdown()


def _ray() -> tuple[Any, Any]:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingPackageError(
            f"--ray needs packages that are not installed ({error.name}): pip install 'diffusion-runtime[ray]'"
        ) from error
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # A group of rows is a block, and thereby a task: else blocks of 128 MiB would go to one actor each.
    context.target_max_block_size = 1
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray, ray.data


def _made(job: BatchJob, data: Any, source: _RowSource, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what the actors return for each group of rows, as it comes."""
    least, most = job.replicas
    num_processes = RuntimeConfig.from_dict(job.config).parallel.num_processes
    is_on_cpu = job.config["device"] == "cpu" or not _has_gpus()
    resources = {"num_cpus": num_processes} if is_on_cpu else {"num_gpus": num_processes}
    made = data.read_datasource(source.datasource(), override_num_blocks=1, num_cpus=0).map_batches(
        RowEngine,
        batch_size=1,
        batch_format="numpy",
        compute=data.ActorPoolStrategy(min_size=least, max_size=most),
        fn_constructor_args=(dict(values),),
        **resources,
    )
    for batch in made.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow"):
        yield from batch.to_pylist()


def _has_gpus() -> bool:
    import ray

    return bool(ray.cluster_resources().get("GPU"))


def _values(job: BatchJob, folder: ResultFolder) -> dict[str, Any]:
    """Return what an actor needs to know."""
    return {
        "given": job.given,
        "model": job.model,
        "max_batch_size": job.max_batch_size,
        "folder": str(folder.folder.absolute()),
        "format": job.file_format,
        "is_nested": folder.is_nested,
    }


class _RowSource:
    """The rows that are not made yet, those of equal settings together: the same ones in the same order each time, as a
    task that is lost is run again."""

    def __init__(self, job: BatchJob, folder: ResultFolder) -> None:
        self._rows = RowFile(str(Path(job.rows.path).absolute()), job.rows.model)
        self._state = job.rows.state
        self._folder = str(folder.folder.absolute())
        self._model = job.model
        self._window, self._group = job.window, job.max_batch_size or 4
        self._manifest_bytes = folder.manifest_bytes

    def rows(self) -> Iterator[Row]:
        """Yield the rows. Raises ConfigError for a file that changed."""
        done = ResultFolder(Path(self._folder), self._model, None).done(self._manifest_bytes)
        if self._rows.state != self._state:
            raise ConfigError(f"ROWS: {self._rows.path} was written to while it was read; start again")
        rows = (row for row in self._rows.rows() if not done or not done.has(row, row.digest(self._model)))
        while window := list(itertools.islice(rows, self._window)):
            yield from sorted(window, key=lambda row: row.settings)

    def datasource(self) -> Any:
        import pyarrow
        from ray.data.block import BlockMetadata
        from ray.data.datasource import Datasource, ReadTask

        def read() -> Iterator[Any]:
            rows = self.rows()
            while texts := [row_to_json(row) for row in itertools.islice(rows, self._group)]:
                yield pyarrow.table({"rows": pyarrow.array([json.dumps(texts)], pyarrow.large_string())})

        class Rows(Datasource):  # type: ignore[misc]
            """One task, on the node of this process, which has the file."""

            supports_distributed_reads = False

            def estimate_inmemory_data_size(self) -> None:
                return None

            def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[Any]:  # noqa: ARG002
                return [ReadTask(read, BlockMetadata(None, None, None, None))]

        return Rows()


class RowEngine:
    """Actor of Ray Data with one engine. values: as of `_values`, and the probe, a file in the folder of results."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        probe = Path(values["probe"])
        self._is_shared = probe.is_file() and read_file(probe, max_bytes=100) == probe.name.encode()
        self._scratch = tempfile.TemporaryDirectory(prefix="diffusion-runtime-")
        folder = Path(values["folder"]) if self._is_shared else Path(self._scratch.name)
        self._folder = ResultFolder(folder, values["model"], values["format"], is_nested=values["is_nested"])
        arguments = (values["given"], values["model"], values["max_batch_size"])
        self._maker = Maker(*arguments, self._folder.target, self._folder.found)
        self._loop = asyncio.new_event_loop()
        self._error: dict[str, Any] | None = None
        self._is_loaded = False

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Make one group of rows."""
        (text,) = batch["rows"]
        rows = [row_from_json(each) for each in parse_json(text)]
        outcomes = self._loop.run_until_complete(self._make(rows))
        files = [file for at, outcome in enumerate(outcomes) for file in self._files(at, outcome)]
        made: Any = {"fatal": self._error} if self._error is not None else [self._plain(each) for each in outcomes]
        return {"outcomes": [json.dumps(made)], "files": [files]}

    def close(self) -> None:
        """End the engine. Ray ends an actor without it, and the engine with its socket."""
        self._loop.run_until_complete(self._maker.close())
        self._loop.close()
        self._scratch.cleanup()

    async def _make(self, rows: list[Row]) -> list[Outcome]:
        try:
            if not self._is_loaded and self._error is None:
                await self._maker.start()
                await self._maker.load()
                self._is_loaded = True
        except DiffusionRuntimeError as error:
            reasons = [list(pair) for pair in getattr(error, "reasons", ())]
            self._error = {"kind": type(error).__name__, "message": str(error), "reasons": reasons}
        return [outcome async for outcome in self._maker.make(rows)] if self._error is None else []

    def _plain(self, outcome: Outcome) -> dict[str, Any]:
        target = outcome.target
        return {
            "row": row_to_json(dataclasses.replace(outcome.row, inputs=None)),
            "digest": outcome.digest,
            "path": None if target is None else target.relative_to(self._folder.folder).as_posix(),
            "result": outcome.result,
            "failure": outcome.failure,
        }

    def _files(self, at: int, outcome: Outcome) -> Iterator[dict[str, Any]]:
        """Yield the files of the outcome at an index of its group, where the folder of results is not this node's."""
        target = outcome.target
        if target is None or self._is_shared:
            return
        for path in (*(target.with_suffix(suffix) for suffix in _SUFFIXES), target):
            if path.is_file():
                yield {"at": at, "suffix": path.suffix, "content": read_file(path, max_bytes=_MAX_RESULT)}
                path.unlink()


def outcomes_of(folder: ResultFolder, made: Mapping[str, Any]) -> Iterator[Outcome]:
    """Yield the outcomes of a group, whose files are in the folder then. Raises the error for which no engine can
    run."""
    outcomes = parse_json(made["outcomes"])
    if isinstance(outcomes, Mapping):
        raise error_of(outcomes["fatal"])
    for file in made["files"] or ():
        path = (folder.folder / outcomes[file["at"]]["path"]).with_suffix(file["suffix"])
        publish_bytes(path, file["content"])
        sync(path)
    for each in outcomes:
        target = None if each["path"] is None else folder.folder / each["path"]
        # What a task that was lost had made is no earlier run's.
        yield Outcome(row_from_json(each["row"]), each["digest"], target, each["result"], each["failure"])
