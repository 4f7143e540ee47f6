"""Run of a batch: rows are checked as a whole, then before any weight is read, then made window by window; memory grows
with their number by a set's entry of 16 bytes each."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Iterator

from diffusion_runtime.batches.batch_job import BatchJob, Tally
from diffusion_runtime.batches.maker import Maker, Outcome, error_of
from diffusion_runtime.batches.ray_data import run_on_ray
from diffusion_runtime.batches.result_folder import ResultFolder
from diffusion_runtime.batches.rows import Row
from diffusion_runtime.errors import ConfigError, DiskFullError, RequestError, UsageError
from diffusion_runtime.serving.on_ray.authentication import check_cluster
from diffusion_runtime.session.failures import Interrupted

# Settings that are checked before the weights; rows of further ones are checked when their turn comes.
_MAX_SETTINGS = 1000


def run_job(job: BatchJob) -> Tally:
    """Make the rows. Raises RequestError and ConfigError for rows of a file that are wrong, before anything is made,
    what loading a model raises, and OutputError where a result cannot be written; Interrupted at a signal."""
    tally = _first_pass(job)
    folder = ResultFolder(job.folder, job.model, job.file_format)
    try:
        folder.begin(tally.num_rows, resumes=job.resumes)
        if job.ray is None:
            asyncio.run(_run_here(job, folder, tally))
        else:
            for outcome in run_on_ray(job, folder, tally):
                _note(job, folder, tally, outcome)
    except KeyboardInterrupt as error:
        raise Interrupted(f"{tally.line()} in {job.folder}; --resume goes on") from error
    finally:
        folder.close()
    return tally


def check_job(job: BatchJob) -> Tally:
    """Check rows, settings and folder as `run_job` does before the weights, without writing. Raises what it raises."""
    tally = _first_pass(job, reads_stream=True)
    folder = ResultFolder(job.folder, job.model, job.file_format)
    folder.begin(tally.num_rows, resumes=job.resumes, writes=False)
    if job.ray is None:
        asyncio.run(_check_here(job, folder, tally))
    else:
        job.say("with --ray the settings are checked by the engines of the cluster, and not now")
    return tally


def rows_to_make(job: BatchJob, folder: ResultFolder, on_done: Callable[[], None]) -> Iterator[Row | UsageError]:
    """Yield the rows that the manifest does not have. on_done: called for each that it has."""
    known: set[bytes] = set()
    for row in job.rows.rows_or_errors():
        if isinstance(row, Row):
            if job.rows.is_stream and (twice := _is_twice(known, row)) is not None:
                yield RequestError(f"{job.rows.named(row.number)}: {twice}")
                continue
            if folder.has_any and folder.is_done(row, row.digest(job.model)):
                on_done()
                continue
        yield row


def _first_pass(job: BatchJob, *, reads_stream: bool = False) -> Tally:
    """Read every row of a file: a wrong one is known before the first is made."""
    tally = Tally()
    if job.ray is not None:
        check_cluster(job.ray)
        if job.rows.is_stream:
            raise ConfigError("ROWS: standard input cannot be read again, which Ray may need; write the rows to a file")
    if job.rows.is_stream and not reads_stream:
        return tally
    state = None if job.rows.is_stream else job.rows.state
    known: set[bytes] = set()
    tally.num_rows = 0
    for row in job.rows.rows():
        tally.num_rows += 1
        if (twice := _is_twice(known, row)) is not None:
            raise RequestError(f"{job.rows.named(row.number)}: {twice}")
        if len(tally.settings) < _MAX_SETTINGS:
            tally.settings.setdefault(hashlib.blake2b(row.settings.encode(), digest_size=16).digest(), row)
    if not tally.num_rows:
        raise ConfigError(f"ROWS: {job.rows.path} holds no row")
    if state is not None and job.rows.state != state:
        raise ConfigError(f"ROWS: {job.rows.path} was written to while it was read; start again")
    return tally


def _is_twice(known: set[bytes], row: Row) -> str | None:
    """Return why an identifier cannot be taken, None where it can: some file systems do not tell cases apart."""
    key = hashlib.blake2b(row.id.casefold().encode(), digest_size=16).digest()
    if key in known:
        return f"id {row.id!r} is an earlier row's; give each row one of its own, in more than its case"
    known.add(key)
    return None


def _maker(job: BatchJob, folder: ResultFolder) -> Maker:
    return Maker(job.given, job.model, job.max_batch_size, folder.target, folder.found, job.say)


async def _check_here(job: BatchJob, folder: ResultFolder, tally: Tally) -> None:
    maker = _maker(job, folder)
    await maker.start()
    try:
        await _check_settings(job, maker, tally)
    finally:
        await maker.close()


async def _check_settings(job: BatchJob, maker: Maker, tally: Tally) -> None:
    """Say which settings cannot run, before the weights. Raises RequestError where none can."""
    refusals = [(row, why) for row in tally.settings.values() if (why := await maker.refusal(row)) is not None]
    for row, why in refusals[:5]:
        job.say(f"{job.rows.named(row.number)}: cannot be made: {why}")
    if len(refusals) > 5:
        job.say(f"{len(refusals) - 5} further settings cannot run")
    tally.failed, tally.first_failure = len(refusals), refusals[0][1] if refusals else ""
    if refusals and len(refusals) == len(tally.settings) < _MAX_SETTINGS:
        row, why = refusals[0]
        raise RequestError(f"{job.rows.named(row.number)}: {why}; none of the rows can be made")


async def _run_here(job: BatchJob, folder: ResultFolder, tally: Tally) -> None:
    def note_done() -> None:
        tally.was_there += 1

    rows = rows_to_make(job, folder, note_done)
    first = next(rows, None)
    if first is None:
        return
    maker = _maker(job, folder)
    await maker.start()
    try:
        await _check_settings(job, maker, tally)
        tally.failed, tally.first_failure = 0, ""
        await maker.load()
        tally.begin()
        rows = itertools.chain((first,), rows)
        while window := list(itertools.islice(rows, job.window)):
            for each in window:
                if isinstance(each, UsageError):
                    _note_unread(job, folder, tally, each)
            async for outcome in maker.make([each for each in window if isinstance(each, Row)]):
                _note(job, folder, tally, outcome)
    finally:
        await maker.close()


def _note_unread(job: BatchJob, folder: ResultFolder, tally: Tally, error: UsageError) -> None:
    """Write that a row of a stream cannot be read."""
    failure = {"kind": type(error).__name__, "message": str(error)}
    folder.add_failure(None, None, failure)
    _count_failure(job, tally, str(error))


def _note(job: BatchJob, folder: ResultFolder, tally: Tally, outcome: Outcome) -> None:
    """Write down what became of a row. Raises DiskFullError: the next one would find no room either."""
    row = outcome.row
    if outcome.failure is not None:
        if outcome.failure["kind"] == DiskFullError.__name__:
            raise error_of(outcome.failure)
        folder.add_failure(row.id, row.number, outcome.failure)
        _count_failure(job, tally, f"{job.rows.named(row.number)}: {outcome.failure['message']}")
    else:
        assert outcome.target is not None
        assert outcome.result is not None
        folder.add(row, outcome.digest, outcome.target, outcome.result)
        tally.made, tally.was_there = tally.made + (not outcome.was_there), tally.was_there + outcome.was_there
    if tally.is_due():
        job.count(tally.line(), stage="rows", **tally.to_dict())


def _count_failure(job: BatchJob, tally: Tally, text: str) -> None:
    tally.failed += 1
    if not tally.first_failure:
        tally.first_failure = text
        job.say(f"failed: {text}")
