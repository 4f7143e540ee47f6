"""Tables of `tune`: the settings on the prompts that were not measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from diffusion_runtime.cli.tables import figures_table
from diffusion_runtime.cli.terminal import Terminal

if TYPE_CHECKING:
    from diffusion_runtime.tuning.combination import Trial
    from diffusion_runtime.tuning.fastest_result import FastestResult
    from diffusion_runtime.tuning.result import TuneResult


def show(result: TuneResult | FastestResult, terminal: Terminal) -> None:
    """Show the settings, and which of them the file holds."""
    from diffusion_runtime.tuning.fastest_result import FastestResult

    if isinstance(result, FastestResult):
        _show_fastest(result, terminal)
    else:
        _show_sparsest(result, terminal)


def _show_sparsest(result: TuneResult, terminal: Terminal) -> None:
    """A table of at most 100 columns: the tuned setting, the uniform ones, dense, fewer steps."""
    from diffusion_runtime.tuning.result import by_name

    rows: list[tuple[str, ...]] = [_row("dense", 1.0, result.dense_verified, "-")]
    for name, outcome in by_name(result.tuned, result.uniform).items():
        rows.append(_row(name, outcome.point.kept, outcome.verified, _met(outcome.is_met)))
    fewer = result.fewer_steps
    if fewer is not None:
        rows.append(_row("dense, fewer steps", 1.0, fewer, "-"))
    terminal.say(f"\nOn {len(result.verified_prompts)} prompts that were not measured; {' '.join(result.budgets)}")
    columns = ("setting", "kept", "budget", "accuracy", "PSNR", "latents", "steps", "time, s")
    terminal.show(figures_table(columns, rows))
    setting = result.setting
    if setting.is_met:
        terminal.say(
            f"The file holds {result.chosen}: {setting.point.kept:.3f} of self-attention's pairs; {_beside(result)}."
        )
    else:
        values = {} if setting.verified is None else setting.verified.values
        figures = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        terminal.warn(
            f"no sparse setting meets the budget; the file holds the nearest, {result.chosen}"
            + f": {figures}" * bool(values)
        )
    if fewer is None:
        terminal.say("Fewer dense steps: the setting in the file takes as long here as all of them.")


def _show_fastest(result: FastestResult, terminal: Terminal) -> None:
    """A table of the settings on the prompts for verification: as given, what was found, plain steps in its time."""
    found = result.found
    names = list(found.reference.values)
    columns = ("setting", "time, s", "faster", "budget", "steps", *names)
    rows = [
        (name, *_figures_of(trial, found.reference.total), state, str(trial.num_steps), *_values_of(trial, names))
        for name, trial, state in result.rows()
    ]
    terminal.say(f"\nOn {len(result.verified_prompts)} prompts that were not measured; {' '.join(result.budgets)}")
    terminal.show(figures_table(columns, rows))
    for remark in found.remarks:
        terminal.warn(remark)
    if found.ended_by:
        terminal.warn(f"{found.ended_by}: what was measured is kept in the file; --minutes N searches longer")
    if not found.is_met:
        terminal.warn("nothing faster is within the budget; the file holds the setting as given")
    elif result.is_plain:
        terminal.say("The setting is the plain alternative itself: nothing else is faster within the budget.")
    elif found.plain is None:
        terminal.say("As many plain steps as take that time: all of them.")


def _figures_of(trial: Trial, given: float) -> tuple[str, str]:
    return f"{trial.total:.2f}", f"{given / trial.total:.2f}x"


def _values_of(trial: Trial, names: Sequence[str]) -> list[str]:
    return [f"{trial.values[name]:.3f}" if name in trial.values else "-" for name in names]


def _beside(result: TuneResult) -> str:
    """The other kind of setting, beside the one in the file."""
    best = result.best_uniform
    if result.setting is not result.tuned:
        tuned = result.tuned
        return f"the tuned one keeps {tuned.point.kept:.3f}" if tuned.is_met else "the tuned one misses the budget"
    if best is None:
        return "no uniform setting is within the budget"
    return f"the best uniform setting, of {best[0]}, keeps {best[1].point.kept:.3f}"


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _row(name: str, kept: float, figures: Any, state: str) -> tuple[str, ...]:
    if figures is None:
        return (name, f"{kept:.3f}", state, *("-",) * 5)
    values = figures.values
    shown = [
        "-" if values.get(metric) is None else f"{values[metric]:.{digits}f}"
        for metric, digits in (("accuracy", 3), ("psnr", 1), ("latent", 3))
    ]
    return (name, f"{kept:.3f}", state, *shown, str(figures.num_steps), f"{figures.seconds:.2f}")
