"""Entry point of the command: verbs, errors, exit codes. Until a verb runs, only the parser is imported."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.main

from diffusion_runtime.cli import options
from diffusion_runtime.cli.backends import EPILOG as BACKENDS_EPILOG
from diffusion_runtime.cli.backends import backends
from diffusion_runtime.cli.bench import bench
from diffusion_runtime.cli.bench_generate import EPILOG as BENCH_GENERATE_EPILOG
from diffusion_runtime.cli.bench_generate import generate as bench_generate
from diffusion_runtime.cli.bench_step import EPILOG as STEP_EPILOG
from diffusion_runtime.cli.bench_step import step
from diffusion_runtime.cli.calibrate import EPILOG as CALIBRATE_EPILOG
from diffusion_runtime.cli.calibrate import calibrate
from diffusion_runtime.cli.compare import EPILOG as COMPARE_EPILOG
from diffusion_runtime.cli.compare import compare
from diffusion_runtime.cli.completion import EPILOG as COMPLETION_EPILOG
from diffusion_runtime.cli.completion import asked_shell, completion, put_script
from diffusion_runtime.cli.config_command import config
from diffusion_runtime.cli.doctor import EPILOG as DOCTOR_EPILOG
from diffusion_runtime.cli.doctor import doctor
from diffusion_runtime.cli.explain import EPILOG as EXPLAIN_EPILOG
from diffusion_runtime.cli.explain import explain
from diffusion_runtime.cli.flag_syntax import CheckedCommand, rewrite_dotted_flags
from diffusion_runtime.cli.generate import EPILOG as GENERATE_EPILOG
from diffusion_runtime.cli.generate import generate
from diffusion_runtime.cli.models import models
from diffusion_runtime.cli.models_convert import EPILOG as CONVERT_EPILOG
from diffusion_runtime.cli.models_convert import convert
from diffusion_runtime.cli.models_download import EPILOG as DOWNLOAD_EPILOG
from diffusion_runtime.cli.models_download import download
from diffusion_runtime.cli.terminal import Terminal, prepare_standard_streams, put_failure_on_stdout, put_on_stdout
from diffusion_runtime.cli.tune import EPILOG as TUNE_EPILOG
from diffusion_runtime.cli.tune import tune
from diffusion_runtime.core.spellings import resolve
from diffusion_runtime.errors import OutputError, UsageError
from diffusion_runtime.parallel.process_info import LAUNCHED_VARIABLE, is_rank
from diffusion_runtime.session.failures import INTERRUPTED, Failure
from diffusion_runtime.session.interruptions import interruptions, remove_unfinished_files
from diffusion_runtime.startup.bytecode import keep_bytecode

# What the parser raises for a wrong command line. Its class has had several homes; it is always BadParameter's parent.
_ParserError: type[Exception] = typer.BadParameter.__mro__[1]

_MAX_PARSER_CHARACTERS = 400

app = typer.Typer(
    name="diffusion-runtime",
    help="Video and image generation in which attention is chosen, never guessed.",
    epilog='Start with: diffusion-runtime generate "a red circle moving left"',
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The `diffusion-runtime` command."""
    has_output = prepare_standard_streams()
    keep_bytecode()
    if is_rank(os.environ):
        interruptions.install_in_starting_rank(is_launched=LAUNCHED_VARIABLE in os.environ)
    else:
        interruptions.install()
    is_short = sys.argv[1:2] == ["explain"]
    if is_short:
        # It makes modules and meta tensors and ends. Looking for cyclic garbage among them takes a tenth of the time:
        # 2.24 s without, 2.51 s with it (Wan 14B, medians of 7 pairs, two cores of a Xeon); with `_end_at_once` a
        # quarter, 2.04 and 2.80 s (9 pairs).
        gc.disable()
    code = run(sys.argv[1:], has_output=has_output)
    # The interpreter takes a moment to end, in which an interruption would be a traceback.
    interruptions.all_is_reported(code)
    remove_unfinished_files()
    if is_short:
        _end_at_once(code)
    sys.exit(code)


def _end_at_once(code: int) -> None:
    """End the process without freeing what it made object by object (figures: `main`). Returns where what was
    written cannot be flushed, as the interpreter knows how to say that."""
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(code)


def run(arguments: Sequence[str], *, has_output: bool = True) -> int:
    """Run one command line and return its exit code; every error becomes one message. has_output: whether standard
    output leads anywhere; without it nothing is run whose one result is an object there (`--json`)."""
    terminal = Terminal(
        quiet=any(flag in arguments for flag in ("--quiet", "-q")),
        verbose=any(flag in arguments for flag in ("--verbose", "-v")),
        log_format="json" if _asks_for_json_lines(arguments) else None,
    )
    try:
        if not has_output and "--json" in arguments:
            raise OutputError(
                "cannot write to standard output: it is closed, and --json prints the result there; leave --json out, "
                "or redirect it, as in `> FILE`"
            )
        if (shell := asked_shell(arguments)) is not None:
            # A shell's start waits for this; parsing values, typer imports pydantic, a quarter of the time.
            put_script(shell, _command())
            return 0
        rewritten = rewrite_dotted_flags(arguments or ["--help"])
        _refuse_verb(rewritten[0])
        # obj: what was typed, for a verb that starts itself again in several processes.
        code = _command()(args=rewritten, prog_name="diffusion-runtime", standalone_mode=False, obj=tuple(rewritten))
        return code if isinstance(code, int) else 0
    except _ParserError as error:
        failure = Failure(UsageError.__name__, _parser_message(error, arguments), UsageError.exit_code, "")
    except (Exception, KeyboardInterrupt) as error:
        failure = Failure.of(error)
    with interruptions.reporting() if failure.exit_code == INTERRUPTED else contextlib.nullcontext():
        terminal.error(failure.message, failure.trace, failure.kind, failure.exit_code)
        if "--json" in arguments:
            verb = next((argument for argument in arguments if not argument.startswith("-")), "generate")
            put_failure_on_stdout(f"diffusion_runtime.{verb}/1", failure.to_dict())
    return failure.exit_code


@functools.cache
def _command() -> Any:
    """All verbs and flags as the parser takes them, which typer needs 0.035 s of CPU time to make."""
    return typer.main.get_command(app)


def _refuse_verb(word: str) -> None:
    """Raises UsageError for a verb of other projects that has no counterpart here."""
    theirs = resolve("verb", word)
    if theirs is not None:
        raise UsageError(theirs.refusal)


def _asks_for_json_lines(arguments: Sequence[str]) -> bool:
    """Before the parser has run, whose errors are reported so as well."""
    return "--log-format=json" in arguments or ("--log-format", "json") in itertools.pairwise(arguments)


def _parser_message(error: Any, arguments: Sequence[str]) -> str:
    """The parser's message, with the command that explains the flags."""
    verbs = {each.name for each in app.registered_commands} | {each.name for each in app.registered_groups}
    # A value that one of our own functions refuses comes without a context.
    verb = f" {arguments[0]}" if arguments and arguments[0] in verbs else ""
    command = error.ctx.command_path if error.ctx is not None else f"diffusion-runtime{verb}"
    # What the parser quotes is a whole argument.
    message = error.format_message()
    option = getattr(error, "option_name", None)
    if options.is_of_clips(option):
        message = f"No such option: {option} is of `generate`, which writes clips; leave it out"
    if len(message) > _MAX_PARSER_CHARACTERS:
        message = f"{message[:_MAX_PARSER_CHARACTERS]}..."
    return f"{message}\n  see: {command} --help"


def _print_version(wanted: bool) -> None:
    if wanted:
        package = importlib.import_module("diffusion_runtime")
        put_on_stdout(f"diffusion-runtime {package.__version__}")
        raise typer.Exit


@app.callback()
def verbs(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Video and image generation in which attention is chosen, never guessed."""


app.command("generate", cls=CheckedCommand, epilog=GENERATE_EPILOG)(generate)
app.command("explain", cls=CheckedCommand, epilog=EXPLAIN_EPILOG)(explain)
app.command("compare", cls=CheckedCommand, epilog=COMPARE_EPILOG)(compare)
app.command("tune", cls=CheckedCommand, epilog=TUNE_EPILOG)(tune)
app.command("backends", cls=CheckedCommand, epilog=BACKENDS_EPILOG)(backends)
app.command("doctor", cls=CheckedCommand, epilog=DOCTOR_EPILOG)(doctor)
app.command("calibrate", cls=CheckedCommand, epilog=CALIBRATE_EPILOG)(calibrate)
bench.command("step", cls=CheckedCommand, epilog=STEP_EPILOG)(step)
bench.command("generate", cls=CheckedCommand, epilog=BENCH_GENERATE_EPILOG)(bench_generate)
app.add_typer(bench, name="bench")
app.add_typer(config, name="config")
models.command("download", cls=CheckedCommand, epilog=DOWNLOAD_EPILOG)(download)
models.command("convert", cls=CheckedCommand, epilog=CONVERT_EPILOG)(convert)
app.add_typer(models, name="models")
app.command("completion", cls=CheckedCommand, epilog=COMPLETION_EPILOG)(completion)


@app.command(
    "info",
    cls=CheckedCommand,
    epilog=(
        "[bold]Examples[/]\n\ndiffusion-runtime info outputs/a-red-circle-moving-left-seed0.mp4\n\n"
        "diffusion-runtime info style.safetensors --model-path wan2.1-1.3b"
    ),
)
def info(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A file that generate wrote, a LoRA, or weights.", show_default=False)
    ],
    model_path: Annotated[
        str | None,
        typer.Option(
            "--model-path", metavar="MODEL", help="With a LoRA or weights: whether they fit.", show_default=False
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show what a file is: how it was made, or which model a LoRA or weights are for."""
    from diffusion_runtime.cli.info import run_info
    from diffusion_runtime.cli.lora_info import is_lora_path, run_lora_info
    from diffusion_runtime.cli.weights_info import is_weights_path, run_weights_info

    if is_weights_path(file):
        raise typer.Exit(run_weights_info(file, model_path, as_json=as_json))
    if is_lora_path(file):
        raise typer.Exit(run_lora_info(file, model_path, as_json=as_json))
    if model_path is not None:
        raise UsageError(f"--model-path: {file} is no LoRA file, and no weights; leave the option out")
    raise typer.Exit(run_info(file, as_json=as_json))
