"""Every dense backend that runs on this CUDA GPU, against float64; the self-test of the others; what the report says.

Backends that compile a kernel for every form take seconds a form, so they walk fewer of them: each dtype, each head
size and each feature once. A test that loses the device is named, and those after it are skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from attention_calls import attention_call
from dense_backends import ALL, COMPILED, DENSE, the

from diffusion_runtime.attention import (
    AttentionContext,
    AttentionPolicy,
    LocalAttention,
    TokenLayout,
    attention,
    list_backends,
)
from diffusion_runtime.attention.backends.calling import run_backend
from diffusion_runtime.attention.backends.capability import AttentionRequirements
from diffusion_runtime.attention.backends.reference import reference_attention
from diffusion_runtime.attention.backends.refusals import refusals
from diffusion_runtime.attention.backends.split_kv import plan_split
from diffusion_runtime.attention.self_test import (
    attention_by_definition,
    device_answers,
    planned_tests,
    run_self_test,
)
from diffusion_runtime.core.hardware import detect_hardware
from diffusion_runtime.errors import BackendUnavailableError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

BACKENDS = {name: the(name) for name in ALL}
SPARSE = [name for name in ALL if name not in DENSE]
FAST = [name for name in DENSE if name not in COMPILED]
MASKING = [name for name in FAST if "boolean_mask" in BACKENDS[name].capability.features]
GRID = (1, 16, 16)
LAYOUTS = {
    "none": None,
    "before": TokenLayout(GRID, num_prefix_tokens=44, valid_lengths=(44, 5, 0)),
    "after": TokenLayout(GRID, num_suffix_tokens=44, valid_lengths=(44, 5, 0)),
    "equal": TokenLayout(GRID, num_prefix_tokens=44, valid_lengths=(7, 7, 7)),
    "text": TokenLayout.text(300, (300, 1, 0)),
}
MASKS = {"keys": (3, 1, 1, 300), "pairs": (1, 1, 300, 300), "heads": (3, 4, 300, 300)}
LOST: list[str] = []


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """After an illegal memory access every later call of a process fails: say which test it was, and spare the rest."""
    if LOST:
        pytest.skip(f"the device was lost in {LOST[0]}")
    yield
    if not device_answers("cuda"):
        LOST.append(request.node.nodeid)
        pytest.fail("this test lost the device")


def visible_keys(layout: TokenLayout | None) -> torch.Tensor | None:
    """bool [batch, seq], True for keys that may be attended to."""
    if layout is None:
        return None
    visible = torch.zeros(3, 300, dtype=torch.bool, device="cuda")
    for sample in range(3):
        for start, stop in layout.key_ranges(sample):
            visible[sample, start:stop] = True
    return visible


def draw_mask(boolean: bool, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Half of the keys are hidden, and all of them from the third query where queries are told apart."""
    seen = torch.rand(shape, device="cuda") < 0.5
    if shape[2] > 1:
        seen[:, :, 2] = False
    if boolean:
        return seen
    return torch.randn(shape, device="cuda").masked_fill(~seen, float("-inf")).to(dtype)


def attend_or_skip(name: str, *tensors: torch.Tensor, **arguments: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out and lse of a backend; the test is skipped with its reason where the backend refuses the call."""
    try:
        result = attention(*tensors, backend=name, **arguments)  # type: ignore[call-overload]
    except BackendUnavailableError as error:
        pytest.skip("; ".join(dict.fromkeys(reason for _, reason in error.reasons)))
    return result if isinstance(result, tuple) else (result, None)


def bound_of(name: str, otherwise: float) -> float:
    """What a backend may err by: what it gives up by design, or rounding."""
    return BACKENDS[name].error_bound_on(detect_hardware("cuda")) or otherwise


def check(name: str, dtype: torch.dtype, head_dim: int, layout_name: str = "none", **arguments: object) -> None:
    if (said := BACKENDS[name].probe(detect_hardware("cuda"))).version is None:
        pytest.skip(said.reason)
    torch.manual_seed(0)
    kv_heads = arguments.pop("kv_heads", 4)
    layout = LAYOUTS[layout_name]
    # Cut out of a fused tensor, as a projection leaves them.
    q, k, v = torch.randn(3, 300, 3, 4, head_dim, device="cuda", dtype=dtype).unbind(2)
    k, v = k[:, :, :kv_heads], v[:, :, :kv_heads]  # type: ignore[misc]
    visible = visible_keys(layout)
    mask = arguments.get("mask")
    exact = {"visible": visible, **{key: arguments[key] for key in ("scale", "causal", "mask") if key in arguments}}
    expected, expected_lse = reference_attention(q.double(), k.double(), v.double(), **exact)  # type: ignore[arg-type]
    rounded, _ = reference_attention(q, k, v, **exact)  # type: ignore[arg-type]
    if visible is not None:
        k[~visible], v[~visible] = 1e4, float("nan")
    before = [x.clone() for x in (q, k, v)]
    mask_before = mask.clone() if isinstance(mask, torch.Tensor) else None
    out, lse = attend_or_skip(name, q, k, v, layout=layout, **arguments)
    assert out.dtype == dtype
    error, floor = (float((x.double() - expected).norm() / expected.norm()) for x in (out, rounded))
    # A kernel rounds its weights too, which the reference does not.
    assert error < bound_of(name, 3 * floor + 1e-3), (error, floor)
    assert (out[expected.abs().sum(-1) == 0] == 0).all()
    if lse is not None:
        assert lse.shape == expected_lse.shape
        assert lse.dtype == torch.float32
        assert torch.equal(lse == float("-inf"), expected_lse == float("-inf"))
        finite = expected_lse > float("-inf")
        # Rounded scores are off in proportion: 0.145 with a scale of 0.2, 1.6 times the usual one (fp8_attn).
        usual = max(1.0, float(arguments.get("scale") or 0.0) * head_dim**0.5)  # type: ignore[arg-type]
        bound = 2e-2 if BACKENDS[name].error_bound is None else 0.1 * usual
        assert (lse[finite] - expected_lse[finite]).abs().max() < bound
    for x, was in zip((q, k, v), before, strict=True):
        assert torch.equal(x.nan_to_num(), was.nan_to_num())
    assert mask_before is None or torch.equal(mask_before, mask)  # type: ignore[arg-type]


def dtypes_and_head_sizes() -> Iterator[tuple[str, torch.dtype, int]]:
    dtypes, sizes = (torch.bfloat16, torch.float16, torch.float32), (64, 72, 96, 128, 256)
    for name in DENSE:
        few = zip((*dtypes, dtypes[0]), (64, 128, 72, 256), strict=True)
        yield from ((name, *form) for form in (few if name in COMPILED else itertools.product(dtypes, sizes)))


@pytest.mark.parametrize(("name", "dtype", "head_dim"), list(dtypes_and_head_sizes()))
def test_dtypes_and_head_sizes(name: str, dtype: torch.dtype, head_dim: int) -> None:
    check(name, dtype, head_dim)


def padded_forms() -> Iterator[tuple[str, str, bool, bool]]:
    for name in DENSE:
        both = ((False, False), (True, True)) if name in COMPILED else itertools.product((False, True), repeat=2)
        yield from ((name, layout_name, *form) for form in both for layout_name in LAYOUTS)


@pytest.mark.parametrize(("name", "layout_name", "return_lse", "causal"), list(padded_forms()))
def test_padding(name: str, layout_name: str, return_lse: bool, causal: bool) -> None:
    check(name, torch.bfloat16, 128, layout_name, return_lse=return_lse, causal=causal)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("layout_name", ["none", "before"])
@pytest.mark.parametrize(("return_lse", "scale"), [(False, None), (True, 0.2)])
def test_grouped_queries_and_scales(name: str, layout_name: str, return_lse: bool, scale: float | None) -> None:
    check(name, torch.bfloat16, 64, layout_name, kv_heads=2, return_lse=return_lse, scale=scale)


@pytest.mark.parametrize("name", MASKING)
@pytest.mark.parametrize("layout_name", ["none", "before", "text"])
@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize(("return_lse", "causal"), [(False, False), (True, False), (False, True), (True, True)])
def test_masks(name: str, layout_name: str, boolean: bool, mask_name: str, return_lse: bool, causal: bool) -> None:
    torch.manual_seed(3)
    mask = draw_mask(boolean, MASKS[mask_name], torch.bfloat16)
    check(name, torch.bfloat16, 128, layout_name, mask=mask, return_lse=return_lse, causal=causal)


@pytest.mark.parametrize("name", sorted(COMPILED))
@pytest.mark.parametrize(
    ("boolean", "mask_name", "layout_name", "return_lse", "causal"),
    [
        (True, "keys", "none", False, False),
        (True, "heads", "before", False, False),
        (False, "pairs", "none", True, False),
        (False, "heads", "after", True, True),
    ],
)
def test_masks_of_compiled_backends(
    name: str, boolean: bool, mask_name: str, layout_name: str, return_lse: bool, causal: bool
) -> None:
    test_masks(name, layout_name, boolean, mask_name, return_lse, causal)


@pytest.mark.parametrize("name", MASKING)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_masks_in_other_dtypes_with_grouped_queries(name: str, dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(4)
    mask = draw_mask(False, MASKS["heads"], dtype)
    check(name, dtype, head_dim, "before", mask=mask, kv_heads=2, scale=0.2, return_lse=True)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("seq_k", [1, 77, 512])
def test_cross_attention(name: str, seq_k: int) -> None:
    torch.manual_seed(1)
    q = torch.randn(2, 1000, 4, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, seq_k, 4, 128, device="cuda", dtype=torch.bfloat16)
    expected, _ = reference_attention(q.double(), k.double(), v.double())
    out, _ = attend_or_skip(name, q, k, v)
    error = float((out.double() - expected).norm() / expected.norm())
    assert error < bound_of(name, 1e-2)


# Below one block of 64 keys, whole blocks, one key more, CLIP's and T5's lengths, and a rest in the thirteenth block.
KEY_COUNTS = (1, 24, 33, 64, 65, 77, 128, 226, 777)


def error_of(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **fields: object) -> tuple[float, str]:
    """The relative error of a call as models make it, and who computed it."""
    call = attention_call(q, k, v, **fields)
    result = run_backend(BACKENDS[name], call)
    expected, _ = attention_by_definition(q, k, v, torch.ones(1, device="cuda", dtype=torch.bool), None)
    return float((result.out.double() - expected).norm() / expected.norm()), result.implementation


def usable_or_skip(name: str, head_dim: int = 64) -> None:
    """Skip, with the reason, what selection refuses here."""
    hardware = detect_hardware("cuda")
    reasons = refusals(name, AttentionRequirements("self", "self", head_dim, "bfloat16", hardware, 4, 4))
    if reasons:
        pytest.skip("; ".join(reasons))


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_number_of_keys_is_within_the_declared_bound(name: str, head_dim: int) -> None:
    usable_or_skip(name, head_dim)
    torch.manual_seed(5)
    wrong = {}
    for num_keys in KEY_COUNTS:
        q = torch.randn(2, 300, 4, head_dim, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, 2, num_keys, 4, head_dim, device="cuda", dtype=torch.bfloat16)
        error, implementation = error_of(name, q, k, v)
        if not error < bound_of(name, 1e-2):
            wrong[num_keys] = (error, implementation)
    assert wrong == {}


@pytest.mark.parametrize("lengths", [(77, 12), (128, 77), (512, 64)])
def test_padding_that_is_cut_to_lengths_leaves_sage_right(lengths: tuple[int, int]) -> None:
    usable_or_skip("sage_attn", 128)
    torch.manual_seed(6)
    q = torch.randn(2, 1000, 4, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 512, 4, 128, device="cuda", dtype=torch.bfloat16)
    out = attention(q, k, v, backend="sage_attn", layout=TokenLayout.text(512, lengths))
    for sample, length in enumerate(lengths):
        kept = [x[sample : sample + 1] for x in (q, k[:, :length], v[:, :length])]
        expected, _ = attention_by_definition(*kept, torch.ones(1, device="cuda", dtype=torch.bool), None)
        error = float((out[sample : sample + 1].double() - expected).norm() / expected.norm())
        assert error < bound_of("sage_attn", 1e-2), (length, error)


def test_what_a_long_sequence_lacks_of_a_whole_block_is_within_the_tolerance() -> None:
    """81 frames of 480p in Wan are 32760 tokens, 8 below a whole block: the package's own kernel serves them."""
    usable_or_skip("sage_attn", 128)
    torch.manual_seed(7)
    q = torch.randn(1, 256, 2, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 32760, 2, 128, device="cuda", dtype=torch.bfloat16)
    error, implementation = error_of("sage_attn", q, k, v)
    assert error < bound_of("sage_attn", 1e-2)
    assert implementation.startswith("sageattention")


@pytest.mark.parametrize("name", FAST)
def test_a_backend_that_is_called_usable_computes(name: str) -> None:
    """Whatever is installed and not refused: one call of it is right, and none raises."""
    usable_or_skip(name)
    torch.manual_seed(8)
    q, k, v = torch.randn(3, 1, 512, 4, 64, device="cuda", dtype=torch.bfloat16)
    error, _ = error_of(name, q, k, v)
    assert error < bound_of(name, 1e-2)


def test_xformers_0_0_35_is_refused_with_torch_2_11() -> None:
    """Its extension was built for torch 2.10: the module imports, and no operator is there."""
    hardware = detect_hardware("cuda")
    if hardware.packages.get("xformers") != "0.0.35" or not hardware.torch_version.startswith("2.11"):
        pytest.skip("for xformers 0.0.35 beside torch 2.11")
    (reason,) = refusals("xformers", AttentionRequirements("self", "self", 64, "bfloat16", hardware, 4, 4))
    assert "flash-attn-4" in reason or "cannot compute on" in reason
    assert not {info.name: info for info in list_backends(hardware)}["xformers"].usable


def test_flashinfer_on_two_streams_at_once() -> None:
    usable_or_skip("flashinfer_attn")
    torch.manual_seed(9)
    inputs = [torch.randn(3, 1, 4096, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    alone = [attention(*qkv, backend="flashinfer_attn") for qkv in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    together: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for stream, qkv, outs in zip(streams, inputs, together, strict=True):
            with torch.cuda.stream(stream):
                outs.append(attention(*qkv, backend="flashinfer_attn"))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for outs, expected in zip(together, alone, strict=True) for out in outs)


@pytest.mark.parametrize("name", DENSE)
def test_a_video_sized_call_equals_torch(name: str) -> None:
    """Lengths of a real model, past every tile size, in bfloat16."""
    torch.manual_seed(2)
    layout = TokenLayout((5, 30, 52), num_suffix_tokens=256, valid_lengths=(31, 200))
    q, k, v = torch.randn(3, 2, 8056, 4, 128, device="cuda", dtype=torch.bfloat16)
    out, _ = attend_or_skip(name, q, k, v, layout=layout)
    expected = attention(q, k, v, backend="torch_sdpa", layout=layout).double()
    assert float((out.double() - expected).norm() / expected.norm()) < bound_of(name, 1e-2)


@pytest.mark.parametrize("name", [*SPARSE, *FAST])
def test_the_self_test_passes(name: str) -> None:
    tests = planned_tests(name, detect_hardware("cuda"))
    if not tests or BACKENDS[name].probe(detect_hardware("cuda")).version is None:
        pytest.skip("nothing of it runs here")
    problems = {}
    # Other dtypes and head sizes are compiled anew, and are the business of other tests.
    for test in (test for test in tests if (test.dtype, test.head_dim) == (tests[0].dtype, tests[0].head_dim)):
        result = run_self_test(test, "cuda")
        if not result.passed:
            problems[test.title] = result.problem
        if not device_answers("cuda"):
            break
    assert problems == {}


@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in {*MASKING, *COMPILED}])
def test_a_mask_is_refused_where_it_is_not_declared(name: str) -> None:
    features = BACKENDS[name].capability.features
    q = torch.randn(1, 288, 2, 64, device="cuda", dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 1, 288, dtype=torch.bool, device="cuda")
    if "boolean_mask" in features:
        pytest.skip("it hands masks to others")
    with pytest.raises(BackendUnavailableError, match="cannot do boolean_mask"):
        attention(q, q, q, backend=name, layout=TokenLayout((4, 8, 9)), mask=mask)


def test_a_masks_values_are_not_waited_for() -> None:
    q = torch.randn(2, 256, 4, 64, device="cuda", dtype=torch.bfloat16)
    layout = TokenLayout((1, 16, 15), num_suffix_tokens=16, valid_lengths=(3, 3))
    masks = [draw_mask(boolean, (2, 1, 1, 256), torch.bfloat16) for boolean in (False, True)]
    for name in ("torch_sdpa", "cudnn_attn"):
        for mask, return_lse in itertools.product(masks, (False, True)):
            attend_or_skip(name, q, q, q, layout=layout, mask=mask, return_lse=return_lse)
            torch.cuda.set_sync_debug_mode("error")
            try:
                attend_or_skip(name, q, q, q, layout=layout, mask=mask, return_lse=return_lse)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_the_report_names_the_kernel_that_ran() -> None:
    q = torch.randn(1, 2048, 8, 128, device="cuda", dtype=torch.bfloat16)
    policy = AttentionPolicy(device="cuda", dtype=torch.bfloat16, environment="torch_sdpa")
    layer = LocalAttention(8, 128, policy=policy)
    context = AttentionContext()
    layer(q, q, q, context)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        layer(q, q, q, context)
    operators = {event.key for event in profile.key_averages()}
    (row,) = context.recorder.report().rows
    assert any(row.implementation in operator for operator in operators), (row, operators)
    assert row.count == 2


@pytest.mark.parametrize("name", FAST)
def test_rows_that_begin_anywhere(name: str) -> None:
    """Rows that do not begin at multiples of 16 bytes, and heads whose numbers are not neighbours."""
    whole = torch.randn(2, 96, 4, 67, dtype=torch.bfloat16, device="cuda")
    swapped = torch.randn(2, 96, 64, 4, dtype=torch.bfloat16, device="cuda").transpose(2, 3)
    wrong = {}
    for form, q in {"even": whole[..., :64], "odd": whole[..., 3:], "swapped": swapped}.items():
        try:
            out = attention(q, q, q, backend=name)
        except BackendUnavailableError:
            continue
        expected = reference_attention(q.double(), q.double(), q.double())[0]
        error = float((out - expected).norm() / expected.norm())
        bound = BACKENDS[name].error_bound or 1e-2
        if not error <= bound:
            wrong[form] = error
    assert wrong == {}


def test_cudnn_gives_gradients() -> None:
    """Its operator returns wrong ones when it is asked for no log-sum-exp."""
    for kv_heads in (4, 2):
        shapes = ((2, 96, 4, 64), (2, 96, kv_heads, 64), (2, 96, kv_heads, 64))
        inputs = [torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True) for shape in shapes]
        gradients = {}
        for name in ("cudnn_attn", "torch_sdpa"):
            attention(*inputs, backend=name).square().sum().backward()
            gradients[name] = [x.grad.float() for x in inputs if x.grad is not None]
            for x in inputs:
                x.grad = None
        for ours, theirs in zip(gradients["cudnn_attn"], gradients["torch_sdpa"], strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < 2e-2


def test_calls_without_tokens() -> None:
    for name in DENSE:
        q = torch.randn(2, 3, 4, 64, dtype=torch.bfloat16, device="cuda")
        try:
            outs = [attention(q, q[:, :0], q[:, :0], backend=name), attention(q[:, :0], q, q, backend=name)]
        except BackendUnavailableError:
            continue
        assert torch.equal(outs[0], torch.zeros_like(q)), name
        assert outs[1].shape == (2, 0, 4, 64), name


def test_flash_attention_4_cuts_the_keys_of_queries_that_would_leave_multiprocessors_idle() -> None:
    if (said := BACKENDS["fa4"].probe(detect_hardware("cuda"))).version is None:
        pytest.skip(said.reason)
    num_processors = torch.cuda.get_device_properties(0).multi_processor_count
    if torch.cuda.get_device_capability() != (9, 0) or plan_split(4680, 20480, 12, 128, num_processors) is None:
        pytest.skip("this GPU computes the call without splitting it")
    torch.manual_seed(0)
    # 444 tiles: of 132 multiprocessors three waves and 48 tiles. An odd number of keys has no equal parts.
    q = torch.randn(1, 4680, 12, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 20480, 12, 128, device="cuda", dtype=torch.bfloat16)
    errors = {}
    for num_keys in (20480, 20479):
        keys, values = k[:, :num_keys], v[:, :num_keys]
        found = run_backend(BACKENDS["fa4"], attention_call(q, keys, values, return_lse=True))
        expected, expected_lse = reference_attention(q[:, -600:].double(), keys.double(), values.double())
        errors[found.implementation] = float((found.out[:, -600:].double() - expected).norm() / expected.norm())
        assert found.lse is not None
        torch.testing.assert_close(found.lse[:, :, -600:], expected_lse.float(), rtol=0, atol=1e-3)
    assert list(errors) == ["flash-attn-4 split-KV", "flash-attn-4"]
    assert errors["flash-attn-4 split-KV"] <= 1.3 * errors["flash-attn-4"], errors


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="FlashInfer has it for sm_90"
)
@pytest.mark.parametrize("form", [(1, 1000, 777, 4, 4, 128), (2, 512, 77, 6, 2, 128), (1, 1, 500, 2, 2, 64)], ids=str)
def test_flashinfers_kernel_in_8_bits(form: tuple[int, ...]) -> None:
    """Compiled by nvcc at the first call of a head size, for a minute and more."""
    pytest.importorskip("flashinfer")
    batch, num_q, num_k, heads, kv_heads, head_dim = form
    shapes = ((num_q, heads), (num_k, kv_heads), (num_k, kv_heads))
    q, k, v = (torch.randn(batch, *shape, head_dim, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    exact, exact_lse = reference_attention(q.double(), k.double(), v.double())
    for scale in (1.0, -1.0):
        signed, options = scale * head_dim**-0.5, {"kernel": "flashinfer"}
        given = {"backend": "fp8_attn", "options": options, "scale": signed}
        out, lse = attention(scale * q, k, v, return_lse=True, **given)
        assert float((out - exact).norm() / exact.norm()) < 0.08
        assert float((lse - exact_lse).abs().max()) < 0.2
        assert torch.equal(out, attention(scale * q, k, v, **given))
