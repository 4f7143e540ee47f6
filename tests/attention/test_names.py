"""What SGLang, vLLM-Omni and diffusers call attention backends: each is one of ours, or refused with the reason."""

from __future__ import annotations

import logging

import pytest
from tables import table

from diffusion_runtime.attention import AttentionSpec
from diffusion_runtime.attention.backends import registry
from diffusion_runtime.attention.backends.registry import (
    PEER_SPELLINGS,
    REFUSED_SPELLINGS,
    SPELLING_REMARKS,
    available_names,
    canonical_name,
)
from diffusion_runtime.diffusers_bridge.dispatcher_names import DISPATCHER_NAMES
from diffusion_runtime.errors import ConfigError

# As their command lines and enumerations have them: SGLang 0.5.23, vLLM-Omni 0.30.0.
SGLANG = (
    *("fa", "fa2", "torch_sdpa", "cudnn_sdpa", "torch_cudnn_sdpa", "dynamic_cudnn_sdpa", "sage_attn", "sage_attn_3"),
    *("sliding_tile_attn", "video_sparse_attn", "vmoba_attn", "sparse_video_gen_2_attn", "aiter", "xformers"),
    *("sla_attn", "sage_sla_attn"),
)
VLLM_OMNI = (
    *("FLASH_ATTN", "FLASH_ATTN_HUB", "FLASH_ATTN_3_HUB", "TORCH_SDPA", "CUDNN_ATTN", "FLASHINFER_ATTN", "SAGE_ATTN"),
    *("SAGE_ATTN_3", "FASTVIDEO_VSA", "TRTLLM_ATTN", "RAINFUSION"),
)


def violations(names: tuple[str, ...]) -> list[str]:
    """Those that are neither one of ours nor refused with the reason and one of ours in its place."""
    wrong = []
    for name in names:
        try:
            found = canonical_name(name)
        except ConfigError as error:
            reason, near = REFUSED_SPELLINGS.get(name.lower(), ("", ""))
            if not reason or reason not in str(error) or near not in available_names() or repr(near) not in str(error):
                wrong.append(f"{name}: {error}")
        else:
            if found not in available_names():
                wrong.append(f"{name}: {found}")
    return wrong


def test_every_backend_of_the_installed_diffusers() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName

    assert violations(tuple(member.value for member in AttentionBackendName)) == []


@table("names", [SGLANG, VLLM_OMNI, DISPATCHER_NAMES], ids=["SGLang", "vLLM-Omni", "diffusers 0.42"])
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
    }
    assert {name: AttentionSpec(name).name for name in expected} == expected


def test_no_spelling_stands_for_a_name_that_is_not_ours_or_is_refused_too() -> None:
    assert set(PEER_SPELLINGS.values()) <= set(available_names())
    assert set(SPELLING_REMARKS) <= set(PEER_SPELLINGS)
    assert not set(REFUSED_SPELLINGS) & (set(PEER_SPELLINGS) | set(available_names()))


def test_what_a_spelling_says_beyond_its_backend_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    registry._remark.cache_clear()
    for _ in range(2):
        AttentionSpec("_native_math")
        AttentionSpec("native")
    said = "attention backend '_native_math' is 'torch_sdpa' here: torch_sdpa lets torch choose among its kernels; "
    assert caplog.messages == [f"{said}the report says what ran"]
    assert caplog.records[0].levelno == logging.WARNING
