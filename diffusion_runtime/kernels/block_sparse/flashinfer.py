"""Block-sparse attention by FlashInfer's Hopper kernel for blocks of 64 x 64 (VariableBlockSparseAttentionWrapper,
backend "cake"; Ye et al., arXiv:2501.01005).

Needs the package flashinfer-python, nvcc and an sm_90 GPU. The kernel is fast and its plans are not: FlashInfer makes
them in Python on the host, 1.8 s of one core for 12 heads of 32,768 tokens at density 0.1, compared with 1 to 2 ms of
kernel. So `auto` never takes it; a plan that is used again is made once.
"""

from __future__ import annotations

import functools
import importlib.util
import weakref
from typing import Any

import torch

from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.core.hardware import detect_hardware
from diffusion_runtime.errors import ConfigError, first_line
from diffusion_runtime.kernels.block_packing import reorder_tokens
from diffusion_runtime.kernels.block_sparse.flash4 import serves
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan
from diffusion_runtime.startup.importing import import_failure

BLOCK, HEAD_DIM, MAX_SELECTED = 64, 128, 64

# Made for a plan and a scale, by the plan's identity; gone with the plan.
_planned: dict[tuple[int, float], Any] = {}


@functools.cache
def package_refusal() -> str | None:
    """Return why flashinfer-python cannot be used in this process, or None. Imports the package if it is installed."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed: pip install 'diffusion-runtime[flashinfer]'"
    failure = import_failure("flashinfer.sparse", "VariableBlockSparseAttentionWrapper")
    failure = failure or import_failure("flashinfer.cake_vsa_sm90", "create_plan")
    return None if failure is None else f"flashinfer-python is installed and cannot be imported: {failure}"


def refusal(q: torch.Tensor, plan: SparsePlan, return_lse: bool = False) -> str | None:
    """Return why this plan cannot be computed here on tensors like q, or None."""
    if not q.is_cuda:
        return f"needs a CUDA GPU, the tensors are on {q.device}"
    if not serves(detect_hardware(str(q.device))):
        return "needs sm_90"
    return refusal_of_plan(q, plan, return_lse) or package_refusal()


def refusal_of_plan(q: torch.Tensor, plan: SparsePlan, return_lse: bool) -> str | None:
    """Return why this plan cannot be computed on any machine, or None."""
    if q.dtype != torch.bfloat16:
        return f"takes bfloat16, not {q.dtype}"
    if q.shape[-1] != HEAD_DIM:
        return f"takes a head size of {HEAD_DIM}, not {q.shape[-1]}"
    if plan.num_heads != plan.num_kv_heads:
        return "takes as many key heads as query heads"
    if return_lse:
        return "returns no log-sum-exp"
    if plan.num_text_tokens:
        return "supports no text beside the grid"
    if plan.row_mask is not None:
        return "supports no row masks"
    if plan.q.num_groups > 1 or plan.kv.num_groups > 1:
        return "needs blocks that all heads share"
    if (plan.q.uniform_block_size, plan.kv.uniform_block_size) != (BLOCK, BLOCK):
        return f"needs blocks of {BLOCK} tokens each"
    most = min(plan.kv_index.shape[2], plan.max_blocks_per_query or plan.kv.num_blocks)
    if most > MAX_SELECTED:
        return f"takes {MAX_SELECTED} key blocks per query block, and this plan may list {most}"
    return None


def block_sparse_flashinfer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: SparsePlan, *, scale: float
) -> torch.Tensor:
    """q, k, v: [B, seq, H, head_dim]. Returns out like q. Waits for the device where the plan is new.

    Raises ConfigError for a query block that lists no key block.
    """
    wrapper = planned(plan, scale)
    batch, seq, heads, head_dim = q.shape
    tokens = (_in_order(x, geometry) for x, geometry in ((q, plan.q), (k, plan.kv), (v, plan.kv)))
    packed = [x.transpose(1, 2).reshape(batch * heads, seq, head_dim).contiguous() for x in tokens]
    out: torch.Tensor = wrapper.run(*packed).view(batch, heads, seq, head_dim).transpose(1, 2)
    return out if plan.q.is_identity else reorder_tokens(out.contiguous(), plan.q.positions()[0])


def planned(plan: SparsePlan, scale: float) -> Any:
    """FlashInfer's wrapper with this plan, made at the first call."""
    key = (id(plan), scale)
    if key not in _planned:
        _planned[key] = _make_plan(plan, scale)
        weakref.finalize(plan, _planned.pop, key, None)
    return _planned[key]


def _make_plan(plan: SparsePlan, scale: float) -> Any:
    from flashinfer.sparse import VariableBlockSparseAttentionWrapper

    # The memory that other backends of the wrapper need; this one looks at its device alone.
    wrapper = VariableBlockSparseAttentionWrapper(torch.empty(1, dtype=torch.uint8, device=plan.device), backend="cake")
    heads = plan.batch * plan.num_heads
    mask = plan.block_mask[plan.group_of.flatten().long()]
    sizes = [
        torch.full((heads, num_blocks), BLOCK, dtype=torch.int32, device="cpu")
        for num_blocks in (plan.q.num_blocks, plan.kv.num_blocks)
    ]
    try:
        wrapper.plan(mask, *sizes, heads, heads, HEAD_DIM, sm_scale=scale, q_data_type=torch.bfloat16)
    except ValueError as error:
        raise ConfigError(f"block-sparse implementation 'flashinfer': {first_line(error)}; use auto") from error
    return wrapper


def _in_order(x: torch.Tensor, geometry: BlockGeometry) -> torch.Tensor:
    """x [B, N, heads, D] block by block, x itself where its tokens are in that order."""
    return x if geometry.is_identity else reorder_tokens(x, geometry.order[0])
