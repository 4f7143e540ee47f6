"""The names of diffusers' own attention backends, and whether a choice is one of them. Plain values."""

from __future__ import annotations

# AttentionBackendName of diffusers 0.42; using a name that the installed version lacks raises.
DISPATCHER_NAMES = (
    "flash",
    "flash_hub",
    "flash_varlen",
    "flash_varlen_hub",
    "flash_4_hub",
    "_flash_3",
    "_flash_varlen_3",
    "_flash_3_hub",
    "_flash_3_varlen_hub",
    "aiter_fa2_hub",
    "flex",
    "native",
    "_native_cudnn",
    "_native_efficient",
    "_native_flash",
    "_native_math",
    "_native_npu",
    "_native_xla",
    "sage",
    "sage_hub",
    "sage_blackwell_hub",
    "sage_varlen",
    "_sage_qk_int8_pv_fp8_cuda",
    "_sage_qk_int8_pv_fp8_cuda_sm90",
    "_sage_qk_int8_pv_fp16_cuda",
    "_sage_qk_int8_pv_fp16_triton",
    "xformers",
)


def dispatcher_name(choice: object) -> str | None:
    """Return the diffusers backend that a choice names, in diffusers' spelling; None unless the choice is that one name
    alone."""
    return choice if isinstance(choice, str) and choice in DISPATCHER_NAMES else None
