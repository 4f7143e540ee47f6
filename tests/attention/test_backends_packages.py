"""What backends hand to packages that need a GPU, and what they make of the answers.

The packages are stand-ins (kernel_packages): only the wrapping is proved here, and only for what is declared. The
numbers of the real packages are proved in test_backends_gpu.py.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import kernel_packages
import pytest
import torch
from attention_calls import attention_call
from exact_attention import LAYOUTS, assert_is_exact, exact, visible_by
from machines import cuda
from tables import table

from diffusion_runtime.attention import AttentionCall, LayerInfo, StepInfo
from diffusion_runtime.attention.backends import (
    aiter,
    calling,
    fa2,
    fa3,
    fa4,
    flashinfer_attn,
    fp8_attn,
    sage_attn,
    sage_attn_3,
    xformers,
)
from diffusion_runtime.attention.backends.calling import numbers_of_keys, run_backend
from diffusion_runtime.attention.backends.capability import KeyCounts
from diffusion_runtime.attention.backends.interface import Backend, CallForm
from diffusion_runtime.attention.backends.reference import reference_attention
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.attention.backends.split_kv import KeySplit
from diffusion_runtime.attention.backends.stored import StoredKeysReader, attend_parts
from diffusion_runtime.attention.cache.plan import CachePlan
from diffusion_runtime.attention.cache.stored import KeyParts, PageFormat, StoredForm, StoredKeys
from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.attention.forward_plans import ForwardPlan, PlanLimits, VideoPlans
from diffusion_runtime.core.hardware import Hardware, detect_hardware
from diffusion_runtime.core.token_layout import CachedLayout, TokenLayout
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.startup.importing import import_failure

# A package, with its version where versions differ -> our backend, what that imports, and the stand-in.
PACKAGES: dict[str, tuple[str, str, Callable[[], types.ModuleType]]] = {
    "fa2": ("fa2", "flash_attn", kernel_packages.flash_attn),
    "fa3": ("fa3", "flash_attn_interface", lambda: kernel_packages.flash_attn_interface(False)),
    "fa3 early": ("fa3", "flash_attn_interface", lambda: kernel_packages.flash_attn_interface(True)),
    "fa4": ("fa4", "flash_attn.cute", kernel_packages.flash_attn_cute),
    "aiter": ("aiter", "aiter", lambda: kernel_packages.aiter(False)),
    "aiter early": ("aiter", "aiter", lambda: kernel_packages.aiter(True)),
    "flashinfer": ("flashinfer_attn", "flashinfer", kernel_packages.flashinfer),
    "sage 1.0.6": ("sage_attn", "sageattention", kernel_packages.sageattention_1),
    "sage 2.2.0": ("sage_attn", "sageattention", kernel_packages.sageattention_2),
    "sage 3": ("sage_attn_3", "sageattn3", kernel_packages.sageattn3),
    "xformers": ("xformers", "xformers.ops", kernel_packages.xformers_ops),
}
CACHES = (
    *(module._kernels for module in (aiter, fa2, fa3, fa4)),
    fa3._paged_kernel,
    *(sage_attn._kernel, sage_attn_3._kernel, xformers._operators, calling._key_counts, import_failure),
)


@contextmanager
def stand_in(package: str) -> Iterator[Backend]:
    """The backend of a package, named as in PACKAGES, that is a stand-in meanwhile."""
    name, module, make = PACKAGES[package]
    parent, version = module.partition(".")[0], package.rpartition(" ")[2]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(flashinfer_attn, "_WORKSPACE_SIZE", 64)
        made = make()
        if parent != module:
            holder = types.ModuleType(parent)
            setattr(holder, module.rpartition(".")[2], made)
            monkeypatch.setitem(sys.modules, parent, holder)
        monkeypatch.setitem(sys.modules, module, made)
        # Asked before the versions are made up: the answer is kept for the process.
        detect_hardware("cpu")
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
        for cache in CACHES:
            cache.cache_clear()
        found = find_backend(name)
        assert found is not None
        try:
            yield found
        finally:
            for cache in CACHES:
                cache.cache_clear()


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with stand_in(request.param) as found:
        yield found


FEATURES = ("plain", "gqa", "causal", "scale", "lse", "gqa+scale+lse", "causal+lse")


def features_of(feature: str) -> frozenset[str]:
    return frozenset(feature.split("+")) - {"plain"}


def declared_cases() -> Iterator[tuple[str, str]]:
    """Every package with everything that its version declares."""
    for name, (backend_name, _, _) in PACKAGES.items():
        backend = find_backend(backend_name)
        assert backend is not None
        capability = sage_attn._VERSION_1 if name == "sage 1.0.6" else backend.capability
        yield from ((name, feature) for feature in FEATURES if features_of(feature) <= capability.features)


def make_call(layout_name: str, **arguments: object) -> AttentionCall:
    torch.manual_seed(0)
    # Cut out of one fused tensor, so that every stride but the last is not what it looks like.
    q, k, v = torch.randn(3, 17, 3, 4, 64).unbind(2)
    layout = LAYOUTS[layout_name]
    unseen = ~visible_by(layout, 3, 17, causal=False).any(dim=1)
    k[unseen], v[unseen] = 1e4, float("nan")
    if arguments.pop("gqa", False):
        k, v = k[:, :, ::2], v[:, :, ::2]
    return attention_call(q, k, v, layout=layout, **arguments)


# Without padding, and samples of other numbers of keys: what else layouts ask for is judged in test_key_ranges.py.
@table(("package", "feature"), declared_cases())
@table("layout_name", ["none", "prefix"])
def test_what_is_declared_is_what_comes_out(package: str, layout_name: str, feature: str) -> None:
    features = features_of(feature)
    call = make_call(
        layout_name,
        gqa="gqa" in features,
        causal="causal" in features,
        scale=0.2 if "scale" in features else None,
        return_lse="lse" in features,
    )
    before = [x.clone() for x in (call.q, call.k, call.v)]
    with stand_in(package) as backend:
        # Seventeen keys are none of version 1's, whose calls go elsewhere; the others' wrappers are what is tested.
        result = run_backend(backend, call) if backend.capability.key_counts.block > 1 else backend.run(call)
    expected = exact(
        call.q, call.k, call.v, visible_by(call.layout, 3, 17, call.causal), 0.125 if call.scale is None else call.scale
    )
    assert (result.lse is not None) == call.return_lse
    assert_is_exact(result.out, result.lse, expected)
    for x, was in zip((call.q, call.k, call.v), before, strict=True):
        assert torch.equal(x.nan_to_num(), was.nan_to_num())


@pytest.mark.parametrize("backend", ["flashinfer"], indirect=True)
def test_flashinfer_plans_once_per_form_and_request_in_one_workspace(backend: Backend) -> None:
    state = RequestCache()
    for layout_name in ("none", "suffix", "none", "suffix", "suffix"):
        for _layer in range(3):
            backend.run(make_call(layout_name)._replace(state=state))
    plans = sys.modules["flashinfer"].BatchPrefillWithRaggedKVCacheWrapper.plans
    assert len(plans) == 2
    assert len(set(plans)) == 1
    # Nothing outlives the request.
    backend.run(make_call("none"))
    assert len(plans) == 3


@pytest.mark.parametrize("backend", ["flashinfer"], indirect=True)
def test_flashinfer_has_a_workspace_for_every_stream(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams run at once: what one writes into its scratch space the other must not read."""
    state = RequestCache()
    for stream in (7, 8, 7, 8):
        monkeypatch.setattr(flashinfer_attn, "_stream", lambda device, stream=stream: stream)
        backend.run(make_call("none")._replace(state=state))
    plans = sys.modules["flashinfer"].BatchPrefillWithRaggedKVCacheWrapper.plans
    assert len(plans) == len(set(plans)) == 2


@table("package", ["fa3", "fa4", "flashinfer"])
@table("num_dropped", [0, 2])
def test_pages_are_handed_over_by_their_table(package: str, num_dropped: int) -> None:
    """Pages in any order, of each sample its own; a forward pass of three layers is prepared once, and another pass
    over the same pages is not planned again."""
    generator = torch.Generator().manual_seed(num_dropped)
    q = torch.randn(2, 5, 4, 64, generator=generator)
    # Of a pool of more pages than are in sight.
    keys, values = torch.randn(2, 12, 3, 2, 64, generator=generator)
    pages = torch.randperm(12, generator=generator)[:10].view(2, 5)[:, num_dropped:]
    form = StoredForm(PageFormat(3, q.dtype), tuple(map(tuple, pages.tolist())))
    stored = StoredKeys(keys, values, pages.int(), form)
    # Of the call's own keys nothing is read.
    own = torch.full((2, 5, 2, 64), float("nan"))
    in_a_row = [x[pages].flatten(1, 2) for x in (keys, values)]
    cache = CachePlan(0, 1, 5, "denoise", (0,), (0,), (0,), 3, 1)
    plans, outs = VideoPlans(), []
    with stand_in(package) as backend:
        assert isinstance(backend, StoredKeysReader)
        for scale in (None, None, 0.3):
            plans.start_pass()
            for _layer in range(3):
                call = attention_call(q, own, own, scale=scale, return_lse=True)
                limits = PlanLimits(None, None, 2, 5, 15, 4, 2, 64, q.dtype, q.device, scale)
                if backend.prepares:
                    plan = ForwardPlan(limits, StepInfo(), cache, form)
                    call = call._replace(prepared=plans.of(backend, plan))
                result = attend_parts(backend, call, KeyParts(stored), partial(run_backend, backend))
            everything = torch.ones(2, 5, in_a_row[0].shape[1], dtype=torch.bool)
            expected = exact(q, *in_a_row, everything, 0.125 if scale is None else scale)
            assert_is_exact(result.out, result.lse, expected)
            outs.append(result.out)
        if package == "flashinfer":
            made = sys.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper.plans
            assert made == [pages.flatten().tolist()] * 2
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("backend", ["flashinfer"], indirect=True)
def test_flashinfer_plans_calls_to_a_cache_once_per_forward_pass(backend: Backend) -> None:
    """In one wrapper for all lengths of a cache that fills; pages that other layers do not have get a plan of their
    own."""
    plans = VideoPlans()
    wrappers = set()
    for num_frames in (1, 1, 2, 3, 3):
        plans.start_pass()
        seen = tuple(range(num_frames))
        cache = CachePlan(num_frames - 1, 1, 5, "denoise", seen[-1:], seen, seen, 3, 1)
        q, k, v = (torch.randn(2, 5 * n, 4, 64) for n in (1, num_frames, num_frames))
        layout = CachedLayout((num_frames, 1, 5), num_query_frames=1, key_frames=seen)
        for _layer in range(3):
            call = attention_call(q, k, v, layout=layout)
            limits = PlanLimits(None, TokenLayout((3, 1, 5)), 2, 5, 15, 4, 4, 64, q.dtype, q.device)
            prepared = plans.of(backend, ForwardPlan(limits, StepInfo(), cache))
            result = backend.run(call._replace(prepared=prepared))
            wrappers.add(id(prepared))
        visible = torch.ones(2, 5, k.shape[1], dtype=torch.bool)
        assert_is_exact(result.out, None, exact(q, k, v, visible, 0.125))
    assert len(sys.modules["flashinfer"].BatchPrefillWithRaggedKVCacheWrapper.plans) == 3
    assert len(wrappers) == 1
    others = [
        plans.of(backend, ForwardPlan(limits, StepInfo(), cache, StoredForm(PageFormat(5, q.dtype), pages)))
        for pages in (((0,), (1,)), ((2,), (3,)), ((0,), (1,)))
    ]
    assert others[0] is others[2] is not others[1]


@pytest.mark.parametrize("backend", ["fa4"], indirect=True)
def test_fa4_says_that_it_compiles_before_it_does(
    backend: Backend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa4, "_compiled", set())
    caplog.set_level(logging.INFO, "diffusion_runtime.attention")
    for layout_name in ("none", "none", "suffix", "equal"):
        backend.run(make_call(layout_name))
    assert caplog.messages == [
        "flash-attn-4 compiles its dense kernel for head_dim 64, torch.float32: some seconds, once",
        "flash-attn-4 compiles its varlen kernel for head_dim 64, torch.float32: some seconds, once",
    ]


@pytest.mark.parametrize("backend", ["sage 3"], indirect=True)
def test_sage_3_sends_grouped_queries_elsewhere_and_says_so_once(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "diffusion_runtime.attention")
    call = make_call("suffix", gqa=True)
    results = [backend.run(call._replace(step=StepInfo(index=index, num_steps=3))) for index in range(3)]
    reason = "SageAttention 3 has no grouped queries"
    assert {result.implementation for result in results} == {f"torch_sdpa (flash by length): {reason}"}
    assert caplog.messages == [f"{reason}: these calls run on torch_sdpa"]
    assert backend.run(make_call("suffix")).implementation == "sageattention 3 by length"


GRID_128 = (1, 8, 16)
# name -> (layout of the keys, kept numbers of keys, whether the kernel computes all of them right)
KEY_LAYOUTS: dict[str, tuple[TokenLayout, set[int], bool]] = {
    "whole blocks": (TokenLayout(GRID_128), {128}, True),
    "whole blocks of text": (TokenLayout.text(128, (64, 0, 128)), {64, 128}, True),
    "grid and whole blocks of text": (
        TokenLayout(GRID_128, num_suffix_tokens=64, valid_lengths=(64, 0, 0)),
        {192, 128},
        True,
    ),
    "text before": (TokenLayout(GRID_128, num_prefix_tokens=64, valid_lengths=(64, 0, 64)), {192, 128}, True),
    "a rest": (TokenLayout((1, 7, 11)), {77}, False),
    "padding cut to a rest": (TokenLayout.text(128, (77, 64, 0)), {77, 64}, False),
    "grid and a rest of text": (
        TokenLayout(GRID_128, num_suffix_tokens=64, valid_lengths=(64, 9, 0)),
        {192, 137, 128},
        False,
    ),
}


def call_on(layout: TokenLayout, causal: bool = False) -> AttentionCall:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, layout.num_tokens, 2, 64)
    return attention_call(q, k, v, layout=layout, causal=causal)


@pytest.mark.parametrize("backend", ["sage 1.0.6"], indirect=True)
@table("name", KEY_LAYOUTS)
def test_numbers_of_keys_that_a_kernel_gets_wrong_are_computed_elsewhere_and_said(
    backend: Backend, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Padding that is cut leaves the lengths as numbers of keys."""
    caplog.set_level(logging.INFO, "diffusion_runtime.attention")
    layout, numbers, right = KEY_LAYOUTS[name]
    call = call_on(layout)
    assert numbers_of_keys(call) == numbers
    results = [run_backend(backend, call) for _ in range(3)]
    visible = visible_by(layout, 3, layout.num_tokens, causal=False)
    assert_is_exact(results[0].out, None, exact(call.q, call.k, call.v, visible, 0.125))
    reason = "sage_attn here takes a number of keys that is a multiple of 64, or at most 0.1% below one, of 128 in "
    reason += "causal calls"
    if right:
        assert results[0].implementation.startswith("sageattention 1")
        assert caplog.messages == []
    else:
        assert results[0].implementation.startswith("torch_sdpa (")
        assert results[0].implementation.endswith(reason)
        assert caplog.messages == [f"{reason}: these calls run on torch_sdpa"]
    # What the kernel itself makes of them: the stand-in errs as the package does.
    kernels_own = backend.run(call).out
    assert torch.allclose(kernels_own, results[0].out, atol=1e-4) == right


@pytest.mark.parametrize("backend", ["sage 1.0.6"], indirect=True)
@table(
    ("layout", "runs"),
    [
        (TokenLayout(GRID_128), "sageattention 1"),
        # Tiles of 128 queries end past blocks of 64 keys, whose scales are read.
        (TokenLayout((1, 7, 11)), "torch_sdpa"),
        (TokenLayout(GRID_128, num_suffix_tokens=64, valid_lengths=(64, 0, 64)), "torch_sdpa"),
        # The padding's own queries see the 137 keys before them, without a causal mask.
        (TokenLayout(GRID_128, num_suffix_tokens=64, valid_lengths=(9, 9, 9)), "torch_sdpa"),
        (TokenLayout(GRID_128, num_prefix_tokens=64, valid_lengths=(9, 9, 9)), "torch_sdpa"),
    ],
)
def test_a_causal_kernel_takes_whole_tiles_of_queries(backend: Backend, layout: TokenLayout, runs: str) -> None:
    call = call_on(layout, causal=True)
    result = run_backend(backend, call)
    visible = visible_by(layout, 3, layout.num_tokens, causal=True)
    assert_is_exact(result.out, None, exact(call.q, call.k, call.v, visible, 0.125))
    assert result.implementation.split(" (")[0] == runs


def test_key_counts() -> None:
    everything, blocks, nearly = KeyCounts(), KeyCounts(64), KeyCounts(64, tolerance=1e-3)
    assert all(number in everything for number in range(1, 200))
    assert [number for number in range(1, 200) if number in blocks] == [64, 128, 192]
    assert [number for number in range(1, 200) if number in nearly] == [64, 128, 192]
    # Wan at 480p and 720p: 8 and 48 keys past the end.
    assert [number in nearly for number in (32760, 75600, 4096 + 1, 62_937)] == [True, True, False, True]
    assert [number in blocks for number in (32760, 75600)] == [False, False]
    assert (str(everything), str(blocks)) == ("any number of keys", "a number of keys that is a multiple of 64")


def test_flash_attention_4_cuts_keys_where_the_tiles_of_its_kernel_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    asked: list[tuple[int, ...]] = []

    def plan(*shape: int) -> KeySplit:
        asked.append(shape)
        return KeySplit(8, 2)

    monkeypatch.setattr(fa4, "plan_split", plan)
    plain = {"batch": 2, "queries": 12, "heads": 2, "head_dim": 104}
    cases: dict[str, tuple[dict[str, int], dict[str, object], bool]] = {
        "plain": (plain, {}, True),
        "log-sum-exp": (plain, {"return_lse": True}, True),
        "scale": (plain, {"scale": 0.3}, True),
        "causal": ({**plain, "queries": 16}, {"causal": True}, False),
        "grouped queries": ({**plain, "kv_heads": 1}, {}, False),
        "small heads": ({**plain, "head_dim": 96}, {}, False),
        "samples apart": ({**plain, "hidden": 2}, {}, False),
    }
    for name, (shape, fields, is_split) in cases.items():
        batch, heads, head_dim = shape["batch"], shape["heads"], shape["head_dim"]
        q = torch.randn(batch, shape["queries"], heads, head_dim, dtype=torch.bfloat16)
        kv = torch.randn(2, batch, 16 + shape.get("hidden", 0), shape.get("kv_heads", heads), head_dim)
        k, v = kv.to(torch.bfloat16)[:, :, :16]
        for processors in (None, 132):
            monkeypatch.setattr(fa4, "_processors_of", lambda _, found=processors: found)
            asked.clear()
            with stand_in("fa4") as backend:
                result = run_backend(backend, attention_call(q, k, v, **fields))
            splits = is_split and processors is not None
            assert result.implementation == ("flash-attn-4 split-KV" if splits else "flash-attn-4"), name
            assert asked == ([(12, 16, 4, 128, 132)] if splits else []), name
            exact = {key: fields[key] for key in ("scale", "causal") if key in fields}
            expected, expected_lse = reference_attention(q.double(), k.double(), v.double(), **exact)  # type: ignore[arg-type]
            torch.testing.assert_close(result.out.double(), expected, rtol=0, atol=0.03, msg=name)
            if "return_lse" in fields:
                assert result.lse is not None
                torch.testing.assert_close(result.lse, expected_lse.float(), rtol=0, atol=1e-2)
            else:
                assert result.lse is None, name


def test_what_computes_a_call_that_a_chip_may_split_is_not_known_before() -> None:
    fa4_backend = find_backend("fa4")
    assert fa4_backend is not None
    for capability, num_keys, causal, expected in (
        ((9, 0), 32760, False, None),
        ((9, 0), 4680, False, "flash-attn-4"),
        ((10, 0), 32760, False, "flash-attn-4"),
        ((9, 0), 4680, True, "flash-attn-4"),
    ):
        hardware = Hardware("cuda", capability=capability)
        shapes = (1, 4680, 12, 128), (1, num_keys, 12, 128)
        form = CallForm(hardware, torch.bfloat16, *shapes, None, None, LayerInfo(), StepInfo(), causal=causal)
        assert fa4_backend.expected_implementation(form) == expected


def test_flashinfers_kernel_in_8_bits_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the weights, by the layer's check of its options; and a CUDA graph takes it nowhere."""
    backend, options = fp8_attn.Fp8Backend(), fp8_attn.Fp8Options(kernel="flashinfer")
    on_blackwell, without_nvcc = cuda((10, 0), "flashinfer-python"), cuda((9, 0), "flashinfer-python", programs=())
    for machine, why in (
        (on_blackwell, "for sm_90 alone, this is cuda sm_100"),
        (cuda((9, 0)), "'flashinfer-python' is not installed"),
        (without_nvcc, "compiles its kernels with nvcc, which is not here"),
        (cuda((9, 0), "flashinfer-python"), "flashinfer"),
    ):
        monkeypatch.setattr(fp8_attn, "detect_hardware", lambda machine=machine: machine)
        with pytest.raises(ConfigError, match=f"kernel=flashinfer: .*{why}.*; leave kernel out"):
            backend.check(options, LayerInfo(), 4, None)
        backend.check(fp8_attn.Fp8Options(), LayerInfo(), 4, None)
    assert backend.replay_refusal(options) == "kernel=flashinfer was never captured"
    assert backend.replay_refusal(fp8_attn.Fp8Options()) is None
