"""`workflow explain` and `workflow coverage`: what becomes of the nodes of ComfyUI's workflow files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.flag_syntax import CheckedCommand
from diffusion_runtime.cli.terminal import json_text, put_on_stdout
from diffusion_runtime.errors import OutputError

if TYPE_CHECKING:
    from diffusion_runtime.workflows.coverage import Coverage
    from diffusion_runtime.workflows.translation import Refusal, Translation

EPILOG = """[bold]Examples[/]

diffusion-runtime workflow explain video.json --models-dir ComfyUI/models

diffusion-runtime workflow explain picture.png --set 105:9.steps=8 --to mine.yaml
"""
COVERAGE_EPILOG = """[bold]Examples[/]

diffusion-runtime workflow coverage comfyui_workflow_templates_json/templates
"""
SCHEMA = "diffusion_runtime.workflow/1"
COVERAGE_SCHEMA = "diffusion_runtime.workflow.coverage/1"
_MAX_NOT_REACHED = 20
# The largest template has 211; laying out a table of 10,000 takes seconds.
_MAX_SHOWN = 500

workflow = typer.Typer(rich_markup_mode="rich", context_settings={"help_option_names": ["-h", "--help"]})


@workflow.callback()
def about() -> None:
    """About workflow files of ComfyUI; generate --workflow FILE runs one."""


@workflow.command("explain", cls=CheckedCommand, epilog=EPILOG)
def explain(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A .json of the editor or the API, .png, .webp, .mp4.")],
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="In place of the workflow's own.", show_default=False)
    ] = None,
    models_dir: Annotated[
        list[str] | None,
        typer.Option("--models-dir", metavar="DIR", help="ComfyUI's folder of models; again for several."),
    ] = None,
    set_values: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NODE.input=VALUE", help="Another value of a node's input; mode 2 mutes it."),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="FILE", help="Write a config (.yaml), or a request for the server (.json)."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show what generate --workflow would run: what becomes of each node, the request and the files."""
    from diffusion_runtime.workflows.graph import WorkflowError
    from diffusion_runtime.workflows.settings import read_translation
    from diffusion_runtime.workflows.translation import Refusal

    found = read_translation(file, set_values or (), models_dir or (), prompt)
    if as_json:
        put_on_stdout(json_text(_as_object(file, found)))
    else:
        _show(found)
    if isinstance(found, Refusal):
        raise WorkflowError(f"--workflow: {file}: {found.message()}")
    if to is not None:
        _write(found, to, models_dir or (), file)


@workflow.command("coverage", cls=CheckedCommand, epilog=COVERAGE_EPILOG)
def coverage(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Workflow files, and ComfyUI's index.json of them.")],
    as_json: options.Json = False,
) -> None:
    """Show which workflows of a folder are translated, by uses, and what the others lack."""
    from diffusion_runtime.workflows.coverage import cover

    found = cover(folder)
    if as_json:
        put_on_stdout(json_text({"schema": COVERAGE_SCHEMA, **found.to_dict()}))
        return
    _show_coverage(found)


def _finding_rows(found: Translation | Refusal) -> list[tuple[str, str, str, str]]:
    return [(each.node.id, each.node.kind, each.verdict.value, each.remark) for each in found.findings]


def _as_object(file: str, found: Translation | Refusal) -> dict[str, Any]:
    from diffusion_runtime.workflows.translation import Translation

    nodes = [
        {"node": node, "class": kind, "verdict": verdict, "remark": remark}
        for node, kind, verdict, remark in _finding_rows(found)
    ]
    values: dict[str, Any] = {"schema": SCHEMA, "path": file, "nodes": nodes}
    values["not_reached"] = [node.id for node in found.not_reached]
    if isinstance(found, Translation):
        values |= {
            "model": found.model.name,
            "request": dict(found.request),
            "files": {key: weights.file for key, weights in found.files.items()},
            "lora": [
                {"path": lora.file, "scale": lora.scale, "component": component} for lora, component in found.loras
            ],
        }
    return values


def _show(found: Translation | Refusal) -> None:
    from diffusion_runtime.cli.consoles import console_on_stdout
    from diffusion_runtime.cli.tables import facts_table, plain_table
    from diffusion_runtime.workflows.evaluation import Verdict
    from diffusion_runtime.workflows.translation import Translation

    console = console_on_stdout()
    nodes = _finding_rows(found)
    listed = (
        nodes if len(nodes) <= _MAX_SHOWN else [each for each in nodes if each[2] != Verdict.TAKEN.value][:_MAX_SHOWN]
    )
    console.print(plain_table(("node", "class", "is", "by what, or why"), listed, "Nodes"))
    if len(listed) < len(nodes):
        console.print(f"and {len(nodes) - len(listed)} more; --json has all of them")
    if found.not_reached:
        kinds = sorted({node.kind for node in found.not_reached})
        shown = ", ".join(kinds[:_MAX_NOT_REACHED])
        console.print(f"{len(found.not_reached)} nodes reach no output and are without effect: {shown}")
    if isinstance(found, Translation):
        facts: list[tuple[str, object]] = [("model", found.model.name)]
        facts += [(name, _short(value)) for name, value in found.request.items()]
        console.print(facts_table(facts, "\nRequest"))
        rows = [(key, weights.file) for key, weights in found.files.items()]
        rows += [(f"lora ({component})", f"{lora.file} at {lora.scale:g}") for lora, component in found.loras]
        console.print(plain_table(("for", "file"), rows, "Files"))


def _short(value: object) -> str:
    if isinstance(value, list | tuple) and all(isinstance(each, float) for each in value):
        return ", ".join(f"{each:.5g}" for each in value)
    text = str(value)
    return text if len(text) <= 300 else f"{text[:300]}... ({len(text)} characters)"


def _write(found: Translation, to: str, models_dir: Sequence[str], path: str) -> None:
    from diffusion_runtime.media.publish import publish_text
    from diffusion_runtime.untrusted.files import user_path
    from diffusion_runtime.untrusted.yaml_text import yaml_document
    from diffusion_runtime.workflows.settings import settings_of

    target = user_path(to, "--to")
    if target.suffix == ".json":
        publish_text(target, json_text(dict(found.request)) + "\n", "--to")
    elif target.suffix in (".yaml", ".yml"):
        # Without folders of models the config names the published model.
        model = None if models_dir else found.model.name
        settings = settings_of(found, models_dir, model, path)
        publish_text(
            target, yaml_document({"runtime": dict(settings.runtime), "request": dict(settings.request)}), "--to"
        )
    else:
        raise OutputError(f"--to: {to}: expected a name that ends in .yaml (a config) or .json (a request)")


def _show_coverage(found: Coverage) -> None:
    from diffusion_runtime.cli.consoles import console_on_stdout
    from diffusion_runtime.cli.tables import plain_table

    console = console_on_stdout()
    rows = [(each.name, f"{each.uses}", each.model or "-", each.reason or "translated") for each in found.rows]
    console.print(plain_table(("workflow", "uses", "model", "result"), rows, f"Workflows of {Path(found.folder).name}"))
    lacking: Iterable[tuple[str, Mapping[str, int]]] = found.lacking()
    counts = [(kind, f"{count['uses']}", f"{count['workflows']}") for kind, count in lacking]
    console.print(
        plain_table(("class of nodes", "uses", "workflows"), counts, "Not supported, of workflows that are refused")
    )
    console.print(found.summary)
