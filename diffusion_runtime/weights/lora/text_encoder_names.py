"""Names of a text encoder's modules in LoRA files, without the levels that loaders and trainers put around them.

transformers 4 has CLIP's layers in `text_model.`, version 5 has not; a language model's are in `model.`,
`model.language_model.` or `language_model.model.`, as it is loaded with eyes, with a head, or alone.
"""

from __future__ import annotations

import re

_LEVELS = ("text_model", "language_model", "model", "transformer")
# Parts of CLIP's attention in diffusers' older files, and transformers' names for them.
_OLD_PARTS = {"to_q_lora": "q_proj", "to_k_lora": "k_proj", "to_v_lora": "v_proj", "to_out_lora": "out_proj"}
_OLD_PART = re.compile(rf"(?<=[._])(?:{'|'.join(_OLD_PARTS)})$")


def text_module(name: str, *, flattened: bool = False) -> str:
    """The name of a module, or of a tensor, without these levels. flattened: its dots are underscores."""
    separator = "_" if flattened else "."
    while (level := next((each for each in _LEVELS if name.startswith(f"{each}{separator}")), None)) is not None:
        name = name[len(level) + 1 :]
    return _OLD_PART.sub(lambda found: _OLD_PARTS[found[0]], name)


def is_text_encoder(component: str) -> bool:
    """Tell whether a component of a model folder is a text encoder."""
    return component.startswith("text_encoder")
