"""What SGLang, vLLM-Omni and diffusers call attention backends: each is one of ours, or refused with the reason."""

from __future__ import annotations

import logging

import pytest
from tables import table

from diffusion_runtime.attention import AttentionSpec
from diffusion_runtime.attention.backends import registry
from diffusion_runtime.attention.backends.registry import available_names, canonical_name
from diffusion_runtime.core.spellings import resolve, table_of
from diffusion_runtime.diffusers_bridge.dispatcher_names import DISPATCHER_NAMES
from diffusion_runtime.errors import ConfigError

# As their command lines and enumerations have them: SGLang 0.5.23, vLLM-Omni 0.30.0.
SGLANG = (
    *("fa", "fa2", "torch_sdpa", "cudnn_sdpa", "torch_cudnn_sdpa", "dynamic_cudnn_sdpa", "sage_attn", "sage_attn_3"),
    *("sliding_tile_attn", "video_sparse_attn", "vmoba_attn", "sparse_video_gen_2_attn", "aiter", "xformers"),
    *("sla_attn", "sage_sla_attn"),
)
# Of SGLang's server for language models, and of vLLM's: typed by habit.
SERVERS = (
    *("triton", "torch_native", "flex_attention", "nsa", "cutlass_mla", "flashmla", "trtllm_mla", "trtllm_mha", "fa3"),
    *("dual_chunk_flash_attn", "wave", "intel_amx", "intel_xpu", "ascend", "flashinfer", "FLASHINFER_MLA", "fa4"),
)
VLLM_OMNI = (
    *("FLASH_ATTN", "FLASH_ATTN_HUB", "FLASH_ATTN_3_HUB", "TORCH_SDPA", "CUDNN_ATTN", "FLASHINFER_ATTN", "SAGE_ATTN"),
    *("SAGE_ATTN_3", "FASTVIDEO_VSA", "TRTLLM_ATTN", "RAINFUSION", "SPARSE_BLOCK"),
)


def violations(names: tuple[str, ...]) -> list[str]:
    """Those that are neither one of ours nor refused with the reason and one of ours in its place."""
    wrong = []
    for name in names:
        try:
            found = canonical_name(name)
        except ConfigError as error:
            row = resolve("backend", name)
            if row is None or row.remark not in str(error) or f"the nearest is {row.instead!r}" not in str(error):
                wrong.append(f"{name}: {error}")
        else:
            if found not in available_names():
                wrong.append(f"{name}: {found}")
    return wrong


def test_every_backend_of_the_installed_diffusers() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName

    assert violations(tuple(member.value for member in AttentionBackendName)) == []


@table("names", [SGLANG, VLLM_OMNI, DISPATCHER_NAMES, SERVERS], ids=["SGLang", "vLLM-Omni", "diffusers 0.42", "LLMs"])
def test_every_backend_of_peers(names: tuple[str, ...]) -> None:
    assert violations(names) == []


def test_the_spellings_stand_for_what_they_name() -> None:
    expected = {
        "torch_cudnn_sdpa": "cudnn_attn",
        "cudnn_sdpa": "cudnn_attn",
        "_native_flash": "torch_sdpa",
        "_native_efficient": "torch_sdpa",
        "_NATIVE_MATH": "torch_sdpa",
        "flash_varlen": "fa",
        "flash-hub": "fa",
        "_flash_3_hub": "fa3",
        "flash_4_hub": "fa4",
        "sage_varlen": "sage_attn",
        "sage_blackwell_hub": "sage_attn_3",
        "aiter_fa2_hub": "aiter",
        "torch_native": "torch_sdpa",
        "flex_attention": "flex_attn",
        "FASTVIDEO_VSA": "video_sparse_attn",
        "intel_amx": "torch_sdpa",
    }
    assert {name: AttentionSpec(name).name for name in expected} == expected


def test_every_spelling_has_one_meaning_that_is_ours_or_a_reason_and_the_nearest() -> None:
    rows = table_of("backend").values()
    assert {row.means for row in rows} - {""} <= set(available_names())
    assert {row.instead for row in rows if not row.means} <= set(available_names())
    assert [row.spelling for row in rows if not row.means and not row.remark] == []
    assert not {row.spelling for row in rows} & set(available_names())


def test_what_a_spelling_says_beyond_its_backend_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    registry._remark.cache_clear()
    for _ in range(2):
        AttentionSpec("_native_math")
        AttentionSpec("native")
    said = "attention backend '_native_math' is 'torch_sdpa' here: torch_sdpa lets torch choose among its kernels; "
    assert caplog.messages == [f"{said}the report says what ran"]
    assert caplog.records[0].levelno == logging.WARNING
