"""`compare`: one prompt set and the same seeds under several settings, each beside the first."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.compare_settings import parse_settings
from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.generate import flags_of
from diffusion_runtime.cli.generate import generate as generate_verb
from diffusion_runtime.cli.prompt_set import requests_of_set, without_prompts
from diffusion_runtime.cli.tables import figures_table
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.session.failures import Interrupted

if TYPE_CHECKING:
    from diffusion_runtime.comparison.compare import CheckRequest, SaveClip
    from diffusion_runtime.comparison.result import Comparison, Row
    from diffusion_runtime.media import GeneratedMedia
    from diffusion_runtime.request.generation_request import GenerationRequest

EPILOG = """[bold]Examples[/]

diffusion-runtime compare "a fox" --setting "dense:" --setting "6 steps: --num-inference-steps 6"

diffusion-runtime compare --prompt-file prompts.txt --setting a.yaml --setting b.yaml --html page.html

diffusion-runtime compare "a star" --seed 1-4 --setting "dense:" --setting "cache: --step-cache easycache" --json
"""
_COMPARE = "What to compare"


def compare(context: typer.Context, **given: Any) -> None:
    """Compare settings: the same prompts, seeds and sizes under each, beside the first.

    Latents by step, PSNR, SSIM, LPIPS, time by stage, memory; and the first setting with
    fewer steps at the same time. Flags as in generate are shared by all settings.
    """
    del context
    html, threshold, warm_up = (given.pop(name) for name in ("html", "threshold", "warm_up"))
    attention_time = not given.pop("no_attn_time")
    prompt_set, clip_path = (given.pop(name) for name in ("prompt_set", "clip_path"))
    texts, folder, file_format = (given.pop(name) for name in ("setting", "output_path", "file_format"))
    as_json = given["as_json"]
    terminal = Terminal(quiet=given["quiet"], verbose=given["verbose"], log_format=given["log_format"])
    if not threshold > 0:
        raise ConfigError(f"--threshold: expected a number above 0, got {threshold:g}")
    missing = dict.fromkeys(options.OUTPUT_FLAGS)
    shared = without_prompts(flags_of({**missing, **given}), prompt_set)
    # Folders that are made for results and stay empty are removed.
    with terminal.log(), ExitStack() as folders:
        # Before torch is imported: wrong flags are said at once.
        parsed = parse_settings(texts or (), shared, inspect.signature(generate_verb))
        for note in dict.fromkeys(note for _, settings in parsed for note in settings.notes):
            terminal.warn(note)
        page = _checked_page(html, folders)
        from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator

        tune_cpu_allocator()
        from diffusion_runtime.comparison.compare import Choices
        from diffusion_runtime.comparison.compare import compare as compare_settings
        from diffusion_runtime.comparison.setting import Setting

        settings = []
        for name, each in parsed:
            # A preset of the file is in the requests; any other is the model's, which says so where it is not.
            preset = None if each.preset in each.file_presets else each.preset
            requests = requests_of_set(each.requests, prompt_set, each.runtime.model_path)
            settings.append(Setting(name, each.runtime, requests, preset))
        check, save = _saver(folder, file_format, folders)
        choices = Choices(threshold, warm_up, attention_time, clip_path, page is not None, check)
        made: dict[str, int] = {}

        def count(name: str, request: GenerationRequest, media: GeneratedMedia) -> str | None:
            path = save(name, request, media)
            made[name] = made.get(name, 0) + 1
            return path

        try:
            result = compare_settings(settings, terminal, choices, count)
        except KeyboardInterrupt as error:
            raise Interrupted(_finished(made, len(settings[0].requests), folder)) from error
        if not as_json:
            # Before the page, which may fail for a full disk.
            show(result)
        if page is not None:
            from diffusion_runtime.comparison.page import write_page

            write_page(result, page)
            terminal.say(f"wrote {page} ({page.stat().st_size / 1e6:.1f} MB)")
    if as_json:
        put_on_stdout(json_text(result.to_dict()))
    raise typer.Exit(result.exit_code)


def _finished(made: Mapping[str, int], num_clips: int, folder: str | None) -> str:
    """Say what an interrupted comparison has left, and how to go on. made: clips by setting."""
    if not made:
        return "nothing was finished"
    counts = ", ".join(f"{name} {count} of {num_clips}" for name, count in made.items())
    where = f"saved in {folder}" if folder is not None else "not saved, as --output-path FOLDER was not given"
    return (
        f"clips that are made: {counts} ({where}); no figures and no page are written. The same command begins "
        "anew, as times of different runs are not compared"
    )


def show(result: Comparison) -> None:
    """Two tables of at most 100 columns, and what the figures are of."""
    from rich.text import Text

    from diffusion_runtime.comparison.result import filled_columns
    from diffusion_runtime.core.memory_size import size_text

    console = console_on_stdout()
    quality: list[tuple[str, ...]] = []
    cost: list[tuple[str, ...]] = []
    for row in result.rows:
        name = _indented(row)
        share = row.computed_share
        steps = "-" if row.num_steps is None else str(row.num_steps)
        if share is not None and share < 1:
            steps += f" x {share:.2f}"
        first = row.first_step_text(result.threshold)
        figures = [_figure(row.metric(key), digits) for key, digits in (("psnr_db", 1), ("ssim", 3), ("lpips", 3))]
        speedup = result.speedup(row)
        faster = "-" if speedup is None else f"{speedup:.2f}x"
        quality.append((name, steps, _figure(row.final_latent_l2, 3), first, *figures, faster))
        times = [_figure(row.seconds.get(stage), 2) for stage in ("text", "denoise", "decode")]
        peak = row.peak_memory.get("device", row.peak_memory.get("machine"))
        memory = "-" if peak is None else size_text(peak)
        times += [_figure(row.seconds_per_step, 3), _figure(row.total_seconds, 2)]
        times += [_figure(row.attention_seconds, 2), _figure(row.density, 2)]
        cost.append((name, *times, memory))
    num_clips = _counted(len(result.reference.clips), "clip")
    console.print(Text(f"{num_clips} each, beside {result.reference.name}", style="bold"))
    over_name = f"first step\nover {result.threshold:g}"
    columns: Sequence[str] = ("setting", "steps", "latent L2", over_name, "PSNR, dB", "SSIM", "LPIPS", "speed")
    console.print(figures_table(*filled_columns(columns, quality)), soft_wrap=True)
    console.print()
    columns = (
        "seconds of one clip",
        "text",
        "denoise",
        "decode",
        "per step",
        "total",
        "attention",
        "density",
        "memory",
    )
    console.print(figures_table(*filled_columns(columns, cost)), soft_wrap=True)
    console.print()
    for names, rows in _prompt_tables(result):
        console.print(figures_table(names, rows), soft_wrap=True)
        console.print()
    if any(len(row.timed_seconds) == 1 and row is not result.reference for row in result.rows):
        console.print(Text("Speed: from one timed clip of each setting, without a spread; give more prompts or seeds."))
    for row in result.rows:
        if row.state != "measured":
            console.print(Text(f"{row.name}: {row.state.replace('_', ' ')}: {row.reason}"))
    for name, reason in result.unavailable.items():
        console.print(Text(f"{name.upper()}: {reason}"))
    for remark in result.remarks:
        console.print(Text(remark))


def _prompt_tables(result: Comparison) -> Iterator[tuple[Sequence[str], list[tuple[str, ...]]]]:
    """Prompt accuracy by attribute, and CLIP score, where they were measured."""
    judged = [(row, row.accuracy) for row in result.rows]
    if result.reference.accuracy is not None:
        rows, num_prompts = [], result.reference.accuracy["joint"].total
        parts = [name for name in result.reference.accuracy if name != "joint"]
        for row, accuracy in judged:
            if accuracy is None:
                continue
            joint, paired = accuracy["joint"], result.paired_test(row)
            test = ("-", "-") if paired is None else (f"-{paired.only_first} +{paired.only_second}", f"{paired.p:.2f}")
            rates = [f"{accuracy[name].rate:.2f}" for name in parts]
            interval = f"{joint.low:.2f} to {joint.high:.2f}"
            rows.append((_indented(row), f"{joint.rate:.2f}", interval, *rates, *test))
        names = ("all", "95 %", *parts, "beside\nreference", "p")
        yield (f"right of\n{_counted(num_prompts, 'prompt')}", *names), rows
    if result.reference.clip_score is not None:
        rows = [(_indented(row), _figure(row.clip_score, 2)) for row in result.rows if row.clip_score is not None]
        yield ("", "CLIP score"), rows


def _indented(row: Row) -> str:
    return f"  in its time: {row.num_steps or 'fewer'} steps" if row.kind == "fewer_steps" else row.name


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _checked_page(path: Path | None, folders: ExitStack) -> Path | None:
    """Raises OutputError before minutes of work for a page that could not be written after them."""
    if path is None:
        return None
    from diffusion_runtime.session.outputs import prepare_result, remove_empty

    folders.callback(remove_empty, prepare_result(path, "--html"))
    return path


def _saver(folder: str | None, file_format: str | None, folders: ExitStack) -> tuple[CheckRequest, SaveClip]:
    """Saves each clip as FOLDER/SETTING/PROMPT-seedN.mp4 where a folder was given. Beside it what raises, for a
    resolved request, why its clip could not be saved."""
    from diffusion_runtime.session.outputs import Outputs, remove_empty, slug

    if folder is None:
        if file_format is not None:
            raise ConfigError("--format: clips are saved where --output-path FOLDER names a folder; add it")
        return lambda _: None, lambda *_: None
    outputs = Outputs.parse(folder and f"{folder.rstrip('/')}/", file_format)
    folders.callback(remove_empty, outputs.prepare())

    def save(name: str, request: GenerationRequest, media: GeneratedMedia) -> str:
        own = Outputs(outputs.folder / slug(name), None, outputs.file_format)
        return str(media.save(own.target(request), overwrite=False))

    return outputs.format_for, save


def prompt_set_option(panel: str) -> Any:
    """--prompt-set, for a panel of the help."""
    text = "Seeded prompts with known attributes: emoji:64, or emoji:64:7 for others; of the model's own world."
    return Annotated[str | None, _option(text, "--prompt-set", "WORLD:COUNT", panel)]


def clip_path_option(panel: str) -> Any:
    """--clip-path, for a panel of the help."""
    return Annotated[
        str | None, _option("A folder of a CLIP model, for the CLIP score.", "--clip-path", "FOLDER", panel)
    ]


def _option(text: str, name: str, metavar: str, panel: str = _COMPARE) -> Any:
    return typer.Option(name, help=text, metavar=metavar, rich_help_panel=panel, show_default=False)


def _parameters() -> list[inspect.Parameter]:
    """--setting and its like, then the flags of `generate` without those of one file."""

    def parameter(name: str, default: object, annotation: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    kept = [
        each for name, each in inspect.signature(generate_verb).parameters.items() if name not in options.OUTPUT_FLAGS
    ]
    context, prompts, *others = kept
    own = [
        parameter(
            "setting",
            None,
            Annotated[
                list[str] | None,
                typer.Option(
                    "--setting",
                    help="A name and flags of generate, or a config file; again for each. The first is the reference.",
                    metavar="NAME: FLAGS|FILE.yaml",
                    rich_help_panel=_COMPARE,
                    show_default=False,
                ),
            ],
        ),
        parameter(
            "threshold",
            0.1,
            Annotated[
                float, _option("Name the first step whose latents differ by more. Default: 0.1.", "--threshold", "X")
            ],
        ),
        parameter(
            "warm_up",
            None,
            Annotated[
                bool | None,
                typer.Option(
                    "--warm-up/--no-warm-up",
                    help="Make the first clip twice and time the second. Default: where there is one clip; of several, "
                    "the first is not timed.",
                    rich_help_panel=_COMPARE,
                    show_default=False,
                ),
            ],
        ),
        parameter(
            "no_attn_time",
            False,
            Annotated[
                bool,
                typer.Option(
                    "--no-attn-time",
                    help="Leave out the further clip of each setting that times attention.",
                    rich_help_panel=_COMPARE,
                    show_default=False,
                ),
            ],
        ),
        parameter("prompt_set", None, prompt_set_option(_COMPARE)),
        parameter("clip_path", None, clip_path_option(_COMPARE)),
    ]
    output = [
        parameter("html", None, options.html_option("Write a page too.")),
        parameter(
            "output_path",
            None,
            Annotated[
                str | None,
                typer.Option(
                    "--output-path",
                    "-o",
                    help="Save the clips: FOLDER/SETTING/.",
                    metavar="FOLDER",
                    rich_help_panel=options.OUTPUT,
                ),
            ],
        ),
        parameter("file_format", None, options.Format),
    ]
    return [context, prompts, *own, *others, *output]


options.set_parameters(compare, _parameters())
