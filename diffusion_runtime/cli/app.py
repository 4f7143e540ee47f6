"""Entry point of the command: verbs, errors, exit codes. Until a verb runs, only the parser is imported."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import functools
import itertools
import os
import shlex
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer
import typer.main

from diffusion_runtime.cli.flag_syntax import rewrite_dotted_flags
from diffusion_runtime.cli.interruptible import has_abandoned_work
from diffusion_runtime.cli.terminal import Terminal, prepare_standard_streams, put_failure_on_stdout
from diffusion_runtime.cli.verbs import VERBS, program
from diffusion_runtime.core.spellings import resolve
from diffusion_runtime.errors import OutputError, UsageError, nearest, shown
from diffusion_runtime.parallel.process_info import LAUNCHED_VARIABLE, is_rank
from diffusion_runtime.session.failures import INTERRUPTED, Failure, Interrupted
from diffusion_runtime.session.interruptions import interruptions, remove_unfinished_files
from diffusion_runtime.untrusted.printable import printable

# What the parser raises for a wrong command line. Its class has had several homes; it is always BadParameter's parent.
_ParserError: type[Exception] = typer.BadParameter.__mro__[1]

_MAX_PARSER_CHARACTERS = 400
# The share of letters that two flags have in common, in their order, of which one may be a slip of the other.
_LIKE = 0.7


def main() -> None:
    """The `diffusion-runtime` command."""
    has_output = prepare_standard_streams()
    if is_rank(os.environ):
        interruptions.install_in_starting_rank(is_launched=LAUNCHED_VARIABLE in os.environ)
    else:
        interruptions.install()
    code = run(sys.argv[1:], has_output=has_output)
    # The interpreter takes a moment to end, in which an interruption would be a traceback.
    interruptions.all_is_reported(code)
    remove_unfinished_files()
    if code == INTERRUPTED or has_abandoned_work():
        # Who interrupts does not wait for a model to be freed; and a thread that computes inside torch must not have
        # torch's pools taken down around it.
        _end_without_freeing(code)
    sys.exit(code)


def _ignore_signals() -> None:
    """From here on the interpreter frees what it holds, for which it puts its handlers away: a signal would be a
    failure of a command that has succeeded. Those that are ignored stay so."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


# What is registered first is called last: with the import of this module, before any library is.
atexit.register(_ignore_signals)


def _end_without_freeing(code: int) -> None:
    """End the process without freeing what it made object by object. Returns where what was
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
        if arguments and arguments[0] == "completion":
            from diffusion_runtime.cli.completion import asked_shell, put_script

            if (shell := asked_shell(arguments)) is not None:
                # A shell's start waits for this; parsing values, typer imports pydantic, a quarter of the time.
                put_script(shell, _command(None))
                return 0
        rewritten = rewrite_dotted_flags(arguments or ["--help"])
        _refuse_verb(rewritten[0])
        # obj: what was typed, for a verb that starts itself again in several processes.
        code = _command(_named(rewritten))(
            args=rewritten, prog_name="diffusion-runtime", standalone_mode=False, obj=tuple(rewritten)
        )
        if code == INTERRUPTED and not interruptions.is_reported:
            # The parser's own answer to a signal while it reads the flags.
            raise Interrupted
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
def _command(named: str | None) -> Any:
    """The verbs as the parser takes them. named: as for `program`; of all verbs typer needs 0.035 s of CPU time to make
    their flags."""
    return typer.main.get_command(program(named))


def _named(arguments: Sequence[str]) -> str | None:
    """The verb of a command line, or a word that is none; None where all are needed, for completion."""
    word = next((argument for argument in arguments if not argument.startswith("-")), "")
    return None if word == "completion" else word


def _refuse_verb(word: str) -> None:
    """Raises UsageError for a word that is no verb here: with the one to write instead where there is one."""
    if word in VERBS or word.startswith("-"):
        return
    theirs = resolve("verb", word)
    if theirs is not None:
        raise UsageError(theirs.refusal)
    if any(character.isspace() for character in word):
        # A prompt.
        raise UsageError(f"expected a verb, got {shown(word)}; write generate {shlex.quote(printable(word)[:80])}")
    raise UsageError(f"there is no verb {shown(word)}.{nearest(word, VERBS)}\n  see: diffusion-runtime --help")


def _asks_for_json_lines(arguments: Sequence[str]) -> bool:
    """Before the parser has run, whose errors are reported so as well."""
    return "--log-format=json" in arguments or ("--log-format", "json") in itertools.pairwise(arguments)


def _parser_message(error: Any, arguments: Sequence[str]) -> str:
    """The parser's message, with the command that explains the flags."""
    # A value that one of our own functions refuses comes without a context.
    verb = f" {arguments[0]}" if arguments and arguments[0] in VERBS else ""
    command = error.ctx.command_path if error.ctx is not None else f"diffusion-runtime{verb}"
    # What the parser quotes is a whole argument.
    option = getattr(error, "option_name", None)
    if hasattr(error, "possibilities") and error.ctx is not None:
        visible = [each for each in error.ctx.command.params if not getattr(each, "hidden", True)]
        error.possibilities = _like(str(option), [flag for each in visible for flag in each.opts if flag[:2] == "--"])
    message = error.format_message()
    # What this asks about are flags, whose declarations a verb's parser has imported by now.
    from diffusion_runtime.cli import options

    if option is None and (commands := getattr(error.ctx and error.ctx.command, "commands", None)):
        message = f"{message} Known: {', '.join(sorted(commands))}."
    if options.is_of_clips(option):
        message = f"No such option: {option} is of `generate`, which writes clips; leave it out"
    if message.endswith("requires an argument.") and (text := _help_of(arguments, option)):
        message = f"{option} needs a value. {text}"
    if len(message) > _MAX_PARSER_CHARACTERS:
        message = f"{message[:_MAX_PARSER_CHARACTERS]}..."
    return f"{message}\n  see: {command} --help"


def _like(option: str, flags: Iterable[str]) -> list[str]:
    """Return the flags that an unknown one is like, by letters or by words. The parser's own measure counts the dashes,
    by which `--cpu` is like `--fps`."""
    plain = option.lstrip("-").replace("_", "-").lower()
    words = set(plain.split("-"))
    found = {}
    for flag in flags:
        name = flag.removeprefix("--")
        others = set(name.split("-"))
        ratio = difflib.SequenceMatcher(None, plain, name).ratio()
        if ratio >= _LIKE or words <= others or others <= words:
            found[flag] = ratio
    return sorted(found, key=found.__getitem__, reverse=True)[:3]


def _help_of(arguments: Sequence[str], option: str | None) -> str:
    """Return the help of an option of a verb, which lists its values; empty where the verb has none."""
    command = _command(_named(arguments))
    for word in arguments:
        command = getattr(command, "commands", {}).get(word, command)
    return next((str(each.help) for each in command.params if option in each.opts and getattr(each, "help", None)), "")
