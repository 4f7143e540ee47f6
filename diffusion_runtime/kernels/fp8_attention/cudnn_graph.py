"""cuDNN's attention in 8-bit floats: a graph of package nvidia-cudnn-frontend, one per shape, kept for the process.

From sm_90 on. There a scale holds for a whole tensor, and the output is e4m3 as well.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from diffusion_runtime.kernels.fp8_attention.reference import HIGHEST

# Numbers by which a graph's tensors are told apart.
_Q, _K, _V, _DESCALE_QK, _ONE, _DESCALE_S, _SCALE_S, _DESCALE_V, _SCALE_O, _OUT, _LSE, _AMAX_S, _AMAX_O = range(1, 14)


class GraphForm(NamedTuple):
    """The facts that a graph is built for. q: [batch, heads, seq_q, head_dim]; k: [batch, kv_heads, seq_k, head_dim],
    as sizes; the strides are in elements, and those of v are k's."""

    device: int
    q: tuple[int, ...]
    k: tuple[int, ...]
    q_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    scale: float
    return_lse: bool
    highest: bool = True


class BuiltGraph(NamedTuple):
    """A graph with its plans; workspace_size: bytes; constants: what every call passes besides its tensors."""

    graph: Any
    workspace_size: int
    constants: dict[int, torch.Tensor]


@functools.cache
def _handle(device: int) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@functools.lru_cache(maxsize=64)
def built_graph(form: GraphForm) -> BuiltGraph:
    """Return the graph of a form, built once per process. Raises what cuDNN raises of one that it does not support."""
    import cudnn

    kind = cudnn.data_type
    handle = _handle(form.device)
    graph = cudnn.pygraph(
        io_data_type=kind.FP8_E4M3,
        intermediate_data_type=kind.FLOAT,
        compute_data_type=kind.FLOAT,
        handle=handle,
    )

    def of_numbers(uid: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return graph.tensor(uid=uid, dim=list(sizes), stride=list(strides), data_type=kind.FP8_E4M3)

    def of_scale(uid: int) -> Any:
        return graph.tensor(uid=uid, dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind.FLOAT)

    out, lse, *highest = graph.sdpa_fp8(
        q=of_numbers(_Q, form.q, form.q_strides),
        k=of_numbers(_K, form.k, form.k_strides),
        v=of_numbers(_V, form.k, form.k_strides),
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
    out.set_uid(_OUT).set_output(True).set_dim(list(form.q)).set_stride(list(form.out_strides))
    out.set_data_type(kind.FP8_E4M3)
    if form.return_lse:
        batch, heads, seq, _ = form.q
        lse.set_uid(_LSE).set_output(True).set_dim([batch, heads, seq, 1])
        lse.set_stride([heads * seq, seq, 1, 1]).set_data_type(kind.FLOAT)
    for uid, tensor in zip((_AMAX_S, _AMAX_O) if form.highest else (), highest, strict=form.highest):
        tensor.set_uid(uid).set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(kind.FLOAT)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    numbers = {_ONE: 1.0, _DESCALE_V: 1.0, _SCALE_O: 1.0, _DESCALE_S: 1 / HIGHEST, _SCALE_S: HIGHEST}
    if form.highest:
        numbers |= {_AMAX_S: 0.0, _AMAX_O: 0.0}
    device = torch.device("cuda", form.device)
    constants = {uid: torch.full((1,), number, device=device) for uid, number in numbers.items()}
    return BuiltGraph(graph, graph.get_workspace_size(), constants)


def form_of(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, scale: float, return_lse: bool) -> GraphForm:
    """Return the form of a call of tensors [batch, seq, heads, head_dim] on a GPU."""
    q_bhsd, k_bhsd, out_bhsd = (x.transpose(1, 2) for x in (q, k, out))
    return GraphForm(
        q.device.index,
        tuple(q_bhsd.shape),
        tuple(k_bhsd.shape),
        q_bhsd.stride(),
        k_bhsd.stride(),
        out_bhsd.stride(),
        scale,
        return_lse,
    )


def run_graph(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descale: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    *,
    highest: bool = True,
) -> None:
    """Compute reference.attend: q, k, v, out: e4m3 [batch, seq, heads, head_dim], k's strides and v's alike; descale:
    float32 [1]; out and lse, float32 [batch, heads, seq_q], are written."""
    import cudnn

    form = form_of(q, k, out, scale, lse is not None)._replace(highest=highest)
    graph, workspace_size, constants = built_graph(form)
    handle = _handle(q.device.index)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(q.device).cuda_stream)
    tensors = {**constants, _Q: q, _K: k, _V: v, _DESCALE_QK: descale, _OUT: out}
    if lse is not None:
        tensors[_LSE] = lse
    workspace = torch.empty(max(1, workspace_size), dtype=torch.uint8, device=q.device)
    graph.execute(tensors, workspace, handle=handle)
