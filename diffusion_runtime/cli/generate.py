"""`generate`: its flags, as the parser sees them, into the values that generation.py takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.attention_flags import AttentionFlags

if TYPE_CHECKING:
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


# The parser reads the flags off this signature: its length is the number of flags there are.
def generate(
    context: typer.Context,
    prompts: options.Prompts = None,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    negative_prompt: options.NegativePrompt = None,
    image_path: options.ImagePath = None,
    seed: options.Seed = None,
    model_path: options.ModelPath = None,
    lora_path: options.LoraPath = None,
    lora_scale: options.LoraScale = None,
    from_file: options.FromFile = None,
    config: options.ConfigPath = None,
    set_values: options.SetValues = None,
    preset: options.Preset = None,
    height: options.Height = None,
    width: options.Width = None,
    num_frames: options.NumFrames = None,
    fps: options.Fps = None,
    num_inference_steps: options.NumInferenceSteps = None,
    guidance_scale: options.GuidanceScale = None,
    true_cfg_scale: options.TrueCfgScale = None,
    guidance_scale_2: options.GuidanceScale2 = None,
    flow_shift: options.FlowShift = None,
    sampler: options.Sampler = None,
    guidance_mode: options.GuidanceMode = None,
    attention_backend: options.AttentionBackend = None,
    attention_backend_config: options.AttentionBackendConfig = None,
    attention_config: options.AttentionConfigText = None,
    attention_entry: options.AttentionEntries = None,
    self_check: options.SelfCheck = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    backend: options.RuntimeBackend = None,
    num_gpus: options.NumGpus = None,
    ulysses_degree: options.UlyssesDegree = None,
    ring_degree: options.RingDegree = None,
    cfg_parallel: options.CfgParallel = None,
    output_path: options.OutputPath = None,
    file_format: options.Format = None,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    resume: options.Resume = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Make videos or images from prompts.

    Without flags: the embedded model, its own size and steps, into outputs/.
    Each file carries its recipe, and has a .json beside it that says what ran.
    Flags come before --config, then --from, then --preset, then the model.
    """
    from diffusion_runtime.cli.generation import SCHEMA, OutputFlags, run_generate
    from diffusion_runtime.cli.launching import CommandLine, piped_prompts, report_failure
    from diffusion_runtime.cli.lora_flags import pair_loras
    from diffusion_runtime.cli.prompts import collect_prompts
    from diffusion_runtime.cli.settings import Flags
    from diffusion_runtime.cli.terminal import Terminal
    from diffusion_runtime.parallel.process_info import read_process_info
    from diffusion_runtime.session.failures import Interrupted
    from diffusion_runtime.session.rank_runner import RankRunner

    request: dict[str, Any] = {
        "height": height,
        "width": width,
        "num_frames": num_frames,
        "fps": fps,
        "num_inference_steps": num_inference_steps,
        "guidance_scale": guidance_scale,
        "true_cfg_scale": true_cfg_scale,
        "guidance_scale_2": guidance_scale_2,
        "flow_shift": flow_shift,
        "sampler": sampler,
        "guidance_mode": guidance_mode,
        "image_path": image_path,
    }
    flags = Flags(
        prompts=collect_prompts(prompts or (), prompt or (), prompt_file, attention_entry or ()),
        negative_prompts=negative_prompt or (),
        seeds=seed or (),
        request=request,
        runtime={
            "model_path": model_path,
            "backend": backend,
            "device": device,
            "dtype": dtype,
            "self_check": self_check,
            "lora": pair_loras(lora_path or (), lora_scale or ()),
        },
        parallel={
            "num_gpus": num_gpus,
            "ulysses_degree": ulysses_degree,
            "ring_degree": ring_degree,
            "cfg_parallel": cfg_parallel,
        },
        attention=AttentionFlags(
            attention_backend, attention_backend_config, attention_config, tuple(attention_entry or ())
        ),
        config=config,
        settings=set_values or (),
        repeat=from_file,
        preset=preset,
    )
    terminal = Terminal(quiet=quiet, verbose=verbose)
    output_flags = OutputFlags(output_path, file_format, as_json, dry_run, resume)
    num_typed = len(prompts or ()) + len(prompt or ())
    command_line = CommandLine(context.obj, piped_prompts(prompt_file, flags.prompts, num_typed))
    place = read_process_info()
    if place is not None and dry_run:
        # Nothing is run, so nobody needs the others; one of them says what would be.
        flags = replace(flags, parallel={**flags.parallel, "num_gpus": num_gpus or place.world_size})
        if not place.is_first:
            raise typer.Exit
    elif place is not None:
        # The failing rank is reported by the rank that detects it; everything else by rank 0.
        rank_terminal = terminal if place.is_first else Terminal(quiet=True, silent=True)

        def work(coordinator: Coordinator) -> int:
            with rank_terminal.log():
                return run_generate(flags, output_flags, rank_terminal, command_line, coordinator)

        schema = SCHEMA if as_json else None
        RankRunner(place, lambda failure: report_failure(terminal, failure, schema), verbose=verbose).run(work)
    try:
        with terminal.log():
            code = run_generate(flags, output_flags, terminal, command_line)
    except KeyboardInterrupt as error:
        raise Interrupted from error
    raise typer.Exit(code)
