"""`tune`: the fastest setting within a quality budget, or the sparsest one, as a config file for `generate`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.compare import clip_path_option, prompt_set_option
from diffusion_runtime.cli.config_file import schema_comment
from diffusion_runtime.cli.generate import flags_of
from diffusion_runtime.cli.generate import generate as generate_verb
from diffusion_runtime.cli.prompt_set import requests_of_set, without_prompts
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout, put_path_on_stdout
from diffusion_runtime.cli.tune_tables import show
from diffusion_runtime.errors import ConfigError, OutputError, RequestError

if TYPE_CHECKING:
    from diffusion_runtime.tuning.fastest_result import FastestResult
    from diffusion_runtime.tuning.plan import Tuning
    from diffusion_runtime.tuning.result import TuneResult

EPILOG = """[bold]Examples[/]

diffusion-runtime tune --prompt-set emoji:24 --budget "accuracy>=dense-0.02" --minutes 10 -o fast.yaml

diffusion-runtime tune --prompt-file prompts.txt --budget "psnr>=30" --over steps,step-cache,quantization -o b.yaml

diffusion-runtime tune --prompt-set emoji:24 --budget "latent<=0.2" --methods video_sparse_attn -o vsa.yaml

diffusion-runtime generate "a fox running left in the snow" --config fast.yaml

[bold]Exit code[/]

6 where no setting meets the budget: the file holds the nearest.
"""
_TUNE = "What to tune"
_RANGES = ("layer_ranges", "step_ranges", "head_ranges", "levels")
_OWN = ("budget", "over", "minutes", "methods", "prompt_set", "measure_prompts", *_RANGES, "clip_path")
_MAX_RANGES = 64
_MINUTES, _MAX_MINUTES = 20.0, 7 * 24 * 60.0


def tune(context: typer.Context, **given: Any) -> None:
    """Find the fastest setting within a quality budget: attention, sparsity, steps, caches, 8 bits, decoder.

    Some prompts measure, the others verify. The YAML is for generate --config.

    With --methods and no --over: the sparsest attention, by layer and step.
    """
    del context
    own = {name: given.pop(name) for name in _OWN}
    output_path = given.pop("output_path")
    as_json = given["as_json"]
    terminal = Terminal(quiet=given["quiet"], verbose=given["verbose"], log_format=given["log_format"])
    missing = dict.fromkeys(options.OUTPUT_FLAGS)
    flags = without_prompts(flags_of({**missing, **given}), own["prompt_set"])
    # A folder that is made for the file and stays empty is removed.
    from diffusion_runtime.session.failures import Interrupted

    with terminal.log(), _each_warning_once(), ExitStack() as folders:
        target = _checked_target(output_path, folders)
        tuning = _tuning(flags, own, terminal)
        from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator

        tune_cpu_allocator()
        from diffusion_runtime.tuning.journal import Journal
        from diffusion_runtime.tuning.tune import tune as run_tuning

        journal = Journal.beside(target)
        result: TuneResult | FastestResult
        try:
            if _is_over_everything(own):
                result = _tuned_over_everything(tuning, own, terminal, journal)
            else:
                result = run_tuning(tuning, terminal, journal)
            result.write(target, schema_comment())
        except KeyboardInterrupt as error:
            raise Interrupted(Journal.kept_in(journal)) from error
        journal.unlink(missing_ok=True)
    if as_json:
        put_on_stdout(json_text({**result.to_dict(), "path": str(target)}))
    else:
        show(result, terminal)
        put_path_on_stdout(target)
    raise typer.Exit(result.exit_code)


def _is_over_everything(own: dict[str, Any]) -> bool:
    return not own["methods"] or bool(own["over"])


def _tuned_over_everything(tuning: Tuning, own: dict[str, Any], terminal: Terminal, journal: Path) -> FastestResult:
    from diffusion_runtime.tuning.axes import chosen_axes
    from diffusion_runtime.tuning.tune_fastest import tune_fastest

    minutes = _MINUTES if own["minutes"] is None else own["minutes"]
    return tune_fastest(tuning, chosen_axes(_names(own["over"])), minutes, terminal, journal)


def _names(texts: Sequence[str] | None) -> list[str]:
    return [name.strip() for text in texts or () for name in text.split(",") if name.strip()]


def _tuning(flags: Any, own: dict[str, Any], terminal: Terminal) -> Tuning:
    """Raises ConfigError and RequestError for values that are wrong, before torch is imported where it can."""
    from diffusion_runtime.cli.settings import resolve_settings
    from diffusion_runtime.tuning.budget import parse_budgets

    budgets = parse_budgets(own["budget"] or ())
    minutes = own["minutes"]
    if minutes is not None and not 0 < minutes <= _MAX_MINUTES:
        raise ConfigError(f"--minutes: expected a number above 0, up to {_MAX_MINUTES:g}, got {minutes:g}")
    if minutes is not None and not _is_over_everything(own):
        raise ConfigError(
            "--minutes: with --methods and no --over the sparsest attention is searched to its end; leave it out, or "
            "add --over sparse for the fastest"
        )
    methods = _names(own["methods"])
    for name in _RANGES:
        if not 1 <= own[name] <= _MAX_RANGES:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag}: expected a number from 1 to {_MAX_RANGES}, got {own[name]}")
    wants_clip = any(budget.metric == "clip" for budget in budgets)
    if wants_clip and own["clip_path"] is None:
        raise ConfigError("--budget: clip needs the model that scores: give --clip-path FOLDER")
    settings = resolve_settings(flags)
    for note in settings.notes:
        terminal.warn(note)
    requests = requests_of_set(settings.requests, own["prompt_set"], settings.runtime.model_path)
    if len(requests) < 2:
        raise RequestError(
            f"tune: expected two prompts or seeds or more, as some measure and the others verify, got {len(requests)}; "
            "e.g. --prompt-set emoji:24 or --prompt-file FILE"
        )
    num_measured = own["measure_prompts"] if own["measure_prompts"] is not None else len(requests) // 2
    if not 1 <= num_measured < len(requests):
        raise RequestError(
            f"--measure-prompts: expected 1 to {len(requests) - 1} of the {len(requests)} prompts and seeds, as the "
            f"others verify, got {num_measured}"
        )
    from diffusion_runtime.comparison.prompt_attributes import known_attributes
    from diffusion_runtime.tuning.axes import chosen_axes
    from diffusion_runtime.tuning.ladders import METHODS, method_names
    from diffusion_runtime.tuning.plan import Tuning

    chosen_axes(_names(own["over"]))
    attributes = known_attributes(settings.runtime.model_path, [request.prompt for request in requests])
    if any(budget.metric == "accuracy" for budget in budgets) and None in attributes:
        unknown = requests[attributes.index(None)].prompt
        raise RequestError(
            f"--budget: accuracy is known for prompts of an embedded model, in words that it was trained on; not for "
            f"{unknown[:80]!r} with {settings.runtime.model_path}; use another metric, or the prompts of a model with "
            "--model-path emoji --prompt-set emoji:24 (or shapes and shapes:24)"
        )
    return Tuning(
        runtime=settings.runtime,
        requests=requests,
        attributes=attributes,
        num_measured=num_measured,
        budgets=budgets,
        methods=method_names(methods or METHODS),
        preset=None if settings.preset in settings.file_presets else settings.preset,
        layer_ranges=own["layer_ranges"],
        step_ranges=own["step_ranges"],
        levels=own["levels"],
        head_ranges=own["head_ranges"],
        clip_path=own["clip_path"],
    )


def _checked_target(path: str | None, folders: ExitStack) -> Path:
    """Before an hour of work, not after it: raises ConfigError for a name that is no config file, OutputError for a
    file that could not be written."""
    if path is None:
        raise ConfigError("--output-path: expected the config file to write: -o tuned.yaml")
    from diffusion_runtime.session.outputs import prepare_result, remove_empty
    from diffusion_runtime.untrusted.files import check_place

    target = check_place(path, "--output-path")
    if target.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output-path {path}: expected a name that ends with .yaml")
    if target.exists():
        raise OutputError(f"{path} exists already; choose another --output-path, or move it")
    folders.callback(remove_empty, prepare_result(target, "--output-path"))
    return target


@contextmanager
def _each_warning_once() -> Iterator[None]:
    """Context manager: a method's remarks on its options are logged once, not for every clip."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        # As it is written: a remark that quotes another value says the same.
        text = str(record.msg)
        is_first = text not in seen
        seen.add(text)
        return is_first

    loggers = [logging.getLogger(name) for name in ("diffusion_runtime", "diffusion_runtime.attention")]
    for logger in loggers:
        logger.addFilter(is_new)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_new)


def _option(text: str, name: str, metavar: str, panel: str = _TUNE) -> Any:
    return typer.Option(name, help=text, metavar=metavar, rich_help_panel=panel, show_default=False)


def _parameters() -> list[inspect.Parameter]:
    """The flags of `generate`, without those of clips that are written, and tune's own."""

    def parameter(name: str, default: object, annotation: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    kept = [
        each for name, each in inspect.signature(generate_verb).parameters.items() if name not in options.OUTPUT_FLAGS
    ]
    context, prompts, *others = kept
    budget = "accuracy>=dense-0.02, psnr>=30, ssim>=0.9, lpips<=0.1, latent<=0.1, clip>=dense-1; again for several."
    methods = "video_sparse_attn, sliding_tile_attn, vmoba_attn; several share one schedule. Default: all."
    over = "attention, sparse, steps, step-cache, guidance, quantization, decoder, resolution. Default: all."
    ranges: Sequence[tuple[str, int, str]] = (
        ("layer_ranges", 3, "Ranges of layers that are measured. Default: 3."),
        ("step_ranges", 4, "Ranges of steps that are measured. Default: 4."),
        ("head_ranges", 1, "Ranges of heads with windows of their own (sliding_tile_attn). Default: 1, all heads."),
        ("levels", 4, "Densities of each method that are measured. Default: 4."),
    )
    own = [
        parameter("budget", None, Annotated[list[str] | None, _option(budget, "--budget", "METRIC>=X")]),
        parameter("over", None, Annotated[list[str] | None, _option(over, "--over", "AXES")]),
        parameter(
            "minutes",
            None,
            Annotated[float | None, _option("The most that it takes. Default: 20.", "--minutes", "N")],
        ),
        parameter("methods", None, Annotated[list[str] | None, _option(methods, "--methods", "NAMES")]),
        parameter("prompt_set", None, prompt_set_option(_TUNE)),
        parameter(
            "measure_prompts",
            None,
            Annotated[
                int | None,
                _option("The first N measure, the others verify. Default: half.", "--measure-prompts", "N"),
            ],
        ),
        *(
            parameter(name, default, Annotated[int, _option(text, f"--{name.replace('_', '-')}", "N")])
            for name, default, text in ranges
        ),
        parameter("clip_path", None, clip_path_option(_TUNE)),
    ]
    output = parameter(
        "output_path",
        None,
        Annotated[
            str | None,
            typer.Option(
                "--output-path",
                "-o",
                help="The config file to write.",
                metavar="FILE.yaml",
                rich_help_panel=options.OUTPUT,
                show_default=False,
            ),
        ],
    )
    return [context, prompts, *own, *others, output]


options.set_parameters(tune, _parameters())
