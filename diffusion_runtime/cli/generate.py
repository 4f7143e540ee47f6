"""`generate`: the verb's signature, and its parsed flags as the values that generation.py takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.attention_flags import AttentionFlags, PhaseFlags
from diffusion_runtime.cli.flag_syntax import WEIGHT_SUFFIXES, is_workflow_path
from diffusion_runtime.config import ParallelConfig, RuntimeConfig
from diffusion_runtime.core.runtime_options import WHAT
from diffusion_runtime.errors import ConfigError, RequestError, shown
from diffusion_runtime.request.fields import SIZE, ImageFile, MediaFiles
from diffusion_runtime.request.frame_conditions import FrameConditions
from diffusion_runtime.request.generation_request import INPUT_FIELDS, REQUEST_FIELDS, too_many_images

if TYPE_CHECKING:
    from diffusion_runtime.cli.launching import CommandLine
    from diffusion_runtime.cli.settings import Flags
    from diffusion_runtime.session.coordinator import Coordinator

EPILOG = """[bold]One value of the attention config as a flag[/]

--attention-config.default.backend NAME

--attention-config.per_role.ROLE.backend NAME

--attention-config.per_role.ROLE.extra.KEY VALUE

[bold]Examples[/]

diffusion-runtime generate "a fox running left in the snow"

diffusion-runtime generate "a whale" --num-frames 1 --seed 1-4 -o stars/

diffusion-runtime generate --config mine.yaml --prompt-file prompts.txt

diffusion-runtime generate --from outputs/star.mp4 --seed 8 --format gif

diffusion-runtime generate "a star" --attention-backend torch_sdpa --dry-run

diffusion-runtime generate "a cat" ComfyUI/models/diffusion_models/FILE.safetensors

diffusion-runtime generate --workflow FILE.json --models-dir ComfyUI/models
"""


# given: every flag of `generate`, by name.
def flags_of(given: Mapping[str, Any]) -> Flags:
    """Return what the flags ask for: requests, the model, attention."""
    from diffusion_runtime.cli.lora_flags import pair_loras
    from diffusion_runtime.cli.prompt_file import collect_prompts
    from diffusion_runtime.cli.settings import Flags

    what = options.taken(options.PromptFlags, given)
    source = options.taken(options.SourceFlags, given)
    attention = options.taken(options.AttentionChoice, given)
    # What is left are request fields: `prompt`, `negative_prompt` and `seed` are lists, one request each.
    # A flag that may be given again is an empty list where it is not given.
    request = {name: None if value == [] else value for name, value in given.items() if name in REQUEST_FIELDS}
    request.update({name: _images(name, request[name] or ()) for name in INPUT_FIELDS})
    prompt = request.pop("prompt") or ()
    typed, runtime = what.prompts or (), options.given_options(RuntimeConfig, given)
    prompts = [each for each in typed if not each.endswith(WEIGHT_SUFFIXES)]
    if files := [each for each in typed if each.endswith(WEIGHT_SUFFIXES)]:
        if len(files) > 1 or runtime["model_path"] is not None:
            several = ", ".join(shown(each) for each in (*files, runtime["model_path"]) if each is not None)
            raise ConfigError(f"model_path: expected one model, got {several}")
        runtime["model_path"] = files[0]
    workflow_file = None
    if runtime["workflow"] is not None and is_workflow_path(runtime["workflow"]):
        workflow_file, runtime["workflow"] = runtime["workflow"], None
    loras = pair_loras(source.lora_path or (), source.lora_scale or (), source.lora or ())
    return Flags(
        prompts=collect_prompts(prompts, prompt, what.prompt_file, attention.attention_entry or ()),
        negative_prompts=request.pop("negative_prompt") or (),
        seeds=request.pop("seed") or (),
        request=request,
        runtime={**runtime, "lora": loras},
        parallel=options.given_options(ParallelConfig, given),
        attention=AttentionFlags(
            attention.attention_backend,
            attention.attention_backend_config,
            attention.attention_config,
            tuple(attention.attention_entry or ()),
            PhaseFlags(attention.prefill_attention_backend, attention.prefill_attention_backend_config),
            PhaseFlags(attention.decode_attention_backend, attention.decode_attention_backend_config),
        ),
        config=source.config,
        settings=source.set_values or (),
        repeat=source.from_file,
        preset=source.preset,
        allow_url=source.allow_url or (),
        workflow_file=workflow_file,
    )


def generate(context: typer.Context, **given: Any) -> None:
    """Make videos or images from prompts.

    Without flags: the embedded model, its own size and steps, into outputs/.
    Each file carries its recipe; a .json beside it records what ran.
    Flags come before --config, then --from, then --preset, then the model.
    """
    from diffusion_runtime.cli.launching import CommandLine, piped_prompts

    what, flags = options.taken(options.PromptFlags, given), flags_of(given)
    num_typed = len(what.prompts or ()) + len(given["prompt"] or ())
    run_flags(flags, given, CommandLine(context.obj, piped_prompts(what.prompt_file, flags.prompts, num_typed)))


def run_flags(flags: Flags, given: Mapping[str, Any], command_line: CommandLine) -> None:
    """Make what the flags ask for, in this process, as one of several, or as what starts them. given: the flags of
    output and report by name. Raises typer.Exit with the exit code."""
    from diffusion_runtime.cli.generation import SCHEMA, run_generate
    from diffusion_runtime.cli.launching import report_failure
    from diffusion_runtime.cli.terminal import Terminal
    from diffusion_runtime.parallel.process_info import read_process_info
    from diffusion_runtime.session.rank_runner import RankRunner

    report, output_flags = options.taken(options.ReportFlags, given), options.taken(options.OutputFlags, given)
    terminal = Terminal(quiet=report.quiet, verbose=report.verbose, log_format=report.log_format)
    process_info = read_process_info()
    if process_info is not None and output_flags.dry_run:
        # Nothing is run, so no other rank is needed: rank 0 shows the plan.
        num_gpus = flags.parallel["num_gpus"] or process_info.world_size
        flags = replace(flags, parallel={**flags.parallel, "num_gpus": num_gpus})
        if not process_info.is_first:
            raise typer.Exit
    elif process_info is not None:
        # The failing rank is reported by the rank that detects it; everything else by rank 0.
        rank_terminal = terminal if process_info.is_first else Terminal(quiet=True, silent=True)

        def work(coordinator: Coordinator) -> int:
            with rank_terminal.log():
                return run_generate(flags, output_flags, rank_terminal, command_line, coordinator)

        schema = SCHEMA if output_flags.as_json else None
        RankRunner(process_info, lambda failure: report_failure(terminal, failure, schema), verbose=report.verbose).run(
            work
        )
    with terminal.log():
        code = run_generate(flags, output_flags, terminal, command_line)
    raise typer.Exit(code)


def as_of_generate(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every flag of `generate` for a verb that has some of them, the others as not given."""
    names = inspect.signature(generate).parameters
    return {
        name: given.get(name, parameter.default)
        for name, parameter in names.items()
        if name not in ("context", "prompt")
    }


def _images(name: str, paths: Sequence[str]) -> str | tuple[str, ...] | None:
    """Return the path of an image, or those of several; None without one. How many a model takes, its rules say.

    Raises RequestError for several of a field that names one.
    """
    check = REQUEST_FIELDS[name].check
    if isinstance(check, FrameConditions | MediaFiles):
        # Texts of their own form, or paths in an order that counts.
        return tuple(paths) or None
    if len(paths) > 1 and not (isinstance(check, ImageFile) and check.several):
        raise RequestError(too_many_images(name, paths, 1))
    return tuple(paths) if len(paths) > 1 else next(iter(paths), None)


def _parameters() -> list[inspect.Parameter]:
    """Return every flag, in the order of the help."""
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    prompts, prompt_file = options.parameters_of(options.PromptFlags)
    prompt, *others = options.request_parameters(WHAT)
    return [
        context,
        prompts,
        prompt,
        prompt_file,
        *others,
        *options.source_parameters(),
        *options.request_parameters(SIZE),
        *options.run_parameters(),
    ]


options.set_parameters(generate, _parameters())
