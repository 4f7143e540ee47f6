"""The flags of `generate` for scripts of one's own: parsed and checked as the command does."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from diffusion_runtime.cli.flag_syntax import CheckedCommand, rewrite_dotted_flags
from diffusion_runtime.cli.generate import flags_of
from diffusion_runtime.cli.generate import generate as generate_verb
from diffusion_runtime.cli.options import set_parameters
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.untrusted.printable import printable

if TYPE_CHECKING:
    from diffusion_runtime.cli.settings import Settings
    from diffusion_runtime.config import RuntimeConfig
    from diffusion_runtime.generation.interface import GenerationPipeline
    from diffusion_runtime.request.generation_request import GenerationRequest

# As in cli/app.py.
_ParserError: type[Exception] = typer.BadParameter.__mro__[1]

# Flags of `generate` that are about how the command itself writes and reports.
_NOT_HERE = (
    "file_format",
    "as_json",
    "dry_run",
    "resume",
    "profile",
    "attention_plot",
    "sign",
    "cert",
    "quiet",
    "verbose",
)


@dataclass(frozen=True)
class ScriptFlags:
    """The values of the flags. runtime: for load_pipeline. output_path: of --output-path, None without it."""

    runtime: RuntimeConfig
    output_path: str | None
    _settings: Settings

    def requests(self, pipeline: GenerationPipeline) -> tuple[GenerationRequest, ...]:
        """One per prompt and seed, with what the flags, --preset and the model say.

        Raises ConfigError, RequestError.
        """
        preset = self._settings.preset_for(pipeline.rules.presets)
        return tuple(pipeline.resolve(request, preset) for request in self._settings.requests)


def parse_flags(arguments: Sequence[str] | None = None, *, prompt: str | None = None) -> ScriptFlags:
    """The flags of `generate` out of `arguments`, by default those of this process. prompt: where none is given.

    `--help` prints the flags; that, and whatever is wrong with them, ends the process with the command's exit codes and
    messages.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    program = os.path.basename(sys.argv[0])
    try:
        parsed = _parse(given, program)
    except _ParserError as error:
        message = error.format_message() if isinstance(error, typer.BadParameter) else str(error)
        _end(f"{message}\n  see: {program} --help", 2)
    except DiffusionRuntimeError as error:
        _end(str(error), error.exit_code)
    if not isinstance(parsed, dict):
        raise SystemExit(parsed if isinstance(parsed, int) else 0)
    from diffusion_runtime.cli.settings import resolve_settings

    try:
        flags = flags_of({**dict.fromkeys(_NOT_HERE), **parsed})
        if prompt is not None and not (flags.prompts or flags.repeat or flags.config):
            parsed["prompts"] = [prompt]
            flags = flags_of({**dict.fromkeys(_NOT_HERE), **parsed})
        settings = resolve_settings(flags)
    except DiffusionRuntimeError as error:
        _end(str(error), error.exit_code)
    return ScriptFlags(settings.runtime, parsed["output_path"], settings)


def _parse(arguments: Sequence[str], program: str) -> Any:
    """The values of the flags by name; an exit code where --help was asked for."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)

    def flags(**values: Any) -> dict[str, Any]:
        """Flags as in diffusion-runtime generate."""
        return values

    kept = [
        parameter
        for name, parameter in inspect.signature(generate_verb).parameters.items()
        if name not in ("context", *_NOT_HERE)
    ]
    set_parameters(flags, kept)
    app.command(cls=CheckedCommand, context_settings={"help_option_names": ["-h", "--help"]})(flags)
    return app(args=rewrite_dotted_flags(arguments), prog_name=program, standalone_mode=False)


def _end(message: str, exit_code: int) -> NoReturn:
    print(f"error: {printable(message)}", file=sys.stderr)
    raise SystemExit(exit_code)
