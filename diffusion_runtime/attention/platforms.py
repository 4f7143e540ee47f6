"""What each platform takes when nobody chose: an ordered list of backend names, read off a Hardware value."""

from __future__ import annotations

from diffusion_runtime.hardware import Hardware

# Chips whose fastest dense kernels are cuDNN's, from 9.5 on.
_CUDNN_FIRST = ((10, 0), (10, 3), (12, 0), (12, 1))


def platform_candidates(hardware: Hardware) -> tuple[str, ...]:
    """Backend names in the order of preference for this device; the last one always runs."""
    capability = hardware.capability
    if hardware.platform == "cuda" and capability is not None:
        if capability in _CUDNN_FIRST:
            cudnn = ("cudnn_attn",) if hardware.cudnn is not None and hardware.cudnn >= (9, 5) else ()
            return (*cudnn, "flashinfer_attn", "fa4", "torch_sdpa")
        if (8, 0) <= capability < (10, 0):
            return ("fa", "torch_sdpa")
    if hardware.platform == "rocm":
        return ("fa", "torch_sdpa")
    return ("torch_sdpa",)
