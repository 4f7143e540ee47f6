"""A flag that is given twice: the last value holds, as everywhere; the others are checked as well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperCommand


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
        for name, value in _given_values(args, {name for name, flag in flags.items() if not _is_switch(flag)}):
            # Those that may be given several times are all looked at by the parser.
            if not flags[name].multiple:
                flags[name].process_value(ctx, value)
        return super().parse_args(ctx, args)


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
