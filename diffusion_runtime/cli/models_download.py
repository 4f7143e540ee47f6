"""`models download`: the files of a model that a load reads, into the hub's cache, with their sizes before."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout, put_path_on_stdout
from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.errors import ModelLoadError

if TYPE_CHECKING:
    from diffusion_runtime.core.model_folder import HubPart
    from diffusion_runtime.models.hub import HubFile

SCHEMA = "diffusion_runtime.download/1"
EPILOG = """[bold]Examples[/]

diffusion-runtime models download wan2.1-1.3b

diffusion-runtime models download Wan-AI/Wan2.1-T2V-1.3B-Diffusers@main --dry-run

diffusion-runtime generate "a cat" --model-path wan2.1-1.3b --offline
"""


def download(
    model: Annotated[
        str, typer.Argument(metavar="MODEL[@REV]", help="A name of `models`, or a hub id.", show_default=False)
    ],
    revision: Annotated[str | None, options.runtime_flag("revision")] = None,
    variant: Annotated[str | None, options.runtime_flag("variant")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show files and sizes; download nothing.", rich_help_panel=options.OUTPUT)
    ] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    log_format: options.LogFormat = None,
) -> None:
    """Download what a load of the model reads, and nothing else: no pickles, no second copies.

    Into the cache of huggingface_hub. Run again, an interrupted download goes on where it stopped.
    The folder's path goes to standard output.
    """
    terminal = Terminal(quiet=quiet, log_format=log_format)
    with terminal.log():
        from diffusion_runtime.config import RuntimeConfig
        from diffusion_runtime.core.model_folder import INDEX_FILE, MODULAR_INDEX_FILE, ModelFolder
        from diffusion_runtime.models import hub
        from diffusion_runtime.models.model_sources import EMBEDDED_FOLDERS
        from diffusion_runtime.models.modular_folder import parts_elsewhere
        from diffusion_runtime.models.published import model_of_name
        from diffusion_runtime.weights.cached_folder import commit_of

        asked = RuntimeConfig(model, revision=revision, variant=variant)
        named = model_of_name(asked.model_path)
        hub_id = asked.model_path if named is None else named.model_path
        if hub_id in EMBEDDED_FOLDERS:
            raise ModelLoadError(f"{model} is inside the package: there is nothing to download")
        if hub_id.count("/") != 1:
            raise ModelLoadError(f"{hub_id}: expected a name of `diffusion-runtime models` or a hub id, OWNER/NAME")
        commit, files = hub.list_files(hub_id, asked.revision)
        elsewhere: dict[str, HubPart] = {}
        left_out: tuple[str, ...] = ()
        # What is not read, and of which other repositories components are, these files say: a few kB, in a dry run too.
        indexes = [file.name for file in files if file.name in (INDEX_FILE, MODULAR_INDEX_FILE)]
        if indexes:
            places = [hub.download_file(hub_id, name, commit) for name in indexes]
            elsewhere = parts_elsewhere(places[0].parent)
            family = hub.native_family(places[0].parent)
            unread = [] if family is None else sorted(family.files.left_out)
            if family is not None and named is not None and named.workflow is not None:
                whole = ModelFolder(places[0].parent, workflow=family.files.workflow(named.workflow, family.name))
                unread = whole.on_disk(unread)
            left_out = (*elsewhere, *unread)
        names = [file.name for file in files]
        wanted = set(hub.needed_files(names, elsewhere=left_out, variant=asked.variant))
        needed = [file for file in files if file.name in wanted]
        if not needed:
            raise ModelLoadError(f"{hub_id} has no file that a load reads: it is no diffusers folder in safetensors")
        sources = [(hub_id, commit, file) for file in needed]
        for part in elsewhere.values():
            at, found = hub.component_files(part, variant=asked.variant)
            sources += [(part.hub_id, at, file) for file in found]
        needed = [
            file if of == hub_id else dataclasses.replace(file, name=f"{of}/{file.name}") for of, _, file in sources
        ]
        _show_sizes(needed, len(files), f"{hub_id}, commit {commit}", terminal)
        path = None
        if not dry_run:
            _fetch([each for each in sources if not each[2].is_here], terminal)
            path = hub.download(hub_id, revision=asked.revision, variant=asked.variant, elsewhere=left_out)
            if commit_of(path) != commit:
                terminal.warn(f"{hub_id} moved on while it was downloaded: this is {path.name}")
    if as_json:
        values = [{"name": file.name, "num_bytes": file.num_bytes, "was_here": file.is_here} for file in needed]
        answer = {
            "model_path": hub_id,
            "commit": commit,
            "files": values,
            "folder": None if path is None else str(path),
        }
        put_on_stdout(json_text({"schema": SCHEMA, **answer}))
    elif path is not None:
        put_path_on_stdout(path)


def _show_sizes(needed: Sequence[HubFile], num_files: int, title: str, terminal: Terminal) -> None:
    """A row per component, before the first byte."""
    from diffusion_runtime.cli.tables import plain_table

    parts: dict[str, list[HubFile]] = {}
    for file in needed:
        parts.setdefault(file.name.rpartition("/")[0] or "model_index.json and the like", []).append(file)
    rows = [
        (name, str(len(part)), _bytes(part), _bytes([file for file in part if file.is_here]))
        for name, part in sorted(parts.items())
    ]
    terminal.show(plain_table(("part", "files", "size", "in the cache"), rows, title))
    missing = [file for file in needed if not file.is_here]
    terminal.say(
        f"to download: {len(missing)} of {len(needed)} files, {_bytes(missing)} of {_bytes(needed)}; "
        f"{num_files - len(needed)} files of the repository are not read and stay there"
    )


def _fetch(files: Sequence[tuple[str, str, HubFile]], terminal: Terminal) -> None:
    """One file after the other, the largest last, so that what is wrong with a folder is known early. files: with their
    repositories and commits."""
    from diffusion_runtime.models import hub

    total, done, started = sum(file.num_bytes for _, _, file in files), 0, time.perf_counter()
    for number, (hub_id, commit, file) in enumerate(sorted(files, key=lambda each: each[2].num_bytes), 1):
        hub.download_file(hub_id, file.name, commit)
        done += file.num_bytes
        seconds = time.perf_counter() - started
        terminal.count(
            f"  {number}/{len(files)} files, {size_text(done)} of {size_text(total)}: {file.name}",
            stage="download",
            step=number,
            num_steps=len(files),
            num_bytes=done,
            total_bytes=total,
            seconds=round(seconds, 4),
        )


def _bytes(files: Sequence[HubFile]) -> str:
    return size_text(sum(file.num_bytes for file in files))
