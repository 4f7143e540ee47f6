"""What a file of weights holds, from its head alone: family, format, how tensors are stored."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion_runtime.models.fp8_scales import find_scales
from diffusion_runtime.models.lora.keys import parse_key
from diffusion_runtime.models.registry import lora_names_of_families
from diffusion_runtime.models.tensor_files import SafetensorsFile
from diffusion_runtime.models.tensor_names import families_of_tensors, transformer_tensors
from diffusion_runtime.models.transformer_files import open_tensor_file
from diffusion_runtime.models.weight_files import FLOAT8_KINDS, GGUF, PREFIXES


@dataclass(frozen=True)
class WeightSummary:
    """prefix: in front of the transformer's tensors, empty for none. families: that it may be for, empty for none that
    is known. kinds: how many tensors are stored as what. scales: of 8-bit weights, None where there are none.
    num_others: tensors of other components."""

    path: Path
    format: str
    families: tuple[str, ...]
    prefix: str
    num_tensors: int
    num_others: int
    kinds: Mapping[str, int]
    scales: str | None


def holds_weights(path: str) -> bool:
    """Whether a file is one of weights rather than a LoRA. Raises ModelLoadError for a safetensors file that cannot be
    read."""
    if path.endswith(GGUF):
        return True
    if not path.endswith(".safetensors") or not Path(path).is_file():
        return False
    with contextlib.closing(SafetensorsFile(Path(path))) as file:
        return bool(file.heads) and not any(parse_key(name) for name in file.heads)


def summarise_weights(path: Path) -> WeightSummary:
    """Raises ModelLoadError for a file that cannot be read, or whose tensors are stored in a way that is not."""
    with contextlib.ExitStack() as stack:
        file = open_tensor_file(path, "FILE", stack)
        scales = find_scales([file])
        names = transformer_tensors(tuple(file.heads))
        weights = [name for name in names if name not in scales.unread]
        prefix = next((prefix for prefix in PREFIXES if names and names[0].startswith(prefix)), "")
        return WeightSummary(
            path=path,
            format="GGUF" if file.is_gguf else "safetensors",
            families=families_of_tensors({name: file.heads[name].shape for name in weights}, lora_names_of_families()),
            prefix=prefix,
            num_tensors=len(weights),
            num_others=len(file.heads) - len(names),
            kinds=dict(Counter(file.heads[name].kind for name in weights).most_common()),
            scales=_scales_text(
                [scale.num_numbers for scale in scales.of.values()],
                has_float8=any(file.heads[name].kind in FLOAT8_KINDS for name in weights),
            ),
        )


def _scales_text(sizes: Sequence[int], *, has_float8: bool) -> str | None:
    """sizes: how many numbers each scale has."""
    by_row = sum(size > 1 for size in sizes)
    counted = [
        f"{number} {how}" for number, how in ((len(sizes) - by_row, "per tensor"), (by_row, "per row")) if number
    ]
    return ", ".join(counted) or ("none: a plain cast" if has_float8 else None)
