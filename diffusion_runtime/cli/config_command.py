"""`config schema`: the JSON Schema of config files, for editors and other programs."""

from __future__ import annotations

from typing import Annotated

import typer

from diffusion_runtime.cli.flag_syntax import CheckedCommand
from diffusion_runtime.cli.terminal import put_on_stdout

EPILOG = """[bold]Examples[/]

diffusion-runtime config schema > config.schema.json

First line of a YAML file: # yaml-language-server: $schema=config.schema.json
"""
_MAX_BYTES = 4 * 1024 * 1024

config = typer.Typer(rich_markup_mode="rich", context_settings={"help_option_names": ["-h", "--help"]})


@config.callback()
def about() -> None:
    """About the YAML files of --config."""


@config.command("schema", cls=CheckedCommand, epilog=EPILOG)
def schema(
    installed: Annotated[
        bool, typer.Option("--installed", help="With attention backends that other packages publish here.")
    ] = False,
) -> None:
    """Print the JSON Schema of config files, with which editors complete and check them."""
    if installed:
        from diffusion_runtime.cli.config_schema import schema_text

        text = schema_text()
    else:
        from diffusion_runtime.cli.config_file import SCHEMA_FILE
        from diffusion_runtime.untrusted.files import read_file

        text = read_file(SCHEMA_FILE, max_bytes=_MAX_BYTES).decode("utf-8")
    put_on_stdout(text.rstrip("\n"))
