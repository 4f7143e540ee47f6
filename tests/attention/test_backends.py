"""Every backend against attention written out in float64, bounded by what rounding the inputs' dtype allows."""

from __future__ import annotations

import pytest
import torch
from exact_attention import LAYOUTS, assert_is_exact, exact, relative_error, visible_by

from diffusion_runtime.attention import TokenLayout, attention, list_backends
from diffusion_runtime.errors import BackendUnavailableError, ConfigError

BACKENDS = ["torch_sdpa", "reference"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(("kv_heads", "scale"), [(4, None), (2, 0.3)])
def test_against_float64(
    backend: str, layout_name: str, causal: bool, return_lse: bool, kv_heads: int, scale: float | None
) -> None:
    torch.manual_seed(0)
    layout = LAYOUTS[layout_name]
    q = torch.randn(3, 17, 4, 16)
    k, v = torch.randn(2, 3, 17, kv_heads, 16)
    visible = visible_by(layout, 3, 17, causal)
    # What must not be read would show at once.
    unseen = ~visible.any(dim=1)
    k[unseen], v[unseen] = 1e4, float("nan")
    expected = exact(q, k, v, visible, 0.25 if scale is None else scale)
    arguments = {"backend": backend, "layout": layout, "causal": causal, "scale": scale}
    if return_lse:
        out, lse = attention(q, k, v, return_lse=True, **arguments)  # type: ignore[call-overload]
    else:
        out, lse = attention(q, k, v, **arguments), None  # type: ignore[call-overload]
    assert_is_exact(out, lse, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("head_dim", [16, 64, 72, 128, 256])
def test_error_is_bounded_by_the_rounded_references(backend: str, dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 33, 2, head_dim, dtype=torch.float64).to(dtype) for _ in range(3))
    expected, _ = exact(q, k, v, torch.ones(2, 33, 33, dtype=torch.bool), head_dim**-0.5)
    # The same sum in the working precision, with scores and weights rounded: what a kernel in this dtype may lose.
    scores = (q.transpose(1, 2) * head_dim**-0.5) @ k.permute(0, 2, 3, 1)
    rounded = (torch.softmax(scores, -1) @ v.transpose(1, 2)).transpose(1, 2)
    out = attention(q, k, v, backend=backend)
    assert out.dtype == dtype
    assert relative_error(out, expected) <= 1.5 * relative_error(rounded, expected) + torch.finfo(dtype).eps


@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_do_not_see_each_other(backend: str) -> None:
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 2, 17, 4, 16)
    layout = TokenLayout((1, 3, 4), num_suffix_tokens=5, valid_lengths=(1, 4))
    together = attention(q, k, v, backend=backend, layout=layout)
    for sample in range(2):
        one = slice(sample, sample + 1)
        alone = TokenLayout((1, 3, 4), num_suffix_tokens=5, valid_lengths=(layout.key_ranges(sample)[0][1] - 12,))
        single = attention(q[one], k[one], v[one], backend=backend, layout=alone)
        assert torch.allclose(together[one], single, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_may_be_strided_and_are_left_alone(backend: str) -> None:
    torch.manual_seed(3)
    packed = torch.randn(2, 17, 3, 4, 16)
    before = packed.clone()
    strided = attention(*packed.unbind(2), backend=backend)
    assert torch.allclose(strided, attention(*(x.contiguous() for x in packed.unbind(2)), backend=backend), atol=1e-6)
    assert torch.equal(packed, before)


@pytest.mark.parametrize("seq_k", [1, 300])
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


@pytest.mark.parametrize(
    ("shapes", "arguments", "message"),
    [
        ([(1, 4, 2, 8), (1, 4, 2, 16), (1, 4, 2, 16)], {}, "expected q"),
        ([(1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)], {}, "multiple of kv_heads"),
        ([(4, 2, 8), (4, 2, 8), (4, 2, 8)], {}, "expected q"),
        ([(1, 4, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8)], {"causal": True}, "as many queries as keys"),
        ([(1, 4, 2, 8)] * 3, {"layout": TokenLayout((1, 1, 5))}, "describes 5 tokens, k has 4"),
        ([(1, 4, 2, 8)] * 3, {"layout": TokenLayout.text(4, (4, 4))}, "holds 2 samples"),
    ],
)
def test_what_does_not_fit_is_refused(
    shapes: list[tuple[int, ...]], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        attention(*(torch.randn(shape) for shape in shapes), **arguments)  # type: ignore[call-overload]


def test_mixed_dtypes_are_refused() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ConfigError, match="must share a dtype"):
        attention(q, q.bfloat16(), q)


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
