"""The names backends go by. Case and `-`/`_` do not matter; peers' spellings are accepted.

A name may be known here before this version has the backend: choosing it then fails and says so.
"""

from __future__ import annotations

KNOWN_NAMES = (
    "fa",
    "fa2",
    "fa3",
    "fa4",
    "torch_sdpa",
    "cudnn_attn",
    "flashinfer_attn",
    "sage_attn",
    "sage_attn_3",
    "xformers",
    "flex_attn",
    "aiter",
    "sliding_tile_attn",
    "video_sparse_attn",
    "vmoba_attn",
    "sparse_video_gen_2_attn",
)

# Spellings of SGLang, vLLM-Omni and diffusers that differ from ours in more than case.
PEER_SPELLINGS = {
    "flash": "fa",
    "flash_attn": "fa",
    "flash_attention": "fa",
    "flash_attn_2": "fa2",
    "flash_attn_3": "fa3",
    "_flash_3": "fa3",
    "flash_attn_4": "fa4",
    "sdpa": "torch_sdpa",
    "native": "torch_sdpa",
    "cudnn": "cudnn_attn",
    "_native_cudnn": "cudnn_attn",
    "flashinfer": "flashinfer_attn",
    "sage": "sage_attn",
    "sage_attn3": "sage_attn_3",
    "sage3": "sage_attn_3",
    "flex": "flex_attn",
    "sta": "sliding_tile_attn",
    "vsa": "video_sparse_attn",
    "vmoba": "vmoba_attn",
    "svg2": "sparse_video_gen_2_attn",
}


def plain(name: str) -> str:
    """`FLASH-ATTN` as `flash_attn`: the form in which names are compared."""
    return name.strip().lower().replace("-", "_")
