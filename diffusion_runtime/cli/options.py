"""The flags of `generate`, each declared once. Flags of request fields follow from GenerationRequest, flags
of runtime options from RuntimeConfig and ParallelConfig; the others are here. Nothing is decided here."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_type_hints

import typer

from diffusion_runtime.cli.imported_files import import_files
from diffusion_runtime.config import ParallelConfig, RuntimeConfig, benchmark_options
from diffusion_runtime.core.runtime_options import WHAT, Flag, RuntimeOption, flag_name, options_of
from diffusion_runtime.errors import OutputError, RequestError
from diffusion_runtime.request.fields import SIZE
from diffusion_runtime.request.generation_request import INPUT_FIELDS, REQUEST_FIELDS

ATTENTION = "Attention"
OUTPUT = "Output"
STREAMING = "While it is made"
PHASES = "Attention by phase (docs/causal_video.md)"

_Flags = TypeVar("_Flags")


def option(panel: str, text: str, *names: str, metavar: str | None = None, **limits: Any) -> Any:
    """Return the annotation of a flag."""
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar, show_default=False, **limits)


# Flags of several verbs.
Prompts: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="PROMPT", help="What to show, in quotes.", show_default=False)
]
Lora: TypeAlias = Annotated[
    list[str] | None,
    option(
        WHAT,
        "A LoRA file of any trainer, or of the hub (ORG/NAME/FILE), with its strength: FILE@0.8; again for several. "
        "For one of two transformers: transformer_2=FILE.",
        "--lora",
        metavar="FILE",
    ),
]
ImportFiles: TypeAlias = Annotated[
    list[str] | None,
    option(
        ATTENTION,
        "Run a Python file of yours first, which registers a backend; again for several.",
        "--import",
        metavar="FILE.py",
        callback=import_files,
    ),
]
Format: TypeAlias = Annotated[
    str | None, option(OUTPUT, "mp4, gif, webp, png, npy; wav is the sound alone.", "--format", metavar="NAME")
]
Json: TypeAlias = Annotated[bool, option(OUTPUT, "One JSON object on standard output.", "--json")]
Quiet: TypeAlias = Annotated[bool, option(OUTPUT, "Errors only, and the paths.", "--quiet", "-q")]
LogFormat: TypeAlias = Annotated[
    str | None, option(OUTPUT, "Log format on stderr: text or json.", "--log-format", metavar="NAME")
]


@dataclass(frozen=True)
class PromptFlags:
    """Sources of prompts, in addition to --prompt."""

    prompts: Prompts = None
    prompt_file: Annotated[
        str | None,
        option(
            WHAT,
            "One prompt per line (- reads standard input), or rows of request fields: .jsonl, .csv.",
            "--prompt-file",
            metavar="FILE",
        ),
    ] = None


@dataclass(frozen=True)
class SourceFlags:
    """LoRA files, and sources of other values."""

    lora: Lora = None
    lora_path: Annotated[
        list[str] | None,
        option(WHAT, "A LoRA file; again for several. See --lora.", "--lora-path", metavar="FILE"),
    ] = None
    lora_scale: Annotated[
        list[float] | None,
        option(WHAT, "Its strength; one per --lora-path, in their order.", "--lora-scale", metavar="X"),
    ] = None
    from_file: Annotated[
        str | None, option(WHAT, "Repeat a generated file; other flags override it.", "--from", metavar="FILE")
    ] = None
    config: Annotated[
        str | None, option(WHAT, "YAML with runtime:, request: and presets:.", "--config", metavar="FILE")
    ] = None
    set_values: Annotated[
        list[str] | None,
        option(
            WHAT,
            "Set one value of the config: request.height=128. Also as a flag: --request.height 128. "
            "pipeline.NAME=VALUE: a keyword of diffusers' own pipeline.",
            "--set",
            metavar="KEY=VALUE",
        ),
    ] = None
    allow_url: Annotated[
        list[str] | None,
        option(
            WHAT,
            "A host that images may be fetched from; *.NAME too; again for several.",
            "--allow-url",
            metavar="HOST",
        ),
    ] = None
    preset: Annotated[
        str | None,
        option(
            SIZE,
            "fast (4 steps), draft, default, large, few-step settings of `models`, or one of --config.",
            "--preset",
            metavar="NAME",
        ),
    ] = None


@dataclass(frozen=True)
class AttentionChoice:
    """The choice of attention, as it was typed."""

    attention_backend: Annotated[
        str | None,
        option(
            ATTENTION,
            "A backend, or several in order of preference: fa,torch_sdpa. It runs or the command fails before loading.",
            "--attention-backend",
            metavar="NAMES",
        ),
    ] = None
    attention_backend_config: Annotated[
        str | None,
        option(
            ATTENTION,
            "Its options: key=value,... or JSON, or a JSON or YAML file.",
            "--attention-backend-config",
            metavar="OPTIONS",
        ),
    ] = None
    attention_config: Annotated[
        str | None,
        option(
            ATTENTION,
            "Default, per role and schedule, as JSON or a file. Single values: see below.",
            "--attention-config",
            metavar="JSON|FILE",
        ),
    ] = None
    prefill_attention_backend: Annotated[
        str | None,
        option(
            PHASES,
            "Backend for commits (prefill), which write a chunk's final keys; its options: "
            "--prefill-attention-backend-config.",
            "--prefill-attention-backend",
            metavar="NAME",
        ),
    ] = None
    # Too long for a help of 80 columns, which names them beside their backends.
    prefill_attention_backend_config: Annotated[
        str | None, typer.Option("--prefill-attention-backend-config", hidden=True)
    ] = None
    decode_attention_backend: Annotated[
        str | None,
        option(
            PHASES,
            "Backend for the denoising steps of each chunk; its options: --decode-attention-backend-config.",
            "--decode-attention-backend",
            metavar="NAME",
        ),
    ] = None
    decode_attention_backend_config: Annotated[
        str | None, typer.Option("--decode-attention-backend-config", hidden=True)
    ] = None
    # What dotted attention flags are rewritten to (flag_syntax.py).
    attention_entry: Annotated[list[str] | None, typer.Option("--dotted-attention", hidden=True)] = None
    import_files: ImportFiles = None


@dataclass(frozen=True)
class OutputFlags:
    """Flags of the files that are written, and of plans and instruments."""

    output_path: Annotated[
        str | None,
        option(OUTPUT, "A file with extension, or a folder. Default: outputs/", "--output-path", "-o", metavar="PATH"),
    ] = None
    file_format: Format = None
    as_json: Json = False
    dry_run: Annotated[bool, option(OUTPUT, "Show what would run; load no weights, write nothing.", "--dry-run")] = (
        False
    )
    plan_for: Annotated[
        str | None,
        option(
            OUTPUT,
            "With --dry-run: plan for a GPU that is not here: h100, 4090, ... See docs/memory.md.",
            "--plan-for",
            metavar="NAME",
        ),
    ] = None
    resume: Annotated[
        bool, option(OUTPUT, "Continue a run that was interrupted: make what is missing.", "--resume")
    ] = False
    save_latents: Annotated[
        bool,
        option(
            OUTPUT,
            "Write the latents beside the file, from which `finish` goes on. See docs/finishing.md.",
            "--save-latents",
        ),
    ] = False
    profile: Annotated[
        str | None,
        option(
            OUTPUT,
            "Trace of the first request, for Perfetto. See docs/instruments.md.",
            "--profile",
            metavar="FILE.json",
        ),
    ] = None
    stream: Annotated[
        str | None,
        option(
            STREAMING,
            "Write an mp4 that can be watched while it is made; - is standard output. For causal models and videos "
            "in segments; see docs/causal_video.md.",
            "--stream",
            metavar="FILE.mp4",
        ),
    ] = None
    interactive: Annotated[
        bool,
        option(
            STREAMING,
            "With --stream: a line on standard input is the prompt from the next chunk on. Without a length, until the "
            "input ends.",
            "--interactive",
        ),
    ] = False
    attention_plot: Annotated[
        str | None,
        option(
            OUTPUT,
            "A picture of the density of attention by layer and step, and of one plan. See docs/instruments.md.",
            "--attention-plot",
            metavar="FILE.png",
        ),
    ] = None
    sign: Annotated[
        str | None,
        option(
            OUTPUT,
            "Sign each file: a C2PA manifest says that a model made it, and from which recipe. See docs/verifying.md.",
            "--sign",
            metavar="KEY.pem",
        ),
    ] = None
    cert: Annotated[
        str | None,
        option(OUTPUT, "With --sign: the key's certificate, then those that signed it.", "--cert", metavar="FILE.pem"),
    ] = None


@dataclass(frozen=True)
class ReportFlags:
    """Flags of how much is reported, and in which form."""

    quiet: Quiet = False
    verbose: Annotated[bool, option(OUTPUT, "Everything, tracebacks included.", "--verbose", "-v")] = False
    log_format: LogFormat = None


# Flags about the files of one generation, which verbs that write none do not take.
OUTPUT_FLAGS = tuple(item.name for item in fields(OutputFlags) if item.name != "as_json")


def is_of_clips(flag: str | None) -> bool:
    """Return whether `generate` alone has this flag, as it alone writes clips: -o, --resume, --attention-plot, ..."""
    hints = get_type_hints(OutputFlags, include_extras=True)
    # In an annotation typer keeps the first name of an option in the place of a default.
    declared = (get_args(hints[name])[1] for name in OUTPUT_FLAGS)
    return any(flag in (each.default, *each.param_decls) for each in declared)


def parameters_of(flags: type, **texts: str) -> list[inspect.Parameter]:
    """Return the flags of a class such as those above as parameters of a verb. texts: helps in place of the class's."""
    hints = get_type_hints(flags, include_extras=True)
    for name, text in texts.items():
        kind, annotation = get_args(hints[name])
        annotation = copy.copy(annotation)
        annotation.help = text
        hints[name] = Annotated[kind, annotation]
    return [_parameter(item.name, hints[item.name], item.default) for item in fields(flags)]


def taken(flags: type[_Flags], given: Mapping[str, Any]) -> _Flags:
    """Return the given values that one class of flags holds."""
    return flags(**{item.name: given[item.name] for item in fields(flags)})  # type: ignore[arg-type]


def set_parameters(verb: Any, parameters: Iterable[inspect.Parameter]) -> None:
    """Give a verb that takes `**given` its flags: the parser reads them off the signature and the annotations."""
    verb.__signature__ = inspect.Signature(list(parameters))
    verb.__annotations__ = {name: each.annotation for name, each in verb.__signature__.parameters.items()}


def runtime_flag(name: str, panel: str | None = None, text: str | None = None) -> Any:
    """Return the annotation of the flag of an option of RuntimeConfig or ParallelConfig. panel, text: in place of its
    own."""
    declared, flag = _flagged()[name]
    names = f"{flag_name(name)}/--no-{flag_name(name)[2:]}" if declared.kind is bool else flag_name(name)
    return option(panel or flag.panel, text or flag.help, names, metavar=flag.metavar)


def runtime_parameters(is_wanted: Callable[[Flag], bool]) -> list[inspect.Parameter]:
    """Return the flags of RuntimeConfig and ParallelConfig as parameters of a verb; None is a flag that was not
    given."""
    names = [name for name, (_, flag) in _flagged().items() if is_wanted(flag)]
    return [_runtime_parameter(name) for name in sorted(names, key=lambda name: _flagged()[name][1].order)]


def source_parameters() -> list[inspect.Parameter]:
    """Return the flags of the model and of the sources of other values."""
    return [*runtime_parameters(lambda flag: flag.panel == WHAT), *parameters_of(SourceFlags)]


def run_parameters() -> list[inspect.Parameter]:
    """Return the flags of attention, of where a model runs, and of what is written and reported."""
    where = runtime_parameters(lambda flag: flag.panel != WHAT)
    return [*parameters_of(AttentionChoice), *where, *parameters_of(OutputFlags), *parameters_of(ReportFlags)]


def benchmark_parameters(panel: str) -> list[inspect.Parameter]:
    """Return the flags of the options that `bench generate` takes and records."""
    return [_runtime_parameter(name, panel, _flagged()[name][1].bench_help) for name in benchmark_options()]


def given_options(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values of the options of a class; a list without elements was not given."""
    return {name: None if given[name] == [] else given[name] for name in options_of(config) if name in given}


def _runtime_parameter(name: str, panel: str | None = None, text: str | None = None) -> inspect.Parameter:
    return _parameter(name, Annotated[_flagged()[name][0].kind | None, runtime_flag(name, panel, text)], None)


def _flagged() -> dict[str, tuple[RuntimeOption, Flag]]:
    """Return the options that have a flag by name, those of ParallelConfig last."""
    declared = {**options_of(RuntimeConfig), **options_of(ParallelConfig)}
    return {name: (each, each.flag) for name, each in declared.items() if each.flag is not None}


def request_parameters(panel: str) -> list[inspect.Parameter]:
    """Return the flags of the request fields of one panel; None is a flag that was not given. Those of files are lists
    as well: the last of several would hide the others."""
    parameters = []
    for name, declared in REQUEST_FIELDS.items():
        if declared.panel == panel:
            flag = declared.flag or flag_name(name)
            kind: Any = list[str] if declared.repeatable or name in INPUT_FIELDS else declared.check.kind
            annotation = option(panel, declared.help, flag, metavar=declared.check.metavar)
            if kind in (int, float):
                annotation.parser = _number_parser(flag, kind, declared.check)
            parameters.append(_parameter(name, Annotated[kind | None, annotation], None))
    return parameters


def _number_parser(flag: str, kind: type[int | float], check: Callable[[str, object], None]) -> Callable[[str], Any]:
    """Return the parser of a request field's number. What is none is refused in the field's words: the parser's own say
    neither what was typed nor what may be."""

    def parse(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            try:
                check("", text)
            except RequestError as error:
                raise typer.BadParameter(str(error).removeprefix(": "), param_hint=f"'{flag}'") from None
            raise

    return parse


def _parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def html_option(text: str) -> Any:
    """Return the annotation of --html: a file that a page is written to."""
    return Annotated[Path | None, option(OUTPUT, text, "--html", metavar="FILE.html", parser=_html_path)]


def _html_path(text: str) -> Path:
    """Raises OutputError for the name of a folder, whose slash a Path does not keep."""
    if text.endswith(("/", os.sep)):
        raise OutputError(f"--html {text}: it is a folder; give the name of a file in it")
    return Path(text)
