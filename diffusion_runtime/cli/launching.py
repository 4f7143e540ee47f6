"""Launcher of `--num-gpus N`: runs the same command line in N processes and reports how they ended, once."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion_runtime.cli.terminal import Terminal, put_failure_on_stdout
from diffusion_runtime.session.failures import INTERRUPTED, with_kept_frames
from diffusion_runtime.session.interruptions import interruptions
from diffusion_runtime.session.outputs import Outputs

if TYPE_CHECKING:
    from diffusion_runtime.cli.prompt_rows import PromptRow
    from diffusion_runtime.parallel.failure import RankFailure

PROMPT_FILE_FLAG = "--prompt-file"


@dataclass(frozen=True)
class CommandLine:
    """A command line as it was typed. piped_prompts: prompts from standard input, which cannot be read again."""

    arguments: tuple[str, ...]
    piped_prompts: tuple[str, ...] = ()

    def again(self, prompt_file: Path) -> tuple[str, ...]:
        """The same command line for several processes. prompt_file: a file that may be written for them."""
        if not self.piped_prompts:
            return self.arguments
        prompt_file.write_text("\n".join(self.piped_prompts) + "\n", encoding="utf-8")
        arguments = list(self.arguments)
        for index, argument in enumerate(arguments):
            if argument == f"{PROMPT_FILE_FLAG}=-":
                arguments[index] = f"{PROMPT_FILE_FLAG}={prompt_file}"
            elif argument == "-" and index and arguments[index - 1] == PROMPT_FILE_FLAG:
                arguments[index] = str(prompt_file)
        return tuple(arguments)


def launch_processes(
    command_line: CommandLine,
    num_processes: int,
    outputs: Outputs,
    terminal: Terminal,
    schema: str | None,
    *,
    on_cpu: bool,
    check: Callable[[], None],
) -> int:
    """Run the command in `num_processes` processes; returns the exit code, which is what one process would have.

    check: runs beside them, and ends them where it raises. Raises what it does.
    """
    from diffusion_runtime.media.publish import remove_abandoned_files
    from diffusion_runtime.parallel.failure import RankFailure
    from diffusion_runtime.parallel.launch import Interrupted as RunInterrupted
    from diffusion_runtime.parallel.launch import launch, this_program

    with tempfile.TemporaryDirectory(prefix="diffusion-runtime-") as folder, _cleared(outputs.folder):

        def end_at_once(is_reported: bool) -> None:
            remove_abandoned_files(outputs.folder)
            if is_reported:
                interruptions.leave_reporting_to_others()
            interruptions.end_at_once()

        arguments = command_line.again(Path(folder) / "prompts.txt")
        try:
            failure = launch(
                (*this_program(), *arguments),
                num_processes,
                on_cpu=on_cpu,
                verbose=terminal.verbose,
                end_at_once=end_at_once,
                check=check,
            )
        except RunInterrupted as interrupted:
            with interruptions.reporting():
                if not interrupted.is_reported:
                    message = f"interrupted: files that were finished are in {outputs.folder}"
                    ended = RankFailure.of_interruption(message)
                    if interrupted.growing_file is not None:
                        ended = with_kept_frames(ended, Path(interrupted.growing_file))
                    report_failure(terminal, ended, schema)
            return INTERRUPTED
    if failure is None:
        return 0
    if not failure.is_reported:
        if failure.growing_file is not None:
            failure = with_kept_frames(failure, Path(failure.growing_file))
        report_failure(terminal, failure, schema)
    # An interruption of one rank alone is among the failures, and has been said.
    interruptions.leave_reporting_to_others()
    return failure.exit_code


def report_failure(terminal: Terminal, failure: RankFailure, schema: str | None) -> None:
    """One message on standard error and, where results are JSON, one object on standard output."""
    terminal.error(failure.message, failure.trace, failure.kind, failure.exit_code)
    if schema is not None:
        values = {"error": failure.message, "kind": failure.kind, "exit_code": failure.exit_code}
        put_failure_on_stdout(schema, values)


@contextlib.contextmanager
def _cleared(folder: Path) -> Iterator[None]:
    """Processes that are killed in the block leave nothing half written in `folder`."""
    from diffusion_runtime.media.publish import remove_abandoned_files

    try:
        yield
    finally:
        remove_abandoned_files(folder)


def piped_prompts(prompt_file: str | None, prompts: Sequence[str | PromptRow], num_others: int) -> tuple[str, ...]:
    """Return the prompts that came from standard input: all but the first `num_others`."""
    # Standard input is lines of text, never rows.
    return tuple(text for text in prompts[num_others:] if isinstance(text, str)) if prompt_file == "-" else ()
