"""Block-sparse attention: checks, the choice of the implementation, and one result type for all."""

from __future__ import annotations

from typing import NamedTuple

import torch

from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.core.packed_tokens import TAIL_ROWS, PackedTokens
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_packing import row_width
from diffusion_runtime.kernels.block_sparse import flash4, flashinfer, gathered, gluon, triton
from diffusion_runtime.kernels.block_sparse.plan import PooledBranch, SparsePlan, add_branch
from diffusion_runtime.kernels.block_sparse.pooled_tail import BlockMeans
from diffusion_runtime.kernels.block_sparse.reference import block_sparse_reference

IMPLEMENTATIONS = ("reference", "triton", "gluon", "gathered", "flash4", "flashinfer")


class BlockSparseResult(NamedTuple):
    """out: [B, seq, H, head_dim] in q's dtype; lse: natural log, float32, [B, H, seq], or None; implementation: which
    computed it."""

    out: torch.Tensor
    lse: torch.Tensor | None
    implementation: str


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SparsePlan,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    branch: PooledBranch | None = None,
    packed: PackedTokens | None = None,
    means: BlockMeans | None = None,
    implementation: str = "auto",
) -> BlockSparseResult:
    """softmax(scale q k^T) v over the pairs that `plan` keeps, plus `branch`.

    q: [B, seq, H, head_dim]; k, v: [B, seq, kv_heads, head_dim]; scale: None is 1 / sqrt(head_dim). A query that
    sees no key gives 0 and a log-sum-exp of -inf; the log-sum-exp does not include `branch`.
    packed: q, k and v as pack_tokens gives them in the plan's own geometries and text lengths, for planners that
    read every token anyway: see reads_packed_rows. Other implementations read q, k and v.
    means: of the plan's key blocks, for planners that have them and rows that are not packed with them; the kernels
    read them for a pooled tail, and compute them where they are not given.
    implementation: one of IMPLEMENTATIONS; `auto` is the fastest that can compute this plan on this device,
    and never `flashinfer`, whose plans are made on the host.

    Only the reference computes gradients: the others refuse inputs that require them while gradients are recorded.

    Raises ConfigError when the tensors or the packed rows do not fit the plan, the implementation that was asked for
    cannot run, or gradients would be lost.
    """
    _check(q, k, v, plan)
    if packed is not None:
        _check_packed(packed, q, plan)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    chosen = _choose(implementation, q, plan, return_lse)
    lse: torch.Tensor | None
    if chosen != "reference":
        _refuse_gradients(chosen, q, k, v, branch)
    if chosen == "reference":
        out, lse = block_sparse_reference(q, k, v, plan, scale=scale)
        lse = lse.float()
    elif chosen == "triton":
        out, lse = triton.block_sparse_triton(q, k, v, plan, scale=scale, branch=branch, packed=packed, means=means)
        branch = None
    elif chosen == "gluon":
        out, lse = gluon.block_sparse_gluon(q, k, v, plan, scale=scale, branch=branch, packed=packed)
        branch = None
    elif chosen == "gathered":
        out, lse = gathered.block_sparse_gathered(q, k, v, plan, scale=scale, packed=packed, means=means)
    elif chosen == "flashinfer":
        out, lse = flashinfer.block_sparse_flashinfer(q, k, v, plan, scale=scale), None
    else:
        out, lse = flash4.block_sparse_flash4(q, k, v, plan, scale=scale)
    if branch is not None:
        out = add_branch(out, plan, branch)
    return BlockSparseResult(out, lse if return_lse else None, chosen)


def refusal(implementation: str, q: torch.Tensor, plan: SparsePlan, return_lse: bool = False) -> str | None:
    """Return why an implementation cannot compute this plan on these tensors, or None."""
    if implementation == "reference":
        return None
    if plan.pooled_tail and implementation in ("flash4", "flashinfer"):
        return "pools no keys: plans with a pooled tail run on triton, gathered and reference"
    if implementation == "gathered":
        return gathered.refusal(q, plan)
    if implementation == "flashinfer":
        return flashinfer.refusal(q, plan, return_lse)
    if implementation == "gluon":
        return gluon.refusal(q, plan)
    return triton.refusal(q, plan) if implementation == "triton" else flash4.refusal(q, plan)


def reads_packed_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_geometry: BlockGeometry,
    kv_geometry: BlockGeometry,
    num_grid_tokens: int,
    pooled_tail: bool = False,
) -> bool:
    """Return True if `auto` would pack q, k and v for a plan of these blocks without row masks."""
    takes = takes_packed_rows(q, q_geometry, kv_geometry, num_grid_tokens, pooled_tail)
    return takes and not triton.reads_in_place(q, k, v, q_geometry, kv_geometry)


def takes_packed_rows(
    q: torch.Tensor,
    q_geometry: BlockGeometry,
    kv_geometry: BlockGeometry,
    num_grid_tokens: int,
    pooled_tail: bool = False,
) -> bool:
    """Return True if `auto` computes a plan of these blocks without row masks on packed rows when it is given them."""
    is_flash4 = not pooled_tail and flash4.refusal_of_blocks(q, q_geometry, kv_geometry, num_grid_tokens) is None
    return not is_flash4 and triton.refusal_of_size(q, q_geometry.num_tokens) is None


def _choose(implementation: str, q: torch.Tensor, plan: SparsePlan, return_lse: bool) -> str:
    if implementation == "auto":
        names = ("flash4", "gathered", "gluon", "triton", "reference")
        return next(name for name in names if refusal(name, q, plan) is None)
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(f"implementation: expected auto, {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    reason = refusal(implementation, q, plan, return_lse)
    if reason is not None:
        raise ConfigError(f"block-sparse implementation {implementation!r} cannot run here: {reason}; use auto")
    return implementation


def _refuse_gradients(
    implementation: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, branch: PooledBranch | None
) -> None:
    inputs = {"q": q, "k": k, "v": v}
    if branch is not None:
        inputs |= {"gate": branch.gate, "pooled": branch.pooled}
    needing = [name for name, tensor in inputs.items() if tensor.requires_grad]
    if needing and torch.is_grad_enabled():
        raise ConfigError(
            f"block-sparse attention by {implementation} computes no gradients, and {', '.join(needing)} require "
            "them, so they would be lost; call it under torch.no_grad() or torch.inference_mode(), train with a dense "
            "backend such as torch_sdpa, or call block_sparse_attention with implementation='reference'"
        )


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: SparsePlan) -> None:
    expected_q = (plan.batch, plan.num_tokens, plan.num_heads)
    expected_kv = (plan.batch, plan.num_tokens, plan.num_kv_heads)
    if q.shape[:3] != expected_q or k.shape[:3] != expected_kv or v.shape != k.shape or k.shape[3] != q.shape[3]:
        raise ConfigError(
            f"block-sparse attention: the plan of {plan.method} is for q {expected_q} and k, v {expected_kv} (batch, "
            f"seq, heads), got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if q.device != plan.device:
        raise ConfigError(f"block-sparse attention: q is on {q.device}, the plan on {plan.device}; use plan.to()")


def _check_packed(packed: PackedTokens, q: torch.Tensor, plan: SparsePlan) -> None:
    # Rows in another order would give wrong numbers; comparing orders by value would synchronise with the device.
    if packed.q_geometry is not plan.q or packed.kv_geometry is not plan.kv:
        raise ConfigError(
            f"block-sparse attention: the rows were packed in other geometries than those of {plan.method}"
        )
    width, rows = row_width(q.shape[3]), plan.batch * plan.num_tokens
    expected_q = (rows * plan.num_heads + TAIL_ROWS, width)
    expected_kv = (rows * plan.num_kv_heads + TAIL_ROWS, width)
    if packed.q.shape != expected_q or packed.k.shape != expected_kv or packed.q.dtype != q.dtype:
        raise ConfigError(
            f"block-sparse attention: expected packed rows of {q.dtype}, q {expected_q} and k, v {expected_kv}, got "
            f"{packed.q.dtype}, q {tuple(packed.q.shape)} and k {tuple(packed.k.shape)}"
        )
