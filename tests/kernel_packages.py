"""Stand-ins for kernel packages that need a GPU: their real signatures, computed by torch on a CPU.

They check what they are handed as the packages do, and answer in the packages' own forms: layouts, rounded rows, base-2
log-sum-exps, keys changed in place. Where a package is known to compute something else, its stand-in does so too. It
proves the wrapping and no result: that is for tests on a GPU, and for test_sage_attn_interpreted.py.
"""

from __future__ import annotations

import math
import types
from typing import Any

import torch

from diffusion_runtime.attention.backends.reference import reference_attention

NAN = float("nan")


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, seq, heads, head_dim] in and out; lse [batch, heads, seq_q]."""
    assert q.dim() == k.dim() == v.dim() == 4
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape[1] > 0
    assert not causal or q.shape[1] == k.shape[1]
    return reference_attention(q, k, v, scale=scale, causal=causal)


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_offsets: torch.Tensor,
    k_offsets: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[total, heads, head_dim] in and out; lse [heads, total_q]. Samples without keys come back as garbage."""
    assert q_offsets.dtype == k_offsets.dtype == torch.int32
    out, lse = torch.full_like(q, NAN), torch.full((q.shape[1], len(q)), float("inf"))
    for index in range(len(q_offsets) - 1):
        rows, keys = (slice(int(x[index]), int(x[index + 1])) for x in (q_offsets, k_offsets))
        assert rows.stop - rows.start <= max_q
        assert keys.stop - keys.start <= max_k
        if keys.start < keys.stop:
            one, row_lse = dense(q[None, rows], k[None, keys], v[None, keys], scale, causal)
            out[rows], lse[:, rows] = one[0], row_lse[0]
    return out, lse


def paged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [batch, seq_q, heads, head_dim]; k, v [num_pages, page_size, heads, head_dim], as flash-attn-4 asserts."""
    assert table.dtype == lengths.dtype == torch.int32
    assert table.stride(-1) == 1
    assert table.shape[0] == lengths.shape[0] == q.shape[0]
    assert q.dtype == k.dtype == v.dtype
    outs = []
    for sample, pages in enumerate(table.long()):
        row_k, row_v = (x[pages].flatten(0, 1)[None, : int(lengths[sample])] for x in (k, v))
        outs.append(dense(q[sample : sample + 1], row_k, row_v, scale, False))
    return torch.cat([out for out, _ in outs]), torch.cat([lse for _, lse in outs])


def flash_attn() -> types.ModuleType:
    def flash_attn_func(
        q: Any,
        k: Any,
        v: Any,
        dropout_p: float = 0.0,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: Any = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Any:
        out, lse = dense(q, k, v, softmax_scale, causal)
        # Rows rounded up to a multiple of 128, as versions before 2.6 return them.
        rounded = torch.cat([lse, torch.full((*lse.shape[:2], -lse.shape[2] % 128), NAN)], dim=2)
        return (out, rounded, None) if return_attn_probs else out

    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: Any = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Any = None,
    ) -> Any:
        out, lse = varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
        return (out, lse, None) if return_attn_probs else out

    module = types.ModuleType("flash_attn")
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


def flash_attn_interface(always_returns_lse: bool) -> types.ModuleType:
    """FlashAttention-3, an early build or a later one."""
    module = types.ModuleType("flash_attn_interface")

    def early_func(
        q: Any,
        k: Any,
        v: Any,
        softmax_scale: Any = None,
        causal: bool = False,
        qv: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        window_size: Any = (-1, -1),
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: Any = None,
        deterministic: bool = False,
        sm_margin: int = 0,
    ) -> Any:
        return dense(q, k, v, softmax_scale, causal)

    def later_func(
        q: Any,
        k: Any,
        v: Any,
        softmax_scale: Any = None,
        causal: bool = False,
        qv: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        window_size: Any = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: Any = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Any:
        out, lse = dense(q, k, v, softmax_scale, causal)
        return (out, lse) if return_attn_probs else out

    def early_varlen(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: Any = None,
        seqused_k: Any = None,
        softmax_scale: Any = None,
        causal: bool = False,
        qv: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        window_size: Any = (-1, -1),
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: Any = None,
        deterministic: bool = False,
        sm_margin: int = 0,
    ) -> Any:
        return varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)

    def later_varlen(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: Any = None,
        seqused_k: Any = None,
        softmax_scale: Any = None,
        causal: bool = False,
        qv: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        window_size: Any = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: Any = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Any:
        result = varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
        return result if return_attn_probs else result[0]

    def flash_attn_with_kvcache(
        q: Any,
        k_cache: Any,
        v_cache: Any,
        k: Any = None,
        v: Any = None,
        qv: Any = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        cache_seqlens: Any = None,
        cache_batch_idx: Any = None,
        cache_leftpad: Any = None,
        page_table: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_k_new: Any = None,
        max_seqlen_q: Any = None,
        rotary_seqlens: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: Any = (-1, -1),
        return_softmax_lse: bool = False,
    ) -> Any:
        out, lse = paged(q, k_cache, v_cache, page_table, cache_seqlens, softmax_scale)
        return (out, lse, None, None) if return_softmax_lse else out

    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    module.flash_attn_func = early_func if always_returns_lse else later_func  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = early_varlen if always_returns_lse else later_varlen  # type: ignore[attr-defined]
    return module


def flash_attn_cute() -> types.ModuleType:
    def flash_attn_func(
        q: Any,
        k: Any,
        v: Any,
        qv: Any = None,
        gather_kv_indices: Any = None,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: Any = (None, None),
        learnable_sink: Any = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: Any = None,
        deterministic: bool = False,
        score_mod: Any = None,
        score_mod_bwd: Any = None,
        mask_mod: Any = None,
        aux_tensors: Any = None,
        aux_scalars: Any = None,
        block_sparse_tensors: Any = None,
        block_sparse_tensors_bwd: Any = None,
        return_lse: bool = False,
        gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: Any = None,
    ) -> Any:
        out, lse = dense(q, k, v, softmax_scale, causal)
        return out, lse if return_lse else None

    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        qv: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        max_seqlen_q: Any = None,
        max_seqlen_k: Any = None,
        min_seqlen_k: Any = None,
        seqused_q: Any = None,
        seqused_k: Any = None,
        gather_kv_indices: Any = None,
        page_table: Any = None,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: Any = (None, None),
        learnable_sink: Any = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: Any = None,
        deterministic: bool = False,
        score_mod: Any = None,
        score_mod_bwd: Any = None,
        mask_mod: Any = None,
        block_sparse_tensors: Any = None,
        aux_tensors: Any = None,
        aux_scalars: Any = None,
        return_lse: bool = False,
        scheduler_metadata: Any = None,
        seqlen_k_per_split: Any = None,
        disable_scheduler_metadata: bool = False,
        gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: Any = None,
    ) -> Any:
        if page_table is not None:
            assert cu_seqlens_k is None
            out, lse = paged(q, k, v, page_table, seqused_k, softmax_scale)
            return out, lse if return_lse else None
        assert cu_seqlens_q.stride(0) == cu_seqlens_k.stride(0) == 1
        out, lse = varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
        return out, lse if return_lse else None

    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


def aiter(always_returns_a_tuple: bool) -> types.ModuleType:
    """AITER, an early build or a later one."""

    def result(always: bool, out: Any, lse: Any, return_lse: bool) -> Any:
        parts = (out, lse) if return_lse else (out,)
        return parts if always or return_lse else out

    def early_func(
        q: Any,
        k: Any,
        v: Any,
        dropout_p: float = 0.0,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: Any = (-1, -1),
        alibi_slopes: Any = None,
        deterministic: bool = True,
        return_lse: bool = False,
        return_attn_probs: bool = False,
    ) -> Any:
        return result(True, *dense(q, k, v, softmax_scale, causal), return_lse)

    def later_func(
        q: Any,
        k: Any,
        v: Any,
        dropout_p: float = 0.0,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: Any = (-1, -1, 0),
        bias: Any = None,
        alibi_slopes: Any = None,
        deterministic: bool = True,
        return_lse: bool = False,
        return_attn_probs: bool = False,
        how_v3_bf16_cvt: int = 1,
    ) -> Any:
        return result(False, *dense(q, k, v, softmax_scale, causal), return_lse)

    def early_varlen(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: Any = (-1, -1),
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_lse: bool = False,
        return_attn_probs: bool = False,
        block_table: Any = None,
    ) -> Any:
        made = varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
        return result(True, *made, return_lse)

    def later_varlen(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        min_seqlen_q: int = 0,
        dropout_p: float = 0.0,
        softmax_scale: Any = None,
        logits_soft_cap: float = 0.0,
        causal: bool = False,
        window_size: Any = (-1, -1, 0),
        bias: Any = None,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_lse: bool = False,
        return_attn_probs: bool = False,
        how_v3_bf16_cvt: int = 1,
        block_table: Any = None,
        out: Any = None,
        cu_seqlens_q_padded: Any = None,
        cu_seqlens_k_padded: Any = None,
    ) -> Any:
        assert min_seqlen_q == 0, "shorter samples would be left out"
        made = varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
        return result(False, *made, return_lse)

    module = types.ModuleType("aiter")
    module.flash_attn_func = early_func if always_returns_a_tuple else later_func  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = early_varlen if always_returns_a_tuple else later_varlen  # type: ignore[attr-defined]
    return module


def flashinfer() -> types.ModuleType:
    class BatchPrefillWithRaggedKVCacheWrapper:
        """Plans are counted on the class, with the workspaces they were given."""

        plans: list[int] = []  # noqa: RUF012

        def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
            assert kv_layout == "NHD"
            self.workspace = float_workspace_buffer

        def plan(
            self,
            qo_indptr: Any,
            kv_indptr: Any,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            head_dim_vo: Any = None,
            custom_mask: Any = None,
            packed_custom_mask: Any = None,
            causal: bool = False,
            pos_encoding_mode: str = "NONE",
            use_fp16_qk_reduction: bool = False,
            window_left: int = -1,
            logits_soft_cap: Any = None,
            sm_scale: Any = None,
            rope_scale: Any = None,
            rope_theta: Any = None,
            q_data_type: Any = "float16",
        ) -> None:
            self.plans.append(self.workspace.data_ptr())
            self.offsets = qo_indptr, kv_indptr
            self.form = (num_qo_heads, num_kv_heads, head_dim_qk, q_data_type)
            self.scale, self.causal = sm_scale, causal

        def run(self, q: Any, k: Any, v: Any, return_lse: bool = False) -> Any:
            assert (q.shape[1], k.shape[1], q.shape[2], q.dtype) == self.form
            assert q.is_contiguous()
            assert k.is_contiguous()
            assert v.is_contiguous()
            out, lse = varlen(q, k, v, *self.offsets, 10**9, 10**9, self.scale, self.causal)
            return (out, lse.T / math.log(2)) if return_lse else out

    class BatchPrefillWithPagedKVCacheWrapper:
        """Plans are counted on the class: the pages of each."""

        plans: list[list[int]] = []  # noqa: RUF012

        def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
            assert kv_layout == "NHD"

        def plan(
            self,
            qo_indptr: Any,
            paged_kv_indptr: Any,
            paged_kv_indices: Any,
            paged_kv_last_page_len: Any,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            page_size: int,
            head_dim_vo: Any = None,
            custom_mask: Any = None,
            packed_custom_mask: Any = None,
            causal: bool = False,
            pos_encoding_mode: str = "NONE",
            use_fp16_qk_reduction: bool = False,
            sm_scale: Any = None,
            window_left: int = -1,
            logits_soft_cap: Any = None,
            rope_scale: Any = None,
            rope_theta: Any = None,
            q_data_type: Any = "float16",
            kv_data_type: Any = None,
        ) -> None:
            assert paged_kv_indices.dtype == torch.int32
            assert set(paged_kv_last_page_len.tolist()) == {page_size}
            self.plans.append(paged_kv_indices.tolist())
            self.offsets, self.pages = (qo_indptr, paged_kv_indptr), paged_kv_indices
            self.form = (num_qo_heads, num_kv_heads, head_dim_qk, q_data_type, page_size, kv_data_type)
            self.scale = sm_scale

        def run(self, q: Any, paged_kv_cache: Any, return_lse: bool = False) -> Any:
            k, v = paged_kv_cache
            form = (q.shape[1], k.shape[2], q.shape[2], q.dtype, k.shape[1], k.dtype)
            assert form == self.form
            assert q.is_contiguous()
            queries, pages = (x.tolist() for x in self.offsets)
            outs = []
            for sample in range(len(pages) - 1):
                own = self.pages[pages[sample] : pages[sample + 1]].long()
                rows = [x.to(q.dtype)[own].flatten(0, 1)[None] for x in (k, v)]
                outs.append(dense(q[None, queries[sample] : queries[sample + 1]], *rows, self.scale, False))
            out, lse = torch.cat([o[0] for o, _ in outs]), torch.cat([each[0] for _, each in outs], dim=1)
            return (out, lse.T / math.log(2)) if return_lse else out

    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    module.BatchPrefillWithRaggedKVCacheWrapper = BatchPrefillWithRaggedKVCacheWrapper  # type: ignore[attr-defined]
    return module


def sageattention_1() -> types.ModuleType:
    def sageattn(
        q: Any,
        k: Any,
        v: Any,
        tensor_layout: str = "HND",
        is_causal: bool = False,
        sm_scale: Any = None,
        smooth_k: bool = True,
        **rest: Any,
    ) -> Any:
        assert tensor_layout == "NHD"
        assert not rest
        # A constant added to all keys changes no weight.
        k -= k.mean(dim=1, keepdim=True)
        if not is_causal:
            # Its kernel reads keys in blocks of 64, and counts what the last one holds past the end.
            k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % 64)) for x in (k, v))
        return dense(q, k, v, sm_scale, is_causal)[0]

    module = types.ModuleType("sageattention")
    module.sageattn = sageattn  # type: ignore[attr-defined]
    return module


def sageattention_2() -> types.ModuleType:
    def sageattn(
        q: Any,
        k: Any,
        v: Any,
        tensor_layout: str = "HND",
        is_causal: bool = False,
        sm_scale: Any = None,
        return_lse: bool = False,
        **rest: Any,
    ) -> Any:
        assert tensor_layout == "NHD"
        assert not rest, "it takes anything and ignores it"
        out, lse = dense(q, k, v, sm_scale, is_causal)
        if not return_lse:
            return out
        # The scores lack what the keys' mean adds, which is put back head by head, as builds before 2.2 do it.
        mean = k.mean(dim=1, keepdim=True)
        correction = torch.matmul(q.transpose(1, 2), mean.permute(0, 2, 3, 1)).squeeze(-1)
        scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
        without = dense(q, k - mean, v, sm_scale, is_causal)[1]
        assert torch.allclose(without + correction * scale, lse, atol=1e-4)
        return out, without + correction * scale

    module = types.ModuleType("sageattention")
    module.sageattn = sageattn  # type: ignore[attr-defined]
    return module


def sageattn3() -> types.ModuleType:
    def sageattn3_blackwell(
        q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: bool = False, per_block_mean: bool = True, **rest: Any
    ) -> Any:
        """[batch, heads, seq, head_dim]; as many heads everywhere."""
        assert q.shape[1] == k.shape[1]
        assert attn_mask is None, "it takes a mask and ignores it"
        assert not rest, "it takes anything and ignores it"
        k -= k.mean(dim=-2, keepdim=True)
        return dense(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, is_causal)[0].transpose(1, 2)

    module = types.ModuleType("sageattn3")
    module.sageattn3_blackwell = sageattn3_blackwell  # type: ignore[attr-defined]
    return module


def xformers_ops() -> types.ModuleType:
    class LowerTriangularMask:
        pass

    def attend(q: Any, k: Any, v: Any, attn_bias: Any, p: float, scale: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert p == 0.0
        assert attn_bias is None or isinstance(attn_bias, LowerTriangularMask)
        if q.dim() == 4:
            assert q.shape[2] == k.shape[2]
            return dense(q, k, v, scale, attn_bias is not None)
        assert q.shape[2:] == k.shape[2:] == v.shape[2:]
        results = [dense(q[:, :, g], k[:, :, g], v[:, :, g], scale, attn_bias is not None) for g in range(q.shape[2])]
        return torch.stack([out for out, _ in results], 2), torch.stack([lse for _, lse in results], 1)

    def memory_efficient_attention_forward(
        query: Any, key: Any, value: Any, attn_bias: Any = None, p: float = 0.0, scale: Any = None
    ) -> Any:
        return attend(query, key, value, attn_bias, p, scale)[0]

    def memory_efficient_attention_forward_requires_grad(
        query: Any, key: Any, value: Any, attn_bias: Any = None, p: float = 0.0, scale: Any = None
    ) -> Any:
        out, lse = attend(query, key, value, attn_bias, p, scale)
        # Rows rounded up to a multiple of 32, as its CUTLASS kernel returns them.
        return out, torch.cat([lse, torch.full((*lse.shape[:-1], -lse.shape[-1] % 32), NAN)], dim=-1)

    module = types.ModuleType("xformers.ops")
    module.LowerTriangularMask = LowerTriangularMask  # type: ignore[attr-defined]
    module.memory_efficient_attention_forward = memory_efficient_attention_forward  # type: ignore[attr-defined]
    module.memory_efficient_attention_forward_requires_grad = (  # type: ignore[attr-defined]
        memory_efficient_attention_forward_requires_grad
    )
    return module
