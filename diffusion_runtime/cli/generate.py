"""`generate`: the verb's signature, and its parsed flags as the values that generation.py takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.attention_flags import AttentionFlags, PhaseFlags
from diffusion_runtime.errors import RequestError
from diffusion_runtime.request.fields import SIZE, WHAT, ImageFile
from diffusion_runtime.request.frame_conditions import FrameConditions
from diffusion_runtime.request.generation_request import INPUT_FIELDS, REQUEST_FIELDS, too_many_images

if TYPE_CHECKING:
    from diffusion_runtime.cli.settings import Flags
    from diffusion_runtime.session.coordinator import Coordinator

EPILOG = """[bold]One value of the attention config as a flag[/]

--attention-config.default.backend NAME

--attention-config.per_role.ROLE.backend NAME

--attention-config.per_role.ROLE.extra.KEY VALUE

[bold]Examples[/]

diffusion-runtime generate "a red circle moving left"

diffusion-runtime generate "a blue star" --num-frames 1 --seed 1-4 -o stars/

diffusion-runtime generate --config mine.yaml --prompt-file prompts.txt

diffusion-runtime generate --from outputs/star.mp4 --seed 8 --format gif

diffusion-runtime generate "a ring" --attention-backend torch_sdpa --dry-run
"""


# given: every flag of `_signature` below, by name.
def flags_of(given: Mapping[str, Any]) -> Flags:
    """What the flags ask for: requests, the model, attention."""
    from diffusion_runtime.cli.lora_flags import pair_loras
    from diffusion_runtime.cli.prompt_file import collect_prompts
    from diffusion_runtime.cli.settings import Flags

    what = _taken(options.PromptFlags, given)
    source = _taken(options.SourceFlags, given)
    run = _taken(options.RunFlags, given)
    # What is left are request fields: `prompt`, `negative_prompt` and `seed` are lists, one request each.
    # A flag that may be given again is an empty list where it is not given.
    request = {name: None if value == [] else value for name, value in given.items() if name in REQUEST_FIELDS}
    request.update({name: _images(name, request[name] or ()) for name in INPUT_FIELDS})
    prompt = request.pop("prompt") or ()
    return Flags(
        prompts=collect_prompts(what.prompts or (), prompt, what.prompt_file, run.attention_entry or ()),
        negative_prompts=request.pop("negative_prompt") or (),
        seeds=request.pop("seed") or (),
        request=request,
        runtime={
            "model_path": source.model_path,
            "revision": source.revision,
            "offline": source.offline,
            "backend": run.backend,
            "device": run.device,
            "dtype": run.dtype,
            "self_check": run.self_check,
            "transformer_path": run.transformer_path,
            "transformer_2_path": run.transformer_2_path,
            "controlnet_path": run.controlnet_path,
            "vae_path": run.vae_path,
            "audio_vae_path": run.audio_vae_path,
            "vocoder_path": run.vocoder_path,
            "text_encoder_path": run.text_encoder_path,
            "text_encoder_2_path": run.text_encoder_2_path,
            "variant": run.variant,
            "upsampler_path": run.upsampler_path,
            "vae_decode": run.vae_decode,
            "vae_tiling": run.vae_tiling,
            "vae_decoder": run.vae_decoder,
            "quantization": run.quantization,
            "quantization_ignored_layers": run.quantization_ignored_layers or None,
            "compile": run.compile,
            "cuda_graphs": run.cuda_graphs,
            "offload": run.offload,
            "memory_limit": run.memory_limit,
            "lora": pair_loras(source.lora_path or (), source.lora_scale or (), source.lora or ()),
        },
        parallel={
            "num_gpus": run.num_gpus,
            "ulysses_degree": run.ulysses_degree,
            "ring_degree": run.ring_degree,
            "cfg_parallel": run.cfg_parallel,
            "tensor_parallel_size": run.tensor_parallel_size,
        },
        attention=AttentionFlags(
            run.attention_backend,
            run.attention_backend_config,
            run.attention_config,
            tuple(run.attention_entry or ()),
            PhaseFlags(run.prefill_attention_backend, run.prefill_attention_backend_config),
            PhaseFlags(run.decode_attention_backend, run.decode_attention_backend_config),
        ),
        config=source.config,
        settings=source.set_values or (),
        repeat=source.from_file,
        preset=source.preset,
    )


def generate(context: typer.Context, **given: Any) -> None:
    """Make videos or images from prompts.

    Without flags: the embedded model, its own size and steps, into outputs/.
    Each file carries its recipe; a .json beside it records what ran.
    Flags come before --config, then --from, then --preset, then the model.
    """
    from diffusion_runtime.cli.generation import SCHEMA, run_generate
    from diffusion_runtime.cli.launching import CommandLine, piped_prompts, report_failure
    from diffusion_runtime.cli.output_flags import OutputFlags
    from diffusion_runtime.cli.terminal import Terminal
    from diffusion_runtime.parallel.process_info import read_process_info
    from diffusion_runtime.session.rank_runner import RankRunner

    what, run = _taken(options.PromptFlags, given), _taken(options.RunFlags, given)
    flags = flags_of(given)
    terminal = Terminal(quiet=run.quiet, verbose=run.verbose, log_format=run.log_format)
    output_flags = OutputFlags(
        run.output_path,
        run.file_format,
        run.as_json,
        run.dry_run,
        run.resume,
        run.profile,
        run.stream,
        run.interactive,
        run.attention_plot,
        run.plan_for,
    )
    num_typed = len(what.prompts or ()) + len(given["prompt"] or ())
    command_line = CommandLine(context.obj, piped_prompts(what.prompt_file, flags.prompts, num_typed))
    process_info = read_process_info()
    if process_info is not None and run.dry_run:
        # Nothing is run, so no other rank is needed: rank 0 shows the plan.
        flags = replace(flags, parallel={**flags.parallel, "num_gpus": run.num_gpus or process_info.world_size})
        if not process_info.is_first:
            raise typer.Exit
    elif process_info is not None:
        # The failing rank is reported by the rank that detects it; everything else by rank 0.
        rank_terminal = terminal if process_info.is_first else Terminal(quiet=True, silent=True)

        def work(coordinator: Coordinator) -> int:
            with rank_terminal.log():
                return run_generate(flags, output_flags, rank_terminal, command_line, coordinator)

        schema = SCHEMA if run.as_json else None
        RankRunner(process_info, lambda failure: report_failure(terminal, failure, schema), verbose=run.verbose).run(
            work
        )
    with terminal.log():
        code = run_generate(flags, output_flags, terminal, command_line)
    raise typer.Exit(code)


_Flags = TypeVar("_Flags", options.PromptFlags, options.SourceFlags, options.RunFlags)


def _taken(flags: type[_Flags], given: Mapping[str, Any]) -> _Flags:
    """Those of the given values that one class of flags holds."""
    return flags(**{item.name: given[item.name] for item in fields(flags)})


def _images(name: str, paths: Sequence[str]) -> str | tuple[str, ...] | None:
    """The path of an image, or those of several; None without one. Raises RequestError for several of a field that
    names one; how many a model takes, its rules say."""
    check = REQUEST_FIELDS[name].check
    if isinstance(check, FrameConditions):
        # Texts of their own form, which the request reads.
        return tuple(paths) or None
    if len(paths) > 1 and not (isinstance(check, ImageFile) and check.several):
        raise RequestError(too_many_images(name, paths, 1))
    return tuple(paths) if len(paths) > 1 else next(iter(paths), None)


def _signature() -> inspect.Signature:
    """Every flag, in the order of the help."""
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    prompts, prompt_file = options.parameters_of(options.PromptFlags)
    prompt, *others = options.request_parameters(WHAT)
    return inspect.Signature(
        [
            context,
            prompts,
            prompt,
            prompt_file,
            *others,
            *options.parameters_of(options.SourceFlags),
            *options.request_parameters(SIZE),
            *options.parameters_of(options.RunFlags),
        ]
    )


# The parser reads the flags off the signature and the annotations.
generate.__signature__ = _signature()  # type: ignore[attr-defined]
generate.__annotations__ = {item.name: item.annotation for item in _signature().parameters.values()}
