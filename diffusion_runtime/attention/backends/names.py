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
    "flash_attn_hub": "fa",
    "flash_attention": "fa",
    "flash_hub": "fa",
    "flash_varlen": "fa",
    "flash_varlen_hub": "fa",
    "flash_attn_2": "fa2",
    "flash_attn_3": "fa3",
    "flash_attn_3_hub": "fa3",
    "_flash_3": "fa3",
    "_flash_3_hub": "fa3",
    "_flash_varlen_3": "fa3",
    "_flash_3_varlen_hub": "fa3",
    "flash_attn_4": "fa4",
    "flash_4_hub": "fa4",
    "aiter_fa2_hub": "aiter",
    "sdpa": "torch_sdpa",
    "native": "torch_sdpa",
    "_native_efficient": "torch_sdpa",
    "_native_flash": "torch_sdpa",
    "_native_math": "torch_sdpa",
    "cudnn": "cudnn_attn",
    "cudnn_sdpa": "cudnn_attn",
    "torch_cudnn_sdpa": "cudnn_attn",
    "dynamic_cudnn_sdpa": "cudnn_attn",
    "_native_cudnn": "cudnn_attn",
    "flashinfer": "flashinfer_attn",
    "sage": "sage_attn",
    "sage_hub": "sage_attn",
    "sage_varlen": "sage_attn",
    "_sage_qk_int8_pv_fp8_cuda": "sage_attn",
    "_sage_qk_int8_pv_fp8_cuda_sm90": "sage_attn",
    "_sage_qk_int8_pv_fp16_cuda": "sage_attn",
    "_sage_qk_int8_pv_fp16_triton": "sage_attn",
    "sage_attn3": "sage_attn_3",
    "sage3": "sage_attn_3",
    "sage_blackwell_hub": "sage_attn_3",
    "flex": "flex_attn",
    "sta": "sliding_tile_attn",
    "vsa": "video_sparse_attn",
    "fastvideo_vsa": "video_sparse_attn",
    "vmoba": "vmoba_attn",
    "svg2": "sparse_video_gen_2_attn",
}

_TORCH_CHOOSES = "torch_sdpa lets torch choose among its kernels"
_SAGE_CHOOSES = "sage_attn lets SageAttention choose its kernel for the chip"
_INSTALLED = "diffusers takes this kernel from the hub, {} takes the installed package"
# Spellings that say more than the backend they stand for: what is done instead, said once a process.
SPELLING_REMARKS = {
    "_native_efficient": _TORCH_CHOOSES,
    "_native_flash": _TORCH_CHOOSES,
    "_native_math": _TORCH_CHOOSES,
    "_sage_qk_int8_pv_fp8_cuda": _SAGE_CHOOSES,
    "_sage_qk_int8_pv_fp8_cuda_sm90": _SAGE_CHOOSES,
    "_sage_qk_int8_pv_fp16_cuda": _SAGE_CHOOSES,
    "_sage_qk_int8_pv_fp16_triton": _SAGE_CHOOSES,
    **{spelling: _INSTALLED.format(name) for spelling, name in PEER_SPELLINGS.items() if spelling.endswith("_hub")},
}

# Backends of SGLang, vLLM-Omni and diffusers that have no counterpart here: why, and the nearest of ours.
REFUSED_SPELLINGS = {
    "_native_npu": ("it is torch_npu's fused attention, which this runtime does not call", "torch_sdpa"),
    "_native_xla": ("it is torch_xla's flash attention, and this runtime runs on no XLA device", "torch_sdpa"),
    "trtllm_attn": ("it is TensorRT-LLM's attention, which this runtime does not call", "flashinfer_attn"),
    "sla_attn": ("sparse-linear attention needs a model trained with it, and no family here is", "video_sparse_attn"),
    "sage_sla_attn": ("sparse-linear attention needs a model trained with it", "video_sparse_attn"),
    "rainfusion": ("it is a sparse method for Ascend NPUs, which this runtime does not have", "sliding_tile_attn"),
}


def plain(name: str) -> str:
    """`FLASH-ATTN` as `flash_attn`: the form in which names are compared."""
    return name.strip().lower().replace("-", "_")
