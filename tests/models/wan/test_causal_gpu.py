"""Causal video on a GPU: graphs, pages, 8 bits, two experts and streams against plain runs; kernels that read stored
keys against float64, with the packages themselves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tiny_models import write_tiny_wan

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.attention import AttentionCall, StepInfo
from diffusion_runtime.attention.backends.calling import run_backend
from diffusion_runtime.attention.backends.capability import AttentionRequirements
from diffusion_runtime.attention.backends.reference import reference_attention
from diffusion_runtime.attention.backends.refusals import refusals
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.attention.backends.stored import StoredKeysReader, attend_parts, gathered_pages
from diffusion_runtime.attention.cache.plan import CachePlan
from diffusion_runtime.attention.cache.stored import CodeScales, KeyParts, PageFormat, StoredForm, StoredKeys
from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.attention.forward_plans import ForwardPlan, PlanLimits
from diffusion_runtime.core.hardware import detect_hardware
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.parallel.interface import AttentionInputs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# 64 tokens of a latent frame, heads of 64; chunks of 2, 6 in sight.
REQUEST = GenerationRequest("a red circle moving left", height=128, width=128, num_frames=61, seed=3)
READERS = ("fa4", "fa3", "flashinfer_attn")


def usable_or_skip(name: str, head_dim: int = 64) -> None:
    hardware = detect_hardware("cuda")
    reasons = refusals(name, AttentionRequirements("self", "self", head_dim, "bfloat16", hardware, 4, 4))
    if reasons:
        pytest.skip("; ".join(reasons))


def loaded(path: str = "shapes-causal", **options: Any) -> Pipeline:
    pipeline = load_pipeline(path, device="cuda", **options)
    assert isinstance(pipeline, Pipeline)
    return pipeline


def distance(one: numpy.ndarray, other: numpy.ndarray) -> float:
    """Mean of the differences, of 255."""
    return float(numpy.abs(one.astype(int) - other).mean())


def assert_replays_are_eager(folder: str, request: GenerationRequest) -> None:
    eager, graphed = loaded(folder, cuda_graphs="off")(request), loaded(folder, cuda_graphs="on")(request)
    report = graphed.attention_report.graphs
    assert report is not None
    assert report.num_replayed > 0, report
    assert numpy.array_equal(eager.frames, graphed.frames), report
    assert eager.attention_report.num_calls == graphed.attention_report.num_calls


def test_replayed_passes_have_the_bits_of_eager_ones() -> None:
    assert_replays_are_eager("shapes-causal", REQUEST)
    assert_replays_are_eager("shapes-causal", dataclasses.replace(REQUEST, page_size=64))
    assert_replays_are_eager("shapes-causal", dataclasses.replace(REQUEST, kv_cache_dtype="fp8_e4m3"))


def test_two_experts_are_replayed_too(tmp_path: Path) -> None:
    keys = {"num_frames_per_block": 3, "local_attn_size": 7, "sink_size": 2}
    folder = write_tiny_wan(tmp_path / "experts", causal=keys, boundary_ratio=0.875)
    request = GenerationRequest("a red circle", height=32, width=32, num_frames=81, seed=4)
    assert_replays_are_eager(str(folder), request)


@pytest.mark.parametrize("name", ["torch_sdpa", *READERS])
def test_pages_hold_what_a_row_holds(name: str) -> None:
    usable_or_skip(name)
    pipeline = loaded(attention=name)
    row, pages = pipeline(REQUEST), pipeline(dataclasses.replace(REQUEST, page_size=64))
    copied = {each.keys for each in pages.attention_report.rows if each.role == "self"}
    assert copied == {"gathered" if name == "torch_sdpa" else "in place"}
    if name == "torch_sdpa":
        assert numpy.array_equal(row.frames, pages.frames)
    assert distance(row.frames, pages.frames) < 1.0


@pytest.mark.parametrize("name", ["torch_sdpa", "fa4", "flashinfer_attn"])
def test_a_cache_of_8_bits_shows_the_same_video(name: str) -> None:
    usable_or_skip(name)
    pipeline = loaded(attention=name)
    exact, codes = pipeline(REQUEST), pipeline(dataclasses.replace(REQUEST, kv_cache_dtype="fp8_e4m3"))
    copied = {each.keys for each in codes.attention_report.rows if each.role == "self"}
    assert copied == {"in place" if name == "flashinfer_attn" else "read back"}
    assert 0 < distance(exact.frames, codes.frames) < 10.0
    row, cache = exact.attention_report.cache, codes.attention_report.cache
    assert row is not None
    assert cache is not None
    assert 0.5 < cache.num_bytes / row.num_bytes < 0.52


@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
def test_a_stream_is_the_whole_video(cuda_graphs: str) -> None:
    """Decoded in line, and on a stream of its own beside denoising."""
    pipeline = loaded(cuda_graphs=cuda_graphs)
    request = dataclasses.replace(REQUEST, prompt_switches=[["2s", "a blue circle moving left"]])
    whole = pipeline(request)
    for beside in (False, True, None):
        with pipeline.stream(request, keeps_frames=True, decodes_beside=beside) as stream:
            for _ in stream:
                pass
        assert stream.decodes_beside is (beside is not False)
        assert numpy.array_equal(stream.media().frames, whole.frames), beside


@pytest.mark.parametrize("name", ["torch_sdpa", *READERS])
def test_forks_of_a_stream_are_what_each_is_alone(name: str) -> None:
    """With pages that differ from stream to stream, decoded in line and on the thread that they have in common."""
    usable_or_skip(name)
    pipeline = loaded(attention=name, cuda_graphs="off")
    for values in ({}, {"page_size": 64}, {"page_size": 64, "kv_cache_dtype": "fp8_e4m3"}):
        request = dataclasses.replace(REQUEST, **values)
        whole = pipeline(request).frames
        for beside in (False, True):
            with pipeline.stream(request, keeps_frames=True, decodes_beside=beside) as stream:
                next(stream), next(stream), next(stream)
                with stream.fork() as same, stream.fork("a blue circle moving left", seed=9) as other:
                    next(other), next(stream), next(same)
                    list(same), list(other)
                list(stream)
            repeated = pipeline(GenerationRequest.from_dict(other.recipe["request"])).frames
            for found, expected in ((stream, whole), (same, whole), (other, repeated)):
                assert numpy.array_equal(found.media().frames, expected), (values, beside)
            assert distance(repeated, whole) > 0
    graphed = loaded(cuda_graphs="on")
    with graphed.stream(REQUEST) as stream, pytest.raises(ConfigError, match="expected cuda_graphs='off'"):
        stream.fork()


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_stored_keys_are_read_as_float64_reads_them(name: str, in_8_bits: bool) -> None:
    """Every page size that published frames have, grouped queries, pages in any order, more of them than are read."""
    usable_or_skip(name, 128)
    backend = find_backend(name)
    assert backend is not None
    assert isinstance(backend, StoredKeysReader)
    for page_size, head_dim in ((16, 64), (64, 64), (88, 128), (120, 128), (128, 128)):
        wanted = torch.float8_e4m3fn if in_8_bits else torch.bfloat16
        refusal = backend.stored_refusal(PageFormat(page_size, wanted), torch.device("cuda"))
        if refusal is not None:
            assert in_8_bits, refusal
            pytest.skip(refusal)
        generator = torch.Generator("cuda").manual_seed(page_size)
        q = torch.randn(2, 300, 8, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        numbers = torch.randn(2, 20, page_size, 4, head_dim, generator=generator, device="cuda")
        pages = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:14].view(2, 7)
        scales = None
        if in_8_bits:
            scale = torch.full((2, 2, 1, 4, 1), 1 / 64, device="cuda", dtype=torch.bfloat16)
            mean = torch.randn(2, 1, 4, head_dim, generator=generator, device="cuda").bfloat16()
            scales = CodeScales(scale, mean)
            numbers = numbers * 64
        form = StoredForm(PageFormat(page_size, wanted), tuple(map(tuple, pages.tolist())))
        keys, values = (x.to(wanted) for x in numbers)
        stored = StoredKeys(keys, values, pages.int().cuda(), form, scales)
        own = torch.randn(2, 2, 300, 4, head_dim, generator=generator, device="cuda").bfloat16()
        parts = KeyParts(stored, (own[0], own[1]) if in_8_bits else None)
        inputs = AttentionInputs(q, own[0], own[1])
        call = AttentionCall(inputs, backend.options_type(), LayerInfo(), StepInfo(), RequestCache(), return_lse=True)
        if backend.prepares:
            cache = CachePlan(0, 1, 300, "denoise", (0,), (0,), (0,), 1, 1)
            limits = PlanLimits(None, None, 2, 300, form.num_keys, 8, 4, head_dim, q.dtype, q.device)
            call = call._replace(prepared=backend.prepare(ForwardPlan(limits, StepInfo(), cache, form)))
        result = attend_parts(backend, call, parts, lambda each: run_backend(backend, each))
        row_k, row_v = gathered_pages(stored, torch.float64)
        if scales is not None:
            row_k = torch.cat([row_k * scales.scale[0].double() + scales.mean.double(), own[0].double()], dim=1)
            row_v = torch.cat([row_v * scales.scale[1].double(), own[1].double()], dim=1)
        expected, lse = reference_attention(q.double(), row_k, row_v)
        plain, _ = reference_attention(q, row_k.bfloat16(), row_v.bfloat16())
        assert result.lse is not None
        torch.testing.assert_close(result.lse.double(), lse, rtol=0, atol=2e-2)
        bound = 3 * float((plain.double() - expected).norm()) + 5e-3 * float(expected.norm())
        assert float((result.out.double() - expected).norm()) < bound, (name, page_size, head_dim)
