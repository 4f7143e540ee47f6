"""`models convert`: a pickled checkpoint of a causal Wan becomes a model folder; its LoRA, and weights of RIFE, a
safetensors file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout
from diffusion_runtime.core.spellings import own_name
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.request.interpolation import RIFE
from diffusion_runtime.untrusted.printable import printable

if TYPE_CHECKING:
    from diffusion_runtime.models.conversion.conversion import ConversionReport

SCHEMA = "diffusion_runtime.models.convert/1"
EPILOG = """[bold]Examples[/]

diffusion-runtime models convert self_forcing_dmd.pt sf --as self-forcing --base Wan2.1-T2V-1.3B-Diffusers

diffusion-runtime models convert longlive_base.pt longlive --as longlive --base Wan2.1-T2V-1.3B-Diffusers

diffusion-runtime models convert lora.pt longlive-lora.safetensors

diffusion-runtime models convert flownet.pkl rife.safetensors --as rife
"""
_DTYPES = ("bfloat16", "float16", "float32")


def _option(text: str, name: str, metavar: str | None = None) -> Any:
    return typer.Option(name, help=text, metavar=metavar, show_default=False)


def convert(
    file: Annotated[str, typer.Argument(metavar="FILE.pt", help="A checkpoint that torch.save wrote.")],
    output: Annotated[
        str, typer.Argument(metavar="OUT", help="The folder to write; of a LoRA or RIFE, a .safetensors file.")
    ],
    checkpoint: Annotated[
        str | None, _option("What it is: causvid, self-forcing, longlive, or rife. Not for a LoRA.", "--as", "NAME")
    ] = None,
    base: Annotated[
        str | None,
        _option("A diffusers folder of Wan 2.1: its VAE, text encoder and tokenizer. Not for a LoRA.", "--base", "DIR"),
    ] = None,
    key: Annotated[
        str | None,
        _option("Which weights of the file. Default: generator_ema, or what the checkpoint says.", "--key", "KEY"),
    ] = None,
    dtype: Annotated[
        str | None,
        _option(
            "Of what is written: bfloat16, float16 or float32. Default: bfloat16; rife: float32.", "--dtype", "DTYPE"
        ),
    ] = None,
    copies: Annotated[bool, _option("Copy the parts of --base; links to them otherwise.", "--copy")] = False,
    as_json: options.Json = False,
) -> None:
    """Turn a pickled checkpoint (.pt) of a causal Wan into a folder of safetensors, flownet.pkl of RIFE into a file.

    Only tensors are read (weights_only): a file that asks for anything else is refused, and nothing of it runs.
    """
    is_interpolation = checkpoint == RIFE
    dtype = own_name("dtype", dtype or ("float32" if is_interpolation else "bfloat16"), _DTYPES)
    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype: expected {', '.join(_DTYPES)}, got {dtype}")
    if is_interpolation and base is not None:
        raise ConfigError("--base: weights of RIFE stand alone; leave it out")
    if not is_interpolation and (checkpoint is None) != (base is None):
        given, lacking = ("--as", "--base") if base is None else ("--base", "--as")
        raise ConfigError(f"{given} without {lacking}: a model takes both, a LoRA neither")
    terminal = Terminal()
    with terminal.log():
        from diffusion_runtime.models.conversion.conversion import checkpoint_of, convert_lora, convert_model
        from diffusion_runtime.untrusted.files import user_path

        source, place = user_path(file, "FILE"), user_path(output, "OUT")
        if is_interpolation:
            from diffusion_runtime.models.conversion.interpolation import convert_interpolation

            report = convert_interpolation(source, place, key=key, dtype=dtype)
        elif checkpoint is None or base is None:
            report = convert_lora(source, place, key=key, dtype=dtype)
        else:
            report = convert_model(
                source,
                place,
                checkpoint_of(checkpoint),
                user_path(base, "--base"),
                key=key,
                dtype=dtype,
                copies=copies,
            )
    if as_json:
        put_on_stdout(json_text({"schema": SCHEMA, **report.to_dict()}))
    else:
        show(report)


def show(report: ConversionReport) -> None:
    """One line per fact, and what to type next."""
    from rich.text import Text

    from diffusion_runtime.weights.weight_files import listed

    console = console_on_stdout(soft_wrap=True)
    keys = ", ".join(f"{key} ({count} tensors, {size / 1e9:.2f} GB)" for key, (count, size) in report.keys.items())
    stored = ", ".join(f"{count} {kind}" for kind, count in report.stored.items())
    lines = [
        f"{report.source}: {keys}",
        f"read: {report.key}, {report.num_tensors} tensors ({stored}), {report.num_parameters / 1e9:.3f} B parameters",
        f"written: {report.output}, {report.dtype}, {report.num_bytes / 1e9:.2f} GB",
        *(f"link: {name} -> {place}" for name, place in report.linked.items()),
    ]
    if report.left_out:
        lines.append(f"left out: {len(report.left_out)} tensors for training: {listed(report.left_out)}")
    if report.checkpoint is not None and report.checkpoint.startswith(RIFE):
        lines.append(f"use: --interpolation-path {report.output} --interpolate 2 ({report.checkpoint})")
    elif report.checkpoint is None:
        lines.append(f"use: --lora {report.output}")
    else:
        lines.append(f'run: diffusion-runtime generate "..." --model-path {report.output}')
    for line in lines:
        # Names of keys are the file's.
        console.print(Text(printable(line).replace("\n", " ")))
