"""`batch`: rows of a file, each a request, into a folder of results, with the flags of `generate` for the model."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.serve import named_loras, plain_config, runtime_of
from diffusion_runtime.errors import ConfigError, UsageError

EPILOG = """[bold]Examples[/]

diffusion-runtime batch rows.jsonl -o clips/

diffusion-runtime batch rows.parquet -o clips/ --resume

diffusion-runtime batch rows.jsonl -o /shared/clips --ray auto --replicas 1..16
"""
SCHEMA = "diffusion_runtime.batch/1"
_ROWS, _CLUSTER = "Rows", "Cluster"


def batch(context: typer.Context, **given: Any) -> None:
    """Make the rows of a file: a result per row, a manifest, resume.

    A row is {"id", "prompt", any request field, "image"}; its id names its file.
    manifest.jsonl has digests and reports, failures.jsonl what failed.
    See docs/cluster.md.
    """
    del context
    from diffusion_runtime.batches.batch_job import BatchJob, Tally
    from diffusion_runtime.batches.batch_run import check_job, run_job
    from diffusion_runtime.batches.row_files import RowFile
    from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout, put_path_on_stdout

    terminal = Terminal(quiet=given["quiet"], verbose=given["verbose"], log_format=given["log_format"])
    own = {name: given.pop(name) for name in _OWN}
    if own["output_path"] is None:
        raise UsageError("batch: -o is missing: the folder of the results")
    if own["ray"] is None and own["replicas"] is not None:
        raise ConfigError("--replicas: needs --ray: without a cluster there is one engine, of --num-gpus processes")
    config = plain_config(runtime_of(given))
    job = BatchJob(
        rows=RowFile(own["rows"], config["model_path"]),
        folder=Path(own["output_path"]),
        config=config,
        loras={name: dataclasses.asdict(each) for name, each in named_loras(own["named_lora"] or ()).items()},
        file_format=own["file_format"],
        max_batch_size=_at_least_1("--max-batch-size", own["max_batch_size"]),
        resumes=own["resume"],
        ray=own["ray"],
        replicas=_replicas(own["replicas"] or "1"),
        say=terminal.say,
        count=terminal.count,
    )
    if own["dry_run"]:
        tally: Tally = check_job(job)
        settings = f"{len(tally.settings)} settings" + (f", of which {tally.failed} cannot run" * bool(tally.failed))
        terminal.say(f"{tally.num_rows} rows of {settings}, into {job.folder}: nothing was made")
    else:
        tally = run_job(job)
        terminal.say(f"{tally.line()}, in {job.folder}")
        if tally.failed:
            terminal.error(f"{tally.failed} rows failed, the first: {tally.first_failure}; see failures.jsonl")
    if given["as_json"]:
        put_on_stdout(json_text({"schema": SCHEMA, "folder": str(job.folder), **tally.to_dict()}))
    elif not own["dry_run"]:
        put_path_on_stdout(job.folder / "manifest.jsonl")
    raise typer.Exit(tally.exit_code)


def _replicas(text: str) -> tuple[int, int]:
    """Return the least and the most engines of `N` or `MIN..MAX`."""
    found = re.fullmatch(r"(\d{1,6})(?:\.\.(\d{1,6}))?", text.strip())
    least, most = (0, 0) if found is None else (int(found.group(1)), int(found.group(2) or found.group(1)))
    if not 1 <= least <= most:
        raise ConfigError(f"--replicas: expected N or MIN..MAX of 1 or more, got {text[:40]!r}")
    return least, most


def _at_least_1(flag: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ConfigError(f"{flag}: expected 1 or more, got {value}")
    return value


@dataclasses.dataclass(frozen=True)
class _RowFlags:
    rows: Annotated[str, typer.Argument(metavar="ROWS", help="A .jsonl or .parquet file; - is JSON lines on stdin.")]
    max_batch_size: Annotated[
        int | None,
        options.option(
            _ROWS, "Rows of equal settings that run together; 4, or 1 on a CPU.", "--max-batch-size", metavar="N"
        ),
    ] = None
    named_lora: Annotated[
        list[str] | None,
        options.option(_ROWS, "A LoRA that rows may name.", "--named-lora", metavar="NAME=FILE[@0.8]"),
    ] = None
    ray: Annotated[
        str | None,
        options.option(
            _CLUSTER,
            "Run on a Ray cluster: auto is the one of this machine, local starts one.",
            "--ray",
            metavar="ADDRESS",
        ),
    ] = None
    replicas: Annotated[
        str | None,
        options.option(_CLUSTER, "Engines on the cluster, of --num-gpus each.", "--replicas", metavar="N|MIN..MAX"),
    ] = None


# Of the flags of results; the others are of one clip.
_RESULTS = ("output_path", "file_format", "resume", "dry_run")
_OWN = (*(each.name for each in dataclasses.fields(_RowFlags)), *_RESULTS)
_LEFT_OUT = ("from_file", "preset", "allow_url", *(name for name in options.OUTPUT_FLAGS if name not in _RESULTS))


def _parameters() -> list[inspect.Parameter]:
    """Return the flags of `generate` about the model and the folder, and those of rows."""
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    rows: Mapping[str, inspect.Parameter] = {each.name: each for each in options.parameters_of(_RowFlags)}
    flags = [*options.source_parameters(), *options.run_parameters()]
    required = rows["rows"].replace(default=inspect.Parameter.empty)
    others = [each for name, each in rows.items() if name != "rows"]
    return [context, required, *others, *(each for each in flags if each.name not in _LEFT_OUT)]


options.set_parameters(batch, _parameters())
