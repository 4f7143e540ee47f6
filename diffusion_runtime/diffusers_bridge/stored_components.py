"""Components whose files hold weights in 8 bits or fewer with scales, which diffusers and transformers refuse to read:
modules of their classes, filled with the numbers that our own reader makes of the files. Nothing is written to disk."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diffusion_runtime.core.model_folder import ModelFolder, read_json
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.quantized_text_encoders import titles_of
from diffusion_runtime.text_encoders.loading import encoder_class, encoder_of
from diffusion_runtime.weights.stored_formats.interface import FLOATS
from diffusion_runtime.weights.stored_tensors import Rows, StoredRows, stored_rows
from diffusion_runtime.weights.tensor_files import SafetensorsFile
from diffusion_runtime.weights.weight_files import (
    MARKS,
    STEMS,
    find_weight_files,
    listed,
    need_scales,
    refuse_unmarked,
    stored_dtypes,
)


def stored_formats(files: Sequence[Path], config: Mapping[str, Any]) -> str:
    """Return the formats of the weights in a component's files, where these are read here; empty where its library
    reads them itself: plain numbers, and what a quantization_config of another method says. config: config.json.

    Raises ModelLoadError for files that are cut off or damaged, and for weights that cannot be dequantised.
    """
    dtypes = {name: kind for path in files for name, kind in stored_dtypes(path).items()}
    settings = config.get("quantization_config")
    is_ours = need_scales(dtypes) if settings is None else _method(settings) == MARKS
    if not is_ours:
        return ""
    with ExitStack() as stack:
        # Without a scale that is known the numbers are plain, and a tensor that looks like one has to be the model's.
        return " and ".join(titles_of(_open(files, stack))) or ", ".join(sorted(set(dtypes.values())))


def load_stored(folder: ModelFolder, component: str, entry: Sequence[str], dtype: torch.dtype) -> nn.Module:
    """Build a component of its config.json and fill it, in eval mode, as `from_pretrained` would with plain numbers.

    entry: of model_index.json, [library, class name]. Raises ModelLoadError for files whose tensors are not the
    class's.
    """
    import diffusers

    library, class_name = entry
    place = folder / component
    made_by: Any = encoder_class(class_name) if library == "transformers" else getattr(diffusers, class_name)
    with ExitStack() as stack:
        rows = _open(find_weight_files(place, STEMS[library]), stack)
        state = {
            name: _numbers(row, torch.float32 if keeps_float32(made_by, name) else dtype)
            for name, (row,) in rows.items()
        }
    if library == "transformers":
        module, missing, unexpected = encoder_of(place, made_by, dtype, state)
    else:
        module = _built(made_by, read_json(place / "config.json"), dtype)
        # Not copied: the module's own tensors, which were never written to, are dropped.
        missing, unexpected = module.load_state_dict(state, strict=False, assign=True)
        ignored = made_by._keys_to_ignore_on_load_unexpected or ()
        unexpected = [name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)]
    if missing or unexpected:
        found = [
            f"{what}: {listed(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names
        ]
        raise ModelLoadError(
            f"{place}: the weights do not fit {class_name}; {'; '.join(found)}. Download the folder again"
        )
    filled: nn.Module = module.eval()
    return filled


def keeps_float32(model_class: Any, name: str) -> bool:
    """Return whether a class of diffusers or transformers keeps a parameter in float32 whatever dtype is asked for."""
    return not frozenset(getattr(model_class, "_keep_in_fp32_modules", None) or ()).isdisjoint(name.split("."))


def _method(settings: object) -> object:
    return settings.get("quant_method") if isinstance(settings, dict) else settings


def _open(files: Sequence[Path], stack: ExitStack) -> Rows:
    opened = []
    for path in files:
        opened.append(SafetensorsFile(path))
        stack.callback(opened[-1].close)
        refuse_unmarked(path, {name: head.kind for name, head in opened[-1].heads.items()})
    return stored_rows(opened)


def _numbers(row: StoredRows, dtype: torch.dtype) -> torch.Tensor:
    """Counters and positions stay whole numbers."""
    is_float = row.is_quantized or row.kind in FLOATS
    return row.numbers(dtype).to(dtype) if is_float else row.numbers(torch.int64)


def _built(model_class: Any, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Build a module of diffusers whose numbers are what memory held; tables that its constructor computes are in
    `dtype`, as `from_pretrained` has them."""
    from diffusers.models.modeling_utils import no_init_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights():
            return model_class.from_config(
                {key: value for key, value in config.items() if key != "quantization_config"}
            )
    finally:
        torch.set_default_dtype(before)
