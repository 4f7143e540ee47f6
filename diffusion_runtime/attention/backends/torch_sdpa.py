"""torch.nn.functional.scaled_dot_product_attention, with the kernel that torch chooses."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from diffusion_runtime.attention.backends.capability import Capability
from diffusion_runtime.attention.backends.interface import (
    AttentionCall,
    AttentionResult,
    Availability,
    Backend,
    CallForm,
)
from diffusion_runtime.attention.backends.key_ranges import attend_by_ranges
from diffusion_runtime.attention.backends.masks import aligned_rows, as_additive, blank_hidden_rows, hide_later_keys
from diffusion_runtime.attention.backends.reference import reference_attention
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.core.hardware import DTYPES, Hardware, detect_hardware

# What torch answers when asked which kernel it takes; the numbers are those of its SDPBackend enum.
_KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
# In the report where torch does not name its kernel.
_UNTOLD = "torch"
# The kernel of each form of call that was asked about. A run has few forms; a long process may see many sizes.
_known_kernels: dict[tuple[object, ...], str] = {}
_MAX_KNOWN_KERNELS = 512


@register_backend
class TorchSdpaBackend(Backend):
    """The attention that torch ships: torch chooses the kernel, and the report names it."""

    name = "torch_sdpa"
    aliases = ("torch",)
    summary = "torch's scaled_dot_product_attention"
    self_check_platforms = frozenset()
    not_replayed = None
    capability = Capability(
        dtypes=frozenset((*DTYPES, "float64")),
        features=frozenset(
            {"key_padding", "gqa", "causal", "scale", "lse", "boolean_mask", "additive_mask", "cached_keys"}
        ),
    )

    def probe(self, hardware: Hardware) -> Availability:
        return Availability(version=hardware.torch_version)

    def versions(self, hardware: Hardware) -> str:
        # One of the kernels that torch chooses from is cuDNN's.
        return "" if hardware.cudnn is None else f"cuDNN {hardware.cudnn[0]}.{hardware.cudnn[1]}"

    def expected_implementation(self, form: CallForm) -> str | None:
        if form.return_lse:
            kernel = lse_kernel(form.hardware, form.dtype, form.q_shape[3], form.mask is not None)
            return "math with lse" if kernel == "math" else kernel
        if not form.hardware.is_here or (form.mask is not None and form.hardware.platform != "cpu"):
            return None
        return _kernel_of(form)

    def run(self, call: AttentionCall) -> AttentionResult:
        return attend_by_ranges(call, _attend)


def _attend(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> AttentionResult:
    if call.scale is not None and call.scale <= 0:
        # torch's kernels for CPUs hide later keys before they scale, and -inf times 0 or less is NaN or inf.
        q, call = q * call.scale, call._replace(scale=1.0)
    q_bhsd, k_bhsd, v_bhsd = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mask = call.mask
    if mask is not None and causal:
        mask, causal = hide_later_keys(mask, q.shape[1]), False
    if call.return_lse:
        return blank_hidden_rows(_attend_with_lse(call, q_bhsd, k_bhsd, v_bhsd, mask, causal), mask)
    gqa = q.shape[2] != k.shape[2]
    hidden_by = mask
    if mask is not None and q.is_cuda:
        mask = aligned_rows(as_additive(mask, q.dtype))
    kernel = _kernel_name(q_bhsd, k_bhsd, v_bhsd, mask, causal, call.scale, gqa)
    out = F.scaled_dot_product_attention(
        q_bhsd, k_bhsd, v_bhsd, attn_mask=mask, is_causal=causal, scale=call.scale, enable_gqa=gqa
    )
    return blank_hidden_rows(AttentionResult(out.transpose(1, 2), None, kernel), hidden_by)


@functools.cache
def _tells_kernel(device_type: str) -> bool:
    """Return whether torch can be asked which kernel it takes on such devices: MPS and most NPUs lack the operator."""
    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key("aten::_fused_sdp_choice", key)


def _kernel_name(
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> str:
    """The kernel that torch takes for such a call, asked once for each form of call."""
    # In a compiled graph this question, whose answer is no tensor, would be a graph break.
    if torch.compiler.is_compiling() or not _tells_kernel(q_bhsd.device.type):
        return _UNTOLD
    form = (
        q_bhsd.device,
        q_bhsd.dtype,
        q_bhsd.shape,
        k_bhsd.shape,
        q_bhsd.stride(-1) == k_bhsd.stride(-1) == v_bhsd.stride(-1) == 1,
        None if mask is None else (mask.shape, mask.dtype),
        causal,
        torch.is_grad_enabled() and (q_bhsd.requires_grad or k_bhsd.requires_grad or v_bhsd.requires_grad),
        torch.are_deterministic_algorithms_enabled(),
        # The caller may have switched kernels off.
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        tuple(torch._C._get_sdp_priority_order()),
    )
    name = _known_kernels.get(form)
    if name is None:
        if len(_known_kernels) >= _MAX_KNOWN_KERNELS:
            _known_kernels.clear()
        number = torch._fused_sdp_choice(q_bhsd, k_bhsd, v_bhsd, mask, 0.0, causal, scale=scale, enable_gqa=gqa)
        name = _known_kernels[form] = _KERNELS.get(number, _UNTOLD)
    return name


def _kernel_of(form: CallForm) -> str:
    """The kernel that torch takes for such a call, asked with tensors of one row that represent all of them."""
    found = None if form.hardware.platform == "cpu" else torch.accelerator.current_accelerator()
    device = torch.device("cpu") if found is None else found

    def like(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape[-1], dtype=dtype, device=device).expand(shape)

    q, k = (like(shape, form.dtype).transpose(1, 2) for shape in (form.q_shape, form.k_shape))
    mask = None if form.mask is None else like(*form.mask)
    causal = form.causal and mask is None
    scale = None if form.scale is not None and form.scale <= 0 else form.scale
    return _kernel_name(q, k, k, mask, causal, scale, form.q_shape[2] != form.k_shape[2])


def _attend_with_lse(
    call: AttentionCall,
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
) -> AttentionResult:
    """The public function drops the log-sum-exp, so the operators below it are called where one returns it."""
    seq_q, repeats = q_bhsd.shape[2], q_bhsd.shape[1] // k_bhsd.shape[1]
    bias = None if mask is None else as_additive(mask, q_bhsd.dtype)
    kernel = lse_kernel(detect_hardware(str(q_bhsd.device)), q_bhsd.dtype, q_bhsd.shape[-1], bias is not None)
    if q_bhsd.device.type == "cpu" and kernel == "flash":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_bhsd, k_bhsd, v_bhsd, 0.0, causal, attn_mask=bias, scale=call.scale
        )
    elif kernel != "math":
        if repeats > 1:
            k_bhsd, v_bhsd = k_bhsd.repeat_interleave(repeats, 1), v_bhsd.repeat_interleave(repeats, 1)
        if kernel == "flash":
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
                q_bhsd, k_bhsd, v_bhsd, 0.0, causal, scale=call.scale
            )[:2]
        else:
            whole_bias = None if bias is None else aligned_rows(bias).expand(*q_bhsd.shape[:3], k_bhsd.shape[2])
            out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
                q_bhsd, k_bhsd, v_bhsd, whole_bias, True, 0.0, causal, scale=call.scale
            )[:2]
    else:
        q, k, v = (x.transpose(1, 2) for x in (q_bhsd, k_bhsd, v_bhsd))
        out, lse = reference_attention(q, k, v, scale=call.scale, causal=causal, mask=mask)
        return AttentionResult(out, lse.float(), "math with lse")
    return AttentionResult(out.transpose(1, 2), lse[..., :seq_q].float(), kernel)


def lse_kernel(hardware: Hardware, dtype: torch.dtype, head_dim: int, has_bias: bool) -> str:
    """Which of torch's operators returns the log-sum-exp of such a call: flash, efficient, or none of them, `math`.

    Below sm_80 the flash operator does not run at all, and the efficient one takes no bfloat16.
    """
    if hardware.platform == "cpu":
        return "math" if dtype == torch.float64 else "flash"
    half = dtype in (torch.bfloat16, torch.float16)
    if hardware.platform not in ("cuda", "rocm") or not half or head_dim % 8 or head_dim > 256:
        return "math"
    if hardware.capability is not None and hardware.capability < (8, 0):
        return "efficient" if dtype == torch.float16 else "math"
    return "efficient" if has_bias else "flash"
