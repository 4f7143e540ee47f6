"""Weight map: the tensors of a Wan-Animate 2 checkpoint that make up each of ours, and names in LoRA files.

diffusers keeps most of the authors' names for this transformer, but for those within attention layers; the authors' own
files have each block in a module around it (`blocks.0.block`).
"""

from __future__ import annotations

from functools import partial

from diffusion_runtime.models.wan.original_format import original_lora_names, original_pieces

transformer_pieces = partial(original_pieces, within_attention=False)

LORA_NAMES = original_lora_names("Wan-Animate 2", within_attention=False, prefixes=("blocks.{}", "blocks.{}.block"))
