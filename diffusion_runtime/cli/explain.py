"""`explain`: what a generation would run, by layer and step, and what it would cost. Loads no weights."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.generate import flags_of
from diffusion_runtime.cli.generate import generate as generate_verb
from diffusion_runtime.cli.tables import facts_table, plain_table
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout

if TYPE_CHECKING:
    from diffusion_runtime.explanation.expected_time import ExpectedTime
    from diffusion_runtime.explanation.explanation import Explanation
    from diffusion_runtime.loading.interface import Prepared
    from diffusion_runtime.request.generation_request import GenerationRequest

EPILOG = """[bold]Examples[/]

diffusion-runtime explain --model-path wan2.1-14b --attention-backend video_sparse_attn

diffusion-runtime explain --attention-config attention.yaml --html plan.html

diffusion-runtime explain --model-path flux.1-dev --height 2048 --width 2048 --json
"""
# Every embedded model knows these words, so nothing is said of a prompt that nobody gave.
_ANY_PROMPT = "a star"


def explain(context: typer.Context, **given: Any) -> None:
    """Show what a generation would run and cost; no weight is read.

    The backend of every layer and step, why, what each computes of the pairs,
    operations, memory, and where the time is expected to go. Flags as in generate.
    """
    del context
    html, as_json = given.pop("html"), given["as_json"]
    terminal = Terminal(quiet=given["quiet"], verbose=given["verbose"], log_format=given["log_format"])
    missing = dict.fromkeys(options.OUTPUT_FLAGS)
    flags = flags_of({**missing, **given})
    # Folders that are made for the page and stay empty are removed.
    with terminal.log(), ExitStack() as folders:
        if html is not None:
            from diffusion_runtime.session.outputs import prepare_result, remove_empty

            folders.callback(remove_empty, prepare_result(html, "--html"))
        explanation, others = _explain(flags, terminal, given["plan_for"])
        if html is not None:
            from diffusion_runtime.explanation.page import write_page

            write_page(explanation, html)
            terminal.say(f"wrote {html}")
    from diffusion_runtime.explanation.expected_time import planned_times

    # The format that `generate` writes unless it is told another one.
    expected = planned_times(
        explanation.description, [explanation.request], lambda request: "png" if request.num_frames == 1 else "mp4"
    )
    if as_json:
        times = {"expected_time": expected[0].to_dict() if expected else None}
        put_on_stdout(json_text({**explanation.to_dict(), **times}))
        return
    _show(explanation, terminal, expected)
    for remark in explanation.remarks:
        terminal.warn(remark)
    if others:
        terminal.say(f"This is the first of {others + 1} requests.")


def _explain(flags: Any, terminal: Terminal, plan_for: str | None) -> tuple[Explanation, int]:
    """Explain the first request; return also how many others there are. plan_for: as of prepare."""
    import dataclasses

    from diffusion_runtime.cli.settings import resolve_settings
    from diffusion_runtime.explanation.explanation import explain as explain_request
    from diffusion_runtime.loading import prepare

    settings = resolve_settings(flags, _ANY_PROMPT)
    for note in settings.notes:
        terminal.warn(note)
    prepared = prepare(settings.runtime, is_dry_run=True, plan_for=plan_for)
    preset = settings.preset_for(prepared.rules.presets)
    with _needed_images(prepared, settings.requests[0], preset, terminal) as images:
        request = prepared.rules.resolve(dataclasses.replace(settings.requests[0], **images), preset)
        prepared = prepared.planned_for([request])
        explanation = explain_request(prepared, request)
    not_given: dict[str, Any] = dict.fromkeys(images)
    request = dataclasses.replace(request, **not_given)
    return dataclasses.replace(explanation, request=request), len(settings.requests) - 1


@contextmanager
def _needed_images(
    prepared: Prepared, request: GenerationRequest, preset: str | None, terminal: Terminal
) -> Iterator[dict[str, Any]]:
    """Generated images for those that the model needs and that were not given, by their field: as with the prompt, what
    they show costs nothing."""
    native = prepared.inspectable
    needed: frozenset[str] = frozenset() if native is None else native.rules.inputs.needed
    missing = {name for name in needed if getattr(request, name) is None}
    if not missing:
        yield {}
        return
    from diffusion_runtime.benchmark.sample_images import sample_images

    with tempfile.TemporaryDirectory() as folder:
        values = {name: value for name, value in request.to_dict().items() if value is not None}
        made = sample_images(prepared.rules, values, preset, Path(folder))
        for name in sorted(missing):
            terminal.say(f"{name}: none was given; counted with one of the size of what is made")
        yield {name: path for name, path in made.items() if name in missing}


def _show(explanation: Explanation, terminal: Terminal, expected: Sequence[ExpectedTime]) -> None:
    """Tables of at most 100 columns on standard output; with `--log-format json` as lines of the log."""

    put = terminal.show if terminal.log_format == "json" else console_on_stdout().print
    from diffusion_runtime.cli.dry_run import attention_plan, device_row
    from diffusion_runtime.explanation.explanation import implementation_rows
    from diffusion_runtime.explanation.text_map import in_tera, schedule_map

    description, request = explanation.description, explanation.request
    frames, height, width = explanation.grid
    text = f" and {explanation.num_text_tokens} of text" if explanation.num_text_tokens else ""
    facts: Sequence[tuple[str, object]] = [
        ("model", f"{description.config.model_path} ({description.family})"),
        ("device", f"{device_row(description)}, {description.dtype}"),
        ("size", f"{request.num_frames} frame(s) of {request.width} x {request.height}"),
        ("tokens", f"{frames * height * width} in a grid of {frames} x {height} x {width}{text}"),
        *(("reference", each) for each in explanation.references),
        ("forward passes", explanation.passes_text),
        *([("quantization", description.quantization)] if description.quantization else []),
    ]
    put(facts_table(facts, "\nWhat would run"))
    put(attention_plan(description))
    named = [
        (row.role, row.layers, row.steps, row.backend, row.implementation or "found at the call")
        for row in implementation_rows(explanation)
    ]
    put(plain_table(("role", "layers", "steps", "backend", "computed by"), named, "What would compute it"))
    for library in description.libraries:
        put(str(library))
    drawn = schedule_map(explanation.schedule)
    has_commits = any(row.commit for row in drawn.rows)
    num_first = explanation.num_first_steps or 0
    columns = (
        *("role", "layers", *(["commits"] if has_commits else [])),
        *([f"{num_first} steps of the first chunk"] if num_first else []),
        f"steps{' of the others' if num_first else ''}, one letter each",
    )
    rows = [
        (row.role, row.layers, *([row.commit] if has_commits else []), *([first] if num_first else []), letters)
        for row in drawn.rows
        for first, letters in zip_longest(
            _wrapped(row.letters[:num_first]), _wrapped(row.letters[num_first:]), fillvalue=""
        )
    ]
    put(plain_table(columns, rows, "Attention by layer and step"))
    put(facts_table(list(drawn.legend.items()), ""))
    at_most = "at most " if explanation.is_bound else ""
    parts = [
        (part.name, in_tera(part.operations), (at_most if part.kept else "") + in_tera(part.kept), f"{part.share:.0%}")
        for part in explanation.parts
    ]
    put(plain_table(("part", "T operations", "computed", "expected time"), parts, "What the request would cost"))
    terminal.say("Expected time: shares by what one H200 reached in bfloat16.")
    terminal.say(f"Of it {explanation.step_text}.")
    if expected:
        put(facts_table(expected[0].rows(), "Seconds that it would take on this machine, without loading"))
    if description.planned_on is not None:
        terminal.say(description.planned_on.note)
    if description.memory is not None:
        put(facts_table(description.memory.rows(), "Memory that it would take"))


def _wrapped(letters: str, width: int = 60) -> list[str]:
    return [letters[start : start + width] for start in range(0, len(letters), width)]


def _parameters() -> list[inspect.Parameter]:
    """The flags of `generate`, without those of files that are written, and --html."""
    kept = [
        parameter
        for name, parameter in inspect.signature(generate_verb).parameters.items()
        if name not in options.OUTPUT_FLAGS or name == "plan_for"
    ]
    html = inspect.Parameter(
        "html",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=options.html_option("Write it as a page too."),
    )
    return [*kept, html]


options.set_parameters(explain, _parameters())
