"""Registry of the command's verbs, lazily imported: a command line imports the verb that it names and no other, and the
help of all reads the summaries here."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from diffusion_runtime.cli.flag_syntax import CheckedCommand
from diffusion_runtime.cli.terminal import put_on_stdout


@dataclass(frozen=True)
class Verb:
    """module: of cli/, in which a function or a group (typer.Typer) has the name of the verb, and EPILOG its examples;
    summary: the first sentence of that function's docstring. subcommands: of a group, in modules of their own."""

    module: str
    summary: str
    subcommands: tuple[tuple[str, str], ...] = ()


VERBS = {
    "generate": Verb("generate", "Make videos or images from prompts."),
    "finish": Verb("finish", "Go on from saved latents: the steps that are left, then decode."),
    "upscale": Verb("upscale", "Restore and upscale a video or an image with SeedVR2."),
    "serve": Verb("serve", "Serve a model over HTTP: OpenAI's images and videos."),
    "batch": Verb("batch", "Make the rows of a file: a result per row, a manifest, resume."),
    "explain": Verb("explain", "Show what a generation would run and cost; no weight is read."),
    "compare": Verb("compare", "Compare settings: the same prompts, seeds and sizes under each, beside the first."),
    "tune": Verb(
        "tune", "Find the fastest setting within a quality budget: attention, sparsity, steps, caches, 8 bits, decoder."
    ),
    "backends": Verb("backends", "List what each attention backend can do here, or why not and what to type."),
    "doctor": Verb("doctor", "Check this machine: torch, driver, packages, disk, model, backends."),
    "calibrate": Verb(
        "calibrate",
        "Measure how a model changes from step to step, for --step-cache magcache and teacache, and the spectrum of "
        "its latents, for --progressive-resolution.",
    ),
    "completion": Verb(
        "completion", "Print a script that completes commands, flags, backends, models, presets and roles in a shell."
    ),
    "info": Verb("info_command", "Show what a file is: how it was made, or which model a LoRA or weights are for."),
    "verify": Verb("verify", "Verify a file: make it again from the recipe that it holds, and compare."),
    "bench": Verb(
        "bench", "Measure how fast this machine is.", (("step", "bench_step"), ("generate", "bench_generate"))
    ),
    "workflow": Verb("workflow", "About workflow files of ComfyUI; generate --workflow FILE runs one."),
    "config": Verb("config_command", "About the YAML files of --config."),
    "models": Verb(
        "models",
        "List the models that run on this project's own transformers, and what each needs.",
        (("download", "models_download"), ("convert", "models_convert")),
    ),
}


def program(named: str | None = None) -> typer.Typer:
    """The whole command. named: the one verb that will be run, if any is; the others are then their summaries alone.
    None: all of them with their flags."""
    app = typer.Typer(
        name="diffusion-runtime",
        help="Video and image generation in which attention is chosen, never guessed.",
        epilog='Start with: diffusion-runtime generate "a fox running left in the snow"',
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_about)
    for name, verb in VERBS.items():
        if named is None or name == named:
            _add(app, name, verb)
        else:
            app.command(name, help=verb.summary)(_not_imported)
    return app


def _add(app: typer.Typer, name: str, verb: Verb) -> None:
    module = _module(verb.module)
    found = getattr(module, name)
    if not isinstance(found, typer.Typer):
        app.command(name, cls=CheckedCommand, epilog=module.EPILOG)(found)
        return
    registered = {each.name for each in found.registered_commands}
    for subname, submodule in verb.subcommands:
        if subname in registered:
            continue
        part = _module(submodule)
        found.command(subname, cls=CheckedCommand, epilog=part.EPILOG)(getattr(part, subname))
    app.add_typer(found, name=name)


def _module(name: str) -> Any:
    return importlib.import_module(f"diffusion_runtime.cli.{name}")


def _not_imported() -> None:
    """Stand for a verb that is not the one that was named, and cannot run."""
    raise AssertionError("a verb ran that the command line does not name")


def _print_version(wanted: bool) -> None:
    if wanted:
        package = importlib.import_module("diffusion_runtime")
        put_on_stdout(f"diffusion-runtime {package.__version__}")
        raise typer.Exit


def _about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Video and image generation in which attention is chosen, never guessed."""
