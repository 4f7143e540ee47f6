"""Conversion of the authors' pickled weights of RIFE 4.x (`flownet.pkl`) to a safetensors file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from diffusion_runtime.decoders.frame_interpolation import (
    TWICE,
    is_of_network,
    open_interpolation,
    own_name,
    version_of,
)
from diffusion_runtime.errors import ConfigError, ModelLoadError, shown_name
from diffusion_runtime.models.conversion.conversion import (
    DTYPES,
    ConversionReport,
    check_free,
    num_numbers,
    report_of,
    shapes_of,
    write_rows,
    written,
)
from diffusion_runtime.models.conversion.pickle_file import TOP, PickleFile, choose, read_checkpoint
from diffusion_runtime.weights.stored_tensors import stored_rows
from diffusion_runtime.weights.weight_files import SAFETENSORS


def convert_interpolation(source: Path, output: Path, *, key: str | None, dtype: str) -> ConversionReport:
    """Write a safetensors file of pickled weights of RIFE. dtype: one of DTYPES.

    Raises ConfigError for a path or a key that is none, ModelLoadError for a file that is no pickle of tensors, or of
    another network or version, OutputError where the file cannot be written. A failure leaves nothing behind.
    """
    if output.suffix not in SAFETENSORS:
        raise ConfigError(f"OUT: {output}: weights of RIFE become one .safetensors file")
    check_free(output)
    groups = read_checkpoint(source)
    chosen = choose(source, groups, key, (TOP,))
    stored = stored_rows([PickleFile(source, chosen)])
    named = {own_name(name): row for name, row in stored.items()}
    if len(named) != len(stored):
        raise ModelLoadError(f"{source}: {TWICE}")
    rows = {name: row for name, row in named.items() if is_of_network(name)}
    version = version_of(shapes_of(rows), str(source))
    kinds = {each.kind for several in rows.values() for each in several}
    if odd := sorted(kinds - {"F64", "F32", "F16", "BF16"}):
        raise ModelLoadError(f"{source}: expected tensors of float32, float16 or bfloat16, got {shown_name(odd[0])}")

    def write(folder: Path) -> int:
        num_bytes = write_rows(folder / output.name, rows, DTYPES[dtype])
        open_interpolation(str(folder / output.name))
        return num_bytes

    num_bytes = written(output, write, num_numbers(rows) * DTYPES[dtype].itemsize, is_file=True)
    report = report_of(source, output, groups, chosen, rows, dtype, num_bytes, f"rife {version}", {})
    return replace(report, left_out=tuple(name for name in named if name not in rows))
