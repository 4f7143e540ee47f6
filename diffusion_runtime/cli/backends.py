"""`backends`: the capabilities of each attention backend on this machine, or why it cannot run; the default."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.tables import plain_table
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout

if TYPE_CHECKING:
    from diffusion_runtime.attention.backends.capability import Capability
    from diffusion_runtime.attention.catalogue import BackendInfo
    from diffusion_runtime.attention.select import Decision
    from diffusion_runtime.core.hardware import Hardware

SCHEMA = "diffusion_runtime.backends/1"
EPILOG = """[bold]Examples[/]

diffusion-runtime backends

diffusion-runtime backends --device cuda:1 --all

diffusion-runtime backends --json
"""

_FEATURE_WORDS = {"key_padding": "padding", "gqa": "GQA", "lse": "LSE"}
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
# The first column holds names and the spellings below them; the widest name fits.
_NAME_WIDTH = 24


@dataclass(frozen=True)
class Listing:
    """Listing of backends on this machine. default: None with the reason why nothing can be the default."""

    hardware: Hardware
    backends: Sequence[BackendInfo]
    missing: Sequence[str]
    default: Decision | None
    no_default: str
    environment: str | None


def backends(
    import_files: options.ImportFiles = None,  # noqa: ARG001 - run by the parser
    device: Annotated[str | None, options.runtime_flag("device")] = None,
    show_all: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also what each is, its options, and what those that cannot run here could do.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """List what each attention backend can do here, or why not and what to type.

    Usable: installed, and made for this chip. `doctor` runs each of them.
    """
    terminal = Terminal()
    with terminal.log():
        listing = _look(device or "auto")
    if as_json:
        put_on_stdout(json_text(_to_json_object(listing)))
    else:
        show(listing, show_all=show_all)


def _look(device: str) -> Listing:
    """Raises ConfigError for a device that is not there."""
    from diffusion_runtime.attention.catalogue import list_backends, missing_names, platform_default
    from diffusion_runtime.attention.select import ENVIRONMENT_VARIABLE
    from diffusion_runtime.core.hardware import detect_hardware
    from diffusion_runtime.startup.importing import raised_line

    hardware = detect_hardware(device)
    default, no_default = None, ""
    try:
        default = platform_default(hardware)
    except Exception as error:  # a broken package must not hide the others
        no_default = raised_line(error)
    environment = os.environ.get(ENVIRONMENT_VARIABLE) or None
    return Listing(hardware, list_backends(hardware), missing_names(), default, no_default, environment)


def _to_json_object(listing: Listing) -> dict[str, Any]:
    hardware, default = listing.hardware, listing.default
    return {
        "schema": SCHEMA,
        "device": {
            "platform": hardware.platform,
            "name": hardware.device_name,
            "capability": None if hardware.capability is None else list(hardware.capability),
            "cudnn": None if hardware.cudnn is None else list(hardware.cudnn),
            "torch": hardware.torch_version,
            "packages": dict(hardware.packages),
            "programs": sorted(hardware.programs),
        },
        "default": None
        if default is None
        else {
            "backend": default.backend,
            "reason": default.reason,
            "rejected": [list(pair) for pair in default.rejected],
        },
        "no_default": listing.no_default,
        "environment": listing.environment,
        "backends": [info.to_dict() for info in listing.backends],
        "not_in_this_version": list(listing.missing),
    }


def show(listing: Listing, *, show_all: bool) -> None:
    from rich.text import Text

    console = console_on_stdout()
    default_name = None if listing.default is None else listing.default.backend
    usable = [info for info in listing.backends if info.usable]
    others = [info for info in listing.backends if not info.usable]
    rows = [(_name_cell(info, default_name), _version_cell(info), *_can_cells(info.capability)) for info in usable]
    title = f"Attention backends on {listing.hardware.describe()}"
    console.print(plain_table(("backend", "version", "dtypes", "head sizes", "can do"), rows, title))
    if others:
        refusals = [(_name_cell(info, None), _why_not(info)) for info in others]
        console.print(plain_table(("backend", "why not, and what to type"), refusals, "Not usable here"))
    if show_all:
        described = [(info.name, _details(info)) for info in listing.backends]
        console.print(plain_table((f"{'backend':{_NAME_WIDTH}}", "what it is"), described, "All backends"))
    if listing.missing:
        names = f"Names that this version has no backend for: {', '.join(listing.missing)}."
        console.print(Text(f"{names}\n"))
    for line in _default_lines(listing):
        console.print(Text(line))


def _name_cell(info: BackendInfo, default_name: str | None) -> str:
    """The name, and below it the other spellings."""
    mark = " *" if info.name == default_name else ""
    spellings = textwrap.wrap(", ".join(info.aliases), _NAME_WIDTH - 2)
    return "\n".join([info.name + mark, *(f"  {line}" for line in spellings)])


def _version_cell(info: BackendInfo) -> str:
    """A version that says more than a number, such as `fa4 4.0.0b36`, on two lines."""
    return (info.version or "").replace(" ", "\n")


def _can_cells(can: Capability) -> tuple[str, str, str]:
    """Its dtypes, head sizes and features."""
    dtypes = [short for name, short in SHORT_DTYPES.items() if name in can.dtypes]
    pairs = [" ".join(dtypes[start : start + 2]) for start in range(0, len(dtypes), 2)]
    return "\n".join(pairs), _head_sizes(can), _features(can)


def _head_sizes(can: Capability) -> str:
    sizes = can.head_sizes
    if sizes.only:
        return "\n".join(textwrap.wrap(" ".join(map(str, sizes.only)), 10))
    if sizes.minimum == 1 and sizes.maximum is None and sizes.multiple == 1:
        return "any"
    bounds = f"to {sizes.maximum}" if sizes.minimum == 1 and sizes.maximum else str(sizes).partition(",")[0]
    if sizes.maximum is None and sizes.minimum > 1:
        bounds = f"from {sizes.minimum}"
    return bounds if sizes.multiple == 1 else f"{bounds}\nby {sizes.multiple}"


def _features(can: Capability) -> str:
    from diffusion_runtime.attention.backends.capability import FEATURES
    from diffusion_runtime.attention.roles import CATEGORIES

    words = [_FEATURE_WORDS.get(feature, feature) for feature in FEATURES if feature in can.features]
    text = ", ".join(words) or "nothing more"
    served = " and ".join(sorted(can.categories))
    return text if can.categories >= set(CATEGORIES) else f"{text};\n{served}-attention only"


def _why_not(info: BackendInfo) -> str:
    return "\n".join([info.reason, f"fix: {info.fix}"] if info.fix else [info.reason])


def _details(info: BackendInfo) -> str:
    lines = [info.summary] if info.summary else []
    if not info.usable:
        can = info.capability
        dtypes, sizes, features = (cell.replace("\n", " ") for cell in _can_cells(can))
        lines.append(f"where it runs ({', '.join(sorted(can.platforms))}): {dtypes}; head sizes {sizes}; {features}")
    if info.options:
        lines.append(f"options: {', '.join(info.options)}")
    return "\n".join(lines)


def _default_lines(listing: Listing) -> list[str]:
    if listing.default is None:
        return [f"No backend can be the default here: {listing.no_default}"]
    lines = [f"* {listing.default.backend} is the {listing.default.reason}: what runs without a choice."]
    lines += [f"  not {name}: {reason}" for name, reason in listing.default.rejected]
    if listing.environment:
        lines.append(f"DIFFUSION_ATTENTION_BACKEND is {listing.environment!r}, which comes before the default.")
    return lines
