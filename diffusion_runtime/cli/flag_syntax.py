"""Command-line syntax beyond the parser's: dotted flags (a path in the name), spellings of other projects, flags given
twice.

`--request.height 128` becomes `--set request.height=128`, `--attention-config.per_role.cross.backend fa` becomes
`--dotted-attention per_role.cross.backend=fa`. A path may be anything, so no parser can list these flags.
`--at 5s "a blue star"` becomes `--at "5s a blue star"`, and so with `--seed-at 5s 7`. A verb that has no flag of a name
takes it for one of `core/spellings.yaml`, and underscores for dashes. Of a flag that is given twice the last value
holds, and every value is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typer.core import TyperCommand

from diffusion_runtime.core.spellings import Spelling, resolve
from diffusion_runtime.errors import ConfigError, nearest, shown
from diffusion_runtime.session.failures import Interrupted

# Names of files of weights: as a word beside prompts, the model; for `info`, what is no media file.
WEIGHT_SUFFIXES = (".safetensors", ".sft", ".gguf")
# Names of files that may hold a workflow of ComfyUI, as a value of --workflow.
_WORKFLOW_SUFFIXES = (".json", ".png", ".webp", ".mp4", ".mov", ".m4v", ".webm", ".mkv", ".flac")
# Flags of a time and what comes with it.
_TIMED = {"--at": "a prompt in quotes", "--seed-at": "a seed"}
# First part of the name -> the flag that takes PATH=VALUE, and whether the first part stays in the path.
_TARGETS = {
    "request": ("--set", True),
    "runtime": ("--set", True),
    "pipeline": ("--set", True),
    "attention-config": ("--dotted-attention", False),
    "diffusion-attention-config": ("--dotted-attention", False),
}


def is_workflow_path(text: str) -> bool:
    """Return whether a value of `--workflow` is a file, and not a mode of a model: it ends as one, or is a path."""
    return text.lower().endswith(_WORKFLOW_SUFFIXES) or "/" in text


def rewrite_dotted_flags(arguments: Sequence[str]) -> list[str]:
    """`arguments` with every dotted flag, in both forms (`--flag value`, `--flag=value`), rewritten.

    Raises ConfigError for a dotted flag of an unknown section, and for one without a value.
    """
    rewritten: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument == "--":
            return [*rewritten, argument, *waiting]
        if argument in _TIMED and len(waiting) > 1 and not any(character.isspace() for character in waiting[0]):
            # The parser has no flag of two values that may be given again.
            at, second = waiting.pop(0), waiting.pop(0)
            if second.startswith("--"):
                expected = _TIMED[argument]
                raise ConfigError(f"{argument} {at}: expected {expected} after the time, got the flag {second}")
            rewritten += [argument, f"{at} {second}"]
            continue
        name, equals, value = argument.partition("=")
        head, dot, path = name.removeprefix("--").partition(".")
        if not name.startswith("--") or not dot or any(character.isspace() for character in name):
            rewritten.append(argument)
            continue
        head = head.replace("_", "-")
        if head not in _TARGETS:
            raise ConfigError(f"no such option: {name}.{nearest(head, _TARGETS).replace(chr(39), '')}")
        if not path or path.endswith("."):
            raise ConfigError(f"{name}: the name of a value is missing after the dot")
        if not equals:
            if not waiting:
                raise ConfigError(f"{name} needs a value")
            value = waiting.pop(0)
        target, keeps_head = _TARGETS[head]
        rewritten += [target, f"{head}.{path}={value}" if keeps_head else f"{path}={value}"]
    return rewritten


def in_own_spelling(arguments: Sequence[str], switches: Mapping[str, bool]) -> list[str]:
    """`arguments` with every flag that a verb does not have by its name as the one of the verb that it stands for.

    switches: the verb's flags -> whether they take no value. A name that stands for none is left to the parser. A
    switch of others may be followed by true or false, as SGLang writes them. Raises ConfigError for flags that have no
    counterpart here, with the reasons.
    """
    rewritten: list[str] = []
    refusals: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument == "--":
            rewritten += [argument, *waiting]
            break
        name, equals, value = argument.partition("=")
        theirs = _spelling(name, switches) if name[:1] == "-" and name not in switches else None
        if theirs is None:
            rewritten.append(argument)
            # A value may look like a flag.
            if waiting and not equals and switches.get(name) is False:
                rewritten.append(waiting.pop(0))
        elif not theirs.means:
            refusals.append(theirs.refusal)
        elif theirs.value:
            if not equals and not waiting:
                raise ConfigError(f"{name} needs a value, such as {theirs.example}")
            given = value if equals else waiting.pop(0)
            own = theirs.taken_apart(given)
            if own is None:
                raise ConfigError(f"{name}: expected a value such as {theirs.example}, got {shown(given)}")
            rewritten += own
        elif theirs.is_complete or switches.get(theirs.means):
            text = value if equals else waiting[0] if waiting else ""
            is_on = {"true": True, "false": False}.get(text.lower())
            if equals and is_on is None:
                raise ConfigError(f"{name}: expected true or false, or no value, got {shown(value)}")
            if is_on is not None and not equals:
                waiting.pop(0)
            rewritten += theirs.means.split(" ") if is_on is not False else _switched_off(theirs.means, switches)
        else:
            # A flag with a path is one argument with its value.
            first = [value] if equals else waiting[:1] if "." in theirs.means else []
            waiting = [*rewrite_dotted_flags([theirs.means, *first]), *(waiting if equals else waiting[len(first) :])]
    if refusals:
        raise ConfigError("\n  ".join(dict.fromkeys(refusals)))
    return rewritten


def _switched_off(means: str, switches: Mapping[str, bool]) -> list[str]:
    """The flag that says no to a switch; none where leaving it out does."""
    opposite = f"--no-{means.removeprefix('--')}"
    return [opposite] if opposite in switches else []


def _spelling(name: str, switches: Mapping[str, bool]) -> Spelling | None:
    """The flags of a verb that a name stands for, or why it has no counterpart. None where those flags, or the ones
    that are advised instead, are none of the verb."""
    dashed = name.replace("_", "-")
    if dashed in switches:
        return Spelling(name, "", means=dashed)
    theirs = resolve("flag", name)
    if theirs is None:
        return None
    if theirs.means:
        return theirs if all(_takes(switches, own) for own in flags_in(theirs.means)) else None
    advised = flags_in(theirs.instead) if theirs.instead.startswith("write ") else []
    return theirs if all(_takes(switches, own) for own in advised) else None


def flags_in(text: str) -> list[str]:
    """The long flags that a text names."""
    return re.findall(r"(?<!\S)--[a-z][\w.-]*", text)


def _takes(switches: Mapping[str, bool], flag: str) -> bool:
    """Return whether a verb has a flag, or the one that a flag with a path is rewritten to."""
    return (_TARGETS[flag[2:].partition(".")[0]][0] if "." in flag else flag) in switches


class CheckedCommand(TyperCommand):
    """A verb whose flags are checked wherever they stand: the parser itself looks at the last of each alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises the parser's BadParameter for a value that its flag cannot have."""
        flags = {
            name: parameter
            for parameter in self.params
            if parameter.param_type_name == "option"
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        switches = {name: _is_switch(flag) for name, flag in flags.items()}
        # The parser's own: known here, so that help need not read the table of spellings.
        args = in_own_spelling(args, {**dict.fromkeys(ctx.help_option_names, True), **switches})
        for name, value in _given_values(args, {name for name, flag in flags.items() if not _is_switch(flag)}):
            # Those that may be given several times are all looked at by the parser.
            if not flags[name].multiple:
                flags[name].process_value(ctx, value)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Raises Interrupted for a signal that the verb says nothing about: the parser would end without a word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted from error


def _is_switch(flag: Any) -> bool:
    return bool(flag.is_flag or flag.count)


def _given_values(arguments: Sequence[str], names: set[str]) -> Iterator[tuple[str, str]]:
    """(flag, value) for every flag of `names` that has one, in all forms: `--flag value`, `--flag=value`, `-fvalue`."""
    waiting = iter(arguments)
    for argument in waiting:
        if argument == "--":
            return
        name, equals, value = argument.partition("=")
        if name in names and equals and name.startswith("--"):
            yield name, value
        elif argument in names:
            # Without a next one the parser says what is missing.
            yield from ((argument, value) for value in [next(waiting, None)] if value is not None)
        elif argument[:2] in names and not argument.startswith("--"):
            yield argument[:2], argument[2:]
