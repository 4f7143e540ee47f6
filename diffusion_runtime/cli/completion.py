"""`completion`: shell completion for bash, zsh and fish, made of the parser's own declarations.

The script that is printed holds every flag and value, so that a key press starts no Python: 0.003 s of CPU time in
bash, and 0.40 s by typer's own completion, which knows no dotted flag either. Values come from the schema of config
files, which a test keeps equal to what the runtime accepts; torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from diffusion_runtime.cli.completion_scripts import SHELLS, CompletedCommand, CompletedFlag, script
from diffusion_runtime.cli.config_file import SCHEMA_FILE
from diffusion_runtime.cli.log_lines import LOG_FORMATS
from diffusion_runtime.cli.terminal import put_on_stdout
from diffusion_runtime.errors import ConfigError, nearest, shown
from diffusion_runtime.untrusted.json_text import read_json_file

EPILOG = """[bold]Examples[/]

source <(diffusion-runtime completion bash)

diffusion-runtime completion zsh > ~/.zfunc/_diffusion-runtime

diffusion-runtime completion fish > ~/.config/fish/completions/diffusion-runtime.fish
"""
# A value is a path where its metavar holds one of these; MODEL may be a folder.
_PATHS = ("FILE", "PATH", "FOLDER", "MODEL")


def completion(
    context: typer.Context,
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_default=False)],
) -> None:
    """Print a script that completes commands, flags, backends, models, presets and roles in a shell."""
    if shell not in SHELLS:
        raise ConfigError(f"completion: unknown shell {shown(shell)}.{nearest(shell, SHELLS)}")
    put_script(shell, context.find_root().command)


def asked_shell(arguments: Sequence[str]) -> str | None:
    """The shell of `completion SHELL`, typed so and no other way; None for any other command line."""
    return arguments[1] if len(arguments) == 2 and arguments[0] == "completion" and arguments[1] in SHELLS else None


def put_script(shell: str, root: Any) -> None:
    """Print the script. root: the parser's command of the whole program."""
    put_on_stdout(script(shell, declared_commands(root)).rstrip("\n"))


def declared_commands(root: Any) -> list[CompletedCommand]:
    """root: the parser's command of the whole program."""
    return list(_commands(root, "", _Values(read_json_file(SCHEMA_FILE))))


class _Values:
    """The values of flags, from the schema of config files."""

    def __init__(self, schema: Any) -> None:
        definitions, properties = schema["definitions"], schema["properties"]
        self._keys = {
            name: _names_in(key)
            for section in ("runtime", "request")
            for name, key in properties[section]["properties"].items()
        }
        self.backends = tuple(definitions["backend"]["anyOf"][0]["enum"])
        mapping = next(each for each in definitions["attention"]["anyOf"] if "properties" in each)
        self.roles = tuple(mapping["properties"]["per_role"]["propertyNames"]["enum"])
        self._named = {
            "attention_backend": self.backends,
            "backends": self.backends,
            "preset": tuple(properties["presets"]["propertyNames"]["anyOf"][0]["enum"]),
            "model": self._keys["model_path"],
            "log_format": LOG_FORMATS,
            "shell": SHELLS,
        }

    def of(self, parameter: str) -> tuple[str, ...]:
        """The values of a parameter by its name in Python; none where it may be anything."""
        return self._named.get(parameter, self._keys.get(parameter, ()))


def _names_in(schema: Any) -> tuple[str, ...]:
    """The names that a key of the schema may be."""
    alternatives = [schema, *schema.get("anyOf", ())]
    return tuple(value for each in alternatives for value in each.get("enum", ()) if isinstance(value, str))


def _commands(command: Any, words: str, values: _Values) -> Iterator[CompletedCommand]:
    subcommands: Mapping[str, Any] = getattr(command, "commands", {})
    positional = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    yield CompletedCommand(
        words,
        tuple(_flags(command.params, values)),
        {name: each.get_short_help_str(100) for name, each in subcommands.items()},
        tuple(value for parameter in positional for value in values.of(parameter.name)),
        any(_is_path(parameter.metavar) for parameter in positional),
    )
    for name, each in subcommands.items():
        yield from _commands(each, f"{words} {name}".strip(), values)


def _flags(parameters: Sequence[Any], values: _Values) -> Iterator[CompletedFlag]:
    for parameter in parameters:
        if parameter.param_type_name != "option":
            continue
        if parameter.name == "attention_entry":
            for path in ("default", *(f"per_role.{role}" for role in values.roles)):
                name = f"--attention-config.{path}.backend"
                yield CompletedFlag((name,), f"The backend of {path}.", True, values.backends, takes_list=True)
        elif not parameter.hidden:
            yield CompletedFlag(
                (*parameter.opts, *parameter.secondary_opts),
                " ".join((parameter.help or "").split()),
                not (parameter.is_flag or parameter.count),
                values.of(parameter.name),
                _is_path(parameter.metavar),
                parameter.name in ("attention_backend", "backends"),
            )
    yield CompletedFlag(("--help", "-h"), "Show this message and exit.", False)


def _is_path(metavar: str | None) -> bool:
    return metavar is not None and any(word in metavar for word in _PATHS)
