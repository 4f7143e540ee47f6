"""Every backend against attention written out in float64, bounded by what rounding the inputs' dtype allows."""

from __future__ import annotations

import functools

import pytest
import torch
from attention_calls import attention_call
from dense_backends import HERE, declares, the
from exact_attention import LAYOUTS, assert_is_exact, exact, random_mask, relative_error, visible_by
from tables import table
from torch._subclasses.fake_tensor import FakeTensorMode

from diffusion_runtime.attention import (
    LocalAttention,
    TokenLayout,
    attention,
    force_attention_backend,
    list_backends,
)
from diffusion_runtime.attention.backends.masks import aligned_rows
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.errors import BackendUnavailableError, ConfigError


@functools.cache
def case(
    layout_name: str, causal: bool, kv_heads: int, scale: float, mask_kind: tuple[bool, tuple[int, ...]] | None = None
) -> tuple[list[torch.Tensor], torch.Tensor | None, tuple[torch.Tensor, torch.Tensor]]:
    """q, k, v, the mask and what comes of them, once for all backends. Whatever lengths hide may hold anything."""
    torch.manual_seed(0)
    layout = LAYOUTS[layout_name]
    q = torch.randn(3, 17, 4, 16)
    k, v = torch.randn(2, 3, 17, kv_heads, 16)
    mask = None if mask_kind is None else random_mask(*mask_kind)
    visible = visible_by(layout, 3, 17, causal)
    # What must not be read would show at once.
    unseen = ~visible.any(dim=1)
    k[unseen], v[unseen] = 1e4, float("nan")
    return [q, k, v], mask, exact(q, k, v, visible, scale, mask)


def features_of(layout_name: str, causal: bool, *others: str) -> list[str]:
    return ["scale", *["causal"][: int(causal)], *["key_padding"][: int(layout_name != "none")], *others]


@table("backend", HERE)
@table("layout_name", LAYOUTS)
@table("causal", [False, True])
@table("return_lse", [False, True])
@table(("kv_heads", "scale"), [(4, None), (2, 0.3)])
def test_against_float64(
    backend: str, layout_name: str, causal: bool, return_lse: bool, kv_heads: int, scale: float | None
) -> None:
    if not declares(backend, *features_of(layout_name, causal, "gqa", *["lse"][: int(return_lse)])):
        return
    qkv, _, expected = case(layout_name, causal, kv_heads, 0.25 if scale is None else scale)
    arguments = {"backend": backend, "layout": LAYOUTS[layout_name], "causal": causal, "scale": scale}
    if return_lse:
        out, lse = attention(*qkv, return_lse=True, **arguments)  # type: ignore[call-overload]
    else:
        out, lse = attention(*qkv, **arguments), None  # type: ignore[call-overload]
    assert_is_exact(out, lse, expected)


@table("backend", HERE)
@table("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@table("head_dim", [16, 64, 72, 128, 256])
def test_error_is_bounded_by_the_rounded_references(backend: str, dtype: torch.dtype, head_dim: int) -> None:
    capability = the(backend).capability
    if str(dtype).removeprefix("torch.") not in capability.dtypes or head_dim not in capability.head_sizes:
        return
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 33, 2, head_dim, dtype=torch.float64).to(dtype) for _ in range(3))
    expected, _ = exact(q, k, v, torch.ones(2, 33, 33, dtype=torch.bool), head_dim**-0.5)
    # The same sum in the working precision, with scores and weights rounded: what a kernel in this dtype may lose.
    scores = (q.transpose(1, 2) * head_dim**-0.5) @ k.permute(0, 2, 3, 1)
    rounded = (torch.softmax(scores, -1) @ v.transpose(1, 2)).transpose(1, 2)
    out = attention(q, k, v, backend=backend)
    assert out.dtype == dtype
    assert relative_error(out, expected) <= 1.5 * relative_error(rounded, expected) + torch.finfo(dtype).eps


@table("backend", HERE)
def test_samples_do_not_see_each_other(backend: str) -> None:
    if not declares(backend, "key_padding"):
        return
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 2, 17, 4, 16)
    layout = TokenLayout((1, 3, 4), num_suffix_tokens=5, valid_lengths=(1, 4))
    together = attention(q, k, v, backend=backend, layout=layout)
    for sample in range(2):
        one = slice(sample, sample + 1)
        alone = TokenLayout((1, 3, 4), num_suffix_tokens=5, valid_lengths=(layout.key_ranges(sample)[0][1] - 12,))
        single = attention(q[one], k[one], v[one], backend=backend, layout=alone)
        assert torch.allclose(together[one], single, atol=1e-6)


@table("backend", HERE)
def test_inputs_may_be_strided_and_are_left_alone(backend: str) -> None:
    torch.manual_seed(3)
    packed = torch.randn(2, 17, 3, 4, 16)
    before = packed.clone()
    strided = attention(*packed.unbind(2), backend=backend)
    assert torch.allclose(strided, attention(*(x.contiguous() for x in packed.unbind(2)), backend=backend), atol=1e-6)
    assert torch.equal(packed, before)


@table("seq_k", [1, 300])
def test_cross_attention_and_long_queries(seq_k: int) -> None:
    torch.manual_seed(4)
    q, k, v = torch.randn(1, 1500, 2, 8), torch.randn(1, seq_k, 2, 8), torch.randn(1, seq_k, 2, 8)
    out, lse = attention(q, k, v, backend="reference", return_lse=True)
    other, other_lse = attention(q, k, v, backend="torch_sdpa", return_lse=True)
    assert torch.allclose(out, other, atol=1e-5)
    assert torch.allclose(lse, other_lse, atol=1e-5)


def test_causal_over_several_chunks_of_queries() -> None:
    torch.manual_seed(6)
    q, k, v = torch.randn(3, 1, 1500, 1, 8)
    out = attention(q, k, v, backend="reference", causal=True)
    assert torch.allclose(out, attention(q, k, v, backend="torch_sdpa", causal=True), atol=1e-5)


def test_merging_two_halves_by_lse_gives_the_whole() -> None:
    torch.manual_seed(5)
    q, k, v = torch.randn(3, 1, 40, 2, 16)
    whole, whole_lse = attention(q, k, v, return_lse=True)
    halves = [attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(0, 13), slice(13, 40))]
    lse = torch.logaddexp(halves[0][1], halves[1][1])
    weights = [torch.exp(half_lse - lse).transpose(1, 2)[..., None] for _, half_lse in halves]
    merged = halves[0][0] * weights[0] + halves[1][0] * weights[1]
    assert torch.allclose(merged, whole, atol=1e-5)
    assert torch.allclose(lse, whole_lse, atol=1e-5)


@table(
    ("shapes", "arguments", "message"),
    [
        ([(1, 4, 2, 8), (1, 4, 2, 16), (1, 4, 2, 16)], {}, "expected q"),
        ([(1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)], {}, "multiple of kv_heads"),
        ([(4, 2, 8), (4, 2, 8), (4, 2, 8)], {}, "expected q"),
        ([(1, 4, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8)], {"causal": True}, "as many queries as keys"),
        ([(1, 4, 2, 8)] * 3, {"layout": TokenLayout((1, 1, 5))}, "describes 5 tokens, k has 4"),
        ([(1, 4, 2, 8)] * 3, {"layout": (1, 2, 2)}, r"layout: expected a TokenLayout, got \(1, 2, 2\)"),
        ([(1, 4, 2, 8)] * 3, {"layout": TokenLayout.text(4, (4, 4))}, "holds 2 samples"),
    ],
)
def test_what_does_not_fit_is_refused(
    shapes: list[tuple[int, ...]], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        attention(*(torch.randn(shape) for shape in shapes), **arguments)  # type: ignore[call-overload]


@table("backend", HERE)
@table("layout_name", LAYOUTS)
@table("causal", [False, True])
@table("boolean", [False, True])
@table("shape", [(3, 4, 17, 17), (1, 4, 17, 17), (3, 1, 1, 17), (1, 1, 17, 17)])
def test_masks_against_float64(
    backend: str, layout_name: str, causal: bool, boolean: bool, shape: tuple[int, ...]
) -> None:
    feature = "boolean_mask" if boolean else "additive_mask"
    if not declares(backend, *features_of(layout_name, causal, "gqa", feature)):
        return
    qkv, mask, expected = case(layout_name, causal, 2, 0.3, (boolean, shape))
    arguments = {"backend": backend, "layout": LAYOUTS[layout_name], "causal": causal, "scale": 0.3, "mask": mask}
    assert_is_exact(attention(*qkv, **arguments), None, expected)  # type: ignore[call-overload]
    if declares(backend, "lse"):
        out, lse = attention(*qkv, return_lse=True, **arguments)  # type: ignore[call-overload]
        assert_is_exact(out, lse, expected)


@table("dtype", [torch.bfloat16, torch.float64])
@table("boolean", [False, True])
def test_masks_in_other_dtypes(dtype: torch.dtype, boolean: bool) -> None:
    torch.manual_seed(8)
    q, k, v = torch.randn(3, 2, 17, 4, 16, dtype=dtype)
    mask = random_mask(boolean, (2, 4, 17, 17), dtype)
    expected = exact(q, k, v, torch.ones(2, 17, 17, dtype=torch.bool), 0.25, mask)
    feature = "boolean_mask" if boolean else "additive_mask"
    for backend in [name for name in HERE if declares(name, feature, "lse")]:
        out, lse = attention(q, k, v, backend=backend, mask=mask, return_lse=True)
        assert_is_exact(out, lse, expected, 1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_a_mask_over_several_chunks_of_queries() -> None:
    torch.manual_seed(9)
    q, k, v = torch.randn(3, 1, 1500, 1, 8)
    mask = random_mask(True, (1, 1, 1500, 1500))
    out = attention(q, k, v, backend="reference", mask=mask)
    assert torch.allclose(out, attention(q, k, v, backend="torch_sdpa", mask=mask), atol=1e-5)


@table("boolean", [False, True])
@table("return_lse", [False, True])
def test_a_masks_values_are_not_read_on_the_host(boolean: bool, return_lse: bool) -> None:
    with FakeTensorMode():
        q, k, v = torch.randn(3, 2, 17, 4, 16).unbind(0)
        mask = torch.rand(2, 1, 1, 17) < 0.5 if boolean else torch.rand(2, 1, 1, 17)
        layout = LAYOUTS["none"]
        attention(q, k, v, backend="torch_sdpa", layout=layout, mask=mask, return_lse=return_lse)  # type: ignore[call-overload]


@table(
    ("mask", "message"),
    [
        (torch.ones(2, 4, 17, dtype=torch.bool), r"fits \[2, 4, 17, 17\], got \[2, 4, 17\]"),
        (torch.ones(3, 1, 1, 17, dtype=torch.bool), r"got \[3, 1, 1, 17\]"),
        (torch.ones(2, 1, 17, 1, dtype=torch.bool), r"got \[2, 1, 17, 1\]"),
        (torch.ones(2, 1, 1, 17, dtype=torch.int64), "boolean mask .* got torch.int64"),
        (torch.ones(2, 1, 1, 17, dtype=torch.float64), "q's dtype torch.float32 .* got torch.float64"),
        (torch.ones(2, 1, 1, 17, dtype=torch.bool, device="meta"), "the mask is on meta, q on cpu"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask: torch.Tensor, message: str) -> None:
    q = torch.randn(2, 17, 4, 16)
    with pytest.raises(ConfigError, match=message):
        attention(q, q, q, mask=mask)
    with pytest.raises(ConfigError, match=message):
        LocalAttention(4, 16)(q, q, q, mask=mask)


def test_a_layer_takes_masks_and_refuses_them_where_its_backend_does(blocky: str) -> None:
    torch.manual_seed(10)
    q, k, v = torch.randn(3, 2, 17, 4, 16)
    mask = random_mask(True, (2, 1, 17, 17))
    expected = attention(q, k, v, backend="reference", mask=mask)
    assert torch.allclose(LocalAttention(4, 16)(q, k, v, mask=mask), expected, atol=1e-6)
    with pytest.raises(BackendUnavailableError, match="cannot do boolean_mask"):
        attention(q, k, v, backend=blocky, mask=mask)
    with force_attention_backend(blocky):
        layer = LocalAttention(4, 16)
        layer(q, k, v)
        with pytest.raises(BackendUnavailableError, match="cannot do additive_mask"):
            layer(q, k, v, mask=torch.zeros(1, 1, 1, 17))


@table("boolean", [False, True])
@table("causal", [False, True])
def test_cudnn_computes_a_single_key_itself_with_its_mask(boolean: bool, causal: bool) -> None:
    torch.manual_seed(11)
    q = torch.randn(2, 1 if causal else 9, 4, 16)
    k, v = torch.randn(2, 2, 1, 2, 16)
    mask = random_mask(boolean, (2, 4, q.shape[1], 1))
    mask[0, 0] = False if boolean else float("-inf")
    call = attention_call(q, k, v, causal=causal, return_lse=True, mask=mask)
    cudnn = find_backend("cudnn_attn")
    assert cudnn is not None
    result = cudnn.run(call)
    expected = exact(q, k, v, torch.ones(2, q.shape[1], 1, dtype=torch.bool), 0.25, mask)
    assert_is_exact(result.out, result.lse, expected)


@table("shape", [(2, 1, 1, 20), (1, 3, 5, 20), (2, 3, 5, 32), (1, 1, 1, 7)])
def test_rows_are_aligned_without_a_change_of_numbers(shape: tuple[int, ...]) -> None:
    bias = torch.randn(shape)
    for given in (bias, bias[..., 1:], bias.transpose(2, 3).contiguous().transpose(2, 3)):
        aligned = aligned_rows(given)
        assert torch.equal(aligned, given)
        strides = zip(aligned.shape[:3], aligned.stride()[:3], strict=True)
        assert all(size == 1 or stride % 16 == 0 for size, stride in strides)
        assert aligned.stride(-1) == 1
    whole = torch.randn(2, 3, 5, 32)
    assert aligned_rows(whole) is whole


def test_mixed_dtypes_are_refused() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ConfigError, match="must share a dtype"):
        attention(q, q.bfloat16(), q)


def test_both_backends_of_every_machine_are_judged() -> None:
    assert {"torch_sdpa", "reference"} <= set(HERE)


def test_an_explicit_backend_of_the_function_runs_or_fails(blocky: str) -> None:
    q = torch.randn(1, 4, 2, 8)
    assert attention(q, q, q, backend=blocky, options={"sparsity": 0.1}).shape == q.shape
    with pytest.raises(BackendUnavailableError, match="cannot do causal"):
        attention(q, q, q, backend=blocky, causal=True)
    with pytest.raises(ConfigError, match="unknown option"):
        attention(q, q, q, options={"sparsity": 0.1})


def test_list_backends_says_what_is_usable(absent: str) -> None:
    listed = {info.name: info for info in list_backends("cpu")}
    assert listed["torch_sdpa"].usable
    assert listed["torch_sdpa"].version == torch.__version__.partition("+")[0]
    assert not listed[absent].usable
    assert listed[absent].fix == "pip install absent"
