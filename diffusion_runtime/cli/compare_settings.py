"""`--setting` of `compare`: `NAME: FLAGS` or FILE.yaml, laid over the flags that all settings share."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.attention_flags import AttentionFlags
from diffusion_runtime.cli.config_file import read_config
from diffusion_runtime.cli.flag_syntax import CheckedCommand, rewrite_dotted_flags
from diffusion_runtime.cli.generate import flags_of
from diffusion_runtime.cli.settings import Flags, Settings, resolve_settings
from diffusion_runtime.errors import ConfigError, UsageError, shown
from diffusion_runtime.request.layers import layered

_NOT_IN_A_SETTING = (*options.OUTPUT_FLAGS, "as_json", "quiet", "verbose", "log_format")
MAX_NAME_CHARACTERS = 28
MAX_SETTINGS = 32
# What the parser raises for wrong flags. Its class has had several homes; it is always BadParameter's parent.
_ParserError: type[Exception] = typer.BadParameter.__mro__[1]
_FILE = re.compile(r"[^:]*\.ya?ml")
_EXAMPLE = "--setting 'sparse: --attention-backend video_sparse_attn' or --setting FILE.yaml"


def parse_settings(texts: Sequence[str], shared: Flags, signature: inspect.Signature) -> list[tuple[str, Settings]]:
    """Name and settings of each; signature: of `generate`.

    Raises ConfigError for texts of neither form, names that are taken, fewer than two; and, with the setting's name,
    whatever its flags raise.
    """
    if len(texts) < 2:
        raise ConfigError(
            f"--setting: expected two or more, the first is what the others are compared with, got {len(texts)}; e.g. "
            f"--setting 'dense: --attention-backend torch_sdpa' {_EXAMPLE}"
        )
    if len(texts) > MAX_SETTINGS:
        raise ConfigError(f"--setting: expected at most {MAX_SETTINGS}, got {len(texts)}")
    parse = _parser(signature)
    found: dict[str, Settings] = {}
    for text in texts:
        name, own = _own_flags(text, parse)
        if name in found:
            raise ConfigError(f"--setting: the name {shown(name)} is given twice; give each setting a name of its own")
        with _named(name):
            found[name] = resolve_settings(_over(shared, own))
    return list(found.items())


def _own_flags(text: str, parse: Callable[[Sequence[str]], Flags]) -> tuple[str, Flags]:
    if _FILE.fullmatch(text):
        path = text.strip()
        return _checked_name(Path(path).stem), Flags(config=path)
    name, colon, flags = text.partition(":")
    if not colon:
        raise ConfigError(f"--setting: expected NAME: FLAGS or FILE.yaml, got {shown(text)}; e.g. {_EXAMPLE}")
    name = _checked_name(name.strip())
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise ConfigError(f"--setting {name}: the quotes in {shown(flags.strip())} do not match: {error}") from error
    with _named(name):
        return name, parse(words)


def _checked_name(name: str) -> str:
    if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise ConfigError(
            f"--setting: expected a name of 1 to {MAX_NAME_CHARACTERS} printable characters before the colon, got "
            f"{shown(name)}"
        )
    return name


class _named:
    """Context manager: errors inside get the name of this setting."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UsageError):
            raise type(error)(f"--setting {self._name}: {error}") from error
        if error is not None and isinstance(error, _ParserError):
            message = cast(typer.BadParameter, error).format_message()
            option = getattr(error, "option_name", None)
            if options.is_of_clips(option):
                message = f"No such option: {option} is no part of how a clip is made; leave it out"
            raise ConfigError(
                f"--setting {self._name}: {message[:400]}\n  see: diffusion-runtime generate --help"
            ) from error


def _parser(signature: inspect.Signature) -> Callable[[Sequence[str]], Flags]:
    """A function from the words of a setting to flags, by the parser of `generate`."""
    kept = [each for name, each in signature.parameters.items() if name not in _NOT_IN_A_SETTING]

    def take(context: typer.Context, **given: Any) -> Flags:
        del context
        return flags_of({**dict.fromkeys(_NOT_IN_A_SETTING), "as_json": False, **_booleans(), **given})

    options.set_parameters(take, kept)
    # --help would print and end.
    parser = typer.Typer(add_completion=False, context_settings={"help_option_names": []}, rich_markup_mode=None)
    parser.command("setting", cls=CheckedCommand)(take)
    command = typer.main.get_command(parser)

    def parse(words: Sequence[str]) -> Flags:
        result = command.main(rewrite_dotted_flags(list(words)), prog_name="--setting", standalone_mode=False)
        assert isinstance(result, Flags)
        return result

    return parse


def _booleans() -> dict[str, bool]:
    return {"resume": False, "dry_run": False, "quiet": False, "verbose": False}


def _over(shared: Flags, own: Flags) -> Flags:
    """The shared flags with those of a setting typed behind them; its file counts as flags."""
    file = read_config(own.config, own.settings)
    values = layered(file.request, file.presets.get(own.preset or "", {}), file.settings)
    prompts, seeds, negative = (values.pop(name, []) for name in ("prompt", "seed", "negative_prompt"))
    runtime = {**_given(shared.runtime), **file.runtime, **_given(own.runtime)}
    parallel = {**_given(shared.parallel), **_given(own.parallel)}
    is_file_preset = own.preset is not None and own.preset in file.presets
    attention = _attention_over(AttentionFlags() if "attention" in file.runtime else shared.attention, own.attention)
    return dataclasses.replace(
        shared,
        prompts=own.prompts or prompts or shared.prompts,
        negative_prompts=own.negative_prompts or negative or shared.negative_prompts,
        seeds=own.seeds or [str(seed) for seed in seeds] or shared.seeds,
        request=layered(_given(shared.request), values, _given(own.request)),
        runtime=runtime,
        parallel=parallel,
        attention=attention,
        repeat=own.repeat or shared.repeat,
        preset=None if is_file_preset else own.preset or shared.preset,
    )


def _attention_over(shared: AttentionFlags, own: AttentionFlags) -> AttentionFlags:
    """A setting that names a backend means no options of the shared one; options alone are laid over its own."""
    if own.backend is not None or own.config is not None:
        return own
    return AttentionFlags(
        shared.backend,
        own.backend_config or shared.backend_config,
        shared.config,
        (*shared.entries, *own.entries),
        own.prefill.over(shared.prefill),
        own.decode.over(shared.decode),
    )


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
