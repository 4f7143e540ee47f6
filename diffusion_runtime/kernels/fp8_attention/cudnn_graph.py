"""cuDNN's attention in 8-bit floats: a graph of package nvidia-cudnn-frontend, one per shape, kept for the process.

From sm_90 on. There a scale holds for a whole tensor, and the output is e4m3 as well.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import torch

# Numbers by which a graph's tensors are told apart.
_Q, _K, _V, _DESCALE_QK, _ONE, _DESCALE_S, _SCALE_S, _DESCALE_V, _SCALE_O, _OUT, _LSE = range(1, 12)


class GraphForm(NamedTuple):
    """The facts that a graph is built for: contiguous tensors [batch, seq, heads, head_dim]."""

    device: int
    batch: int
    num_q: int
    num_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    return_lse: bool


# Its handle has one stream at a time, so every thread has its own.
_handles = threading.local()


def _handle(device: int) -> Any:
    import cudnn

    held: dict[int, Any] = _handles.__dict__.setdefault("by_device", {})
    if device not in held:
        with torch.cuda.device(device):
            held[device] = cudnn.create_handle()
    return held[device]


def described_graph(form: GraphForm, handle: Any = None) -> Any:
    """Return the graph of a form before cuDNN has chosen kernels for it, which takes no GPU."""
    import cudnn

    kind = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=kind.FP8_E4M3,
        intermediate_data_type=kind.FLOAT,
        compute_data_type=kind.FLOAT,
        handle=handle,
    )

    def heads_first(seq: int, heads: int) -> dict[str, list[int]]:
        dim = form.head_dim
        return {"dim": [form.batch, heads, seq, dim], "stride": [seq * heads * dim, dim, heads * dim, 1]}

    queries, keys = heads_first(form.num_q, form.num_heads), heads_first(form.num_k, form.num_kv_heads)

    def of_numbers(uid: int, layout: dict[str, list[int]]) -> Any:
        return graph.tensor(uid=uid, data_type=kind.FP8_E4M3, **layout)

    def of_scale(uid: int) -> Any:
        return graph.tensor(uid=uid, dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind.FLOAT)

    out, lse, *_ = graph.sdpa_fp8(
        q=of_numbers(_Q, queries),
        k=of_numbers(_K, keys),
        v=of_numbers(_V, keys),
        descale_q=of_scale(_DESCALE_QK),
        descale_k=of_scale(_ONE),
        descale_v=of_scale(_DESCALE_V),
        descale_s=of_scale(_DESCALE_S),
        scale_s=of_scale(_SCALE_S),
        scale_o=of_scale(_SCALE_O),
        generate_stats=form.return_lse,
        attn_scale=form.scale,
        use_causal_mask=False,
    )
    out.set_uid(_OUT).set_output(True).set_dim(queries["dim"]).set_stride(queries["stride"])
    out.set_data_type(kind.FP8_E4M3)
    if form.return_lse:
        lse.set_uid(_LSE).set_output(True).set_dim([form.batch, form.num_heads, form.num_q, 1])
        lse.set_stride([form.num_heads * form.num_q, form.num_q, 1, 1]).set_data_type(kind.FLOAT)
    graph.validate()
    graph.build_operation_graph()
    return graph


@functools.lru_cache(maxsize=1024)
def _built_graph(form: GraphForm) -> tuple[Any, int]:
    """Return the graph of a form with its kernel, built once per process, and the bytes of its workspace. Raises what
    cuDNN raises of one that it does not support."""
    import cudnn

    graph = described_graph(form, _handle(form.device))
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph, graph.get_workspace_size()


def run_graph(
    form: GraphForm,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Compute reference.attend: q, k, v, out: e4m3, contiguous [batch, seq, heads, head_dim]; scales: float32 [16]:
    descale, 1, 1 / 448 and 448, each on 16 bytes of its own; out and lse, float32 [batch, heads, seq_q], are written.
    """
    import cudnn

    graph, workspace_size = _built_graph(form)
    handle = _handle(form.device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(q.device).cuda_stream)
    descale, _, one, _, descale_s, _, scale_s, _ = torch.split_with_sizes(scales, [1, 3] * 4)
    tensors = {
        **{_Q: q, _K: k, _V: v, _OUT: out, _DESCALE_QK: descale, _DESCALE_S: descale_s, _SCALE_S: scale_s},
        **dict.fromkeys((_ONE, _DESCALE_V, _SCALE_O), one),
    }
    if lse is not None:
        tensors[_LSE] = lse
    workspace = torch.empty(max(1, workspace_size), dtype=torch.uint8, device=q.device)
    graph.execute(tensors, workspace, handle=handle)
