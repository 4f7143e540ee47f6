"""Spellings: the names that people bring from SGLang, vLLM-Omni, diffusers, FastVideo and vLLM, as one table.

A spelling stands for a name of ours, with a remark where that is not quite the same; or it has no counterpart here, and
the remark says why. `resolve` reads the table, and `scripts/write_spellings.py` writes docs/spellings.md from it. Plain
values: the command line reads them before anything is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

# Attention backends; flags and verbs of the command; names of Python; shapes of `bench attention`.
Kind: TypeAlias = Literal["backend", "flag", "verb", "name", "shape"]


class Spelling(NamedTuple):
    """One name of another project.

    means: ours, for a flag with the value it has; empty without a counterpart. remark: what is different, or why there
    is none; a clause without a full stop. instead: the nearest of ours where `means` is empty, or what to write.
    """

    spelling: str
    origin: str
    means: str = ""
    remark: str = ""
    instead: str = ""

    @property
    def refusal(self) -> str:
        """Of one without a counterpart: `--host: there is no server here; ...`."""
        return f"{self.spelling}: {self.remark}; {self.instead}"


def resolve(kind: Kind, name: str) -> Spelling | None:
    """What a name of another project is here; None for a name that the table does not have. Case and `-`/`_` do not
    matter, but in names of Python."""
    return table_of(kind).get(_plain(kind, name))


@functools.cache
def table_of(kind: Kind) -> Mapping[str, Spelling]:
    """Every spelling of a kind, by the form in which `resolve` compares it."""
    return {_plain(kind, row.spelling): row for row in _ROWS[kind]}


def _plain(kind: Kind, name: str) -> str:
    if kind == "name":
        return name
    if kind == "flag":
        return "--" + name.removeprefix("--").lower().replace("_", "-")
    return name.strip().lower().replace("-", "_")


_SGLANG, _OMNI, _DIFFUSERS, _FASTVIDEO, _VLLM, _TRANSFORMERS = (
    "SGLang",
    "vLLM-Omni",
    "diffusers",
    "FastVideo",
    "vLLM",
    "transformers",
)
_SERVERS = "SGLang's and vLLM's servers"

_TORCH_CHOOSES = "torch_sdpa lets torch choose among its kernels"
_SAGE_CHOOSES = "sage_attn lets SageAttention choose its kernel for the chip"
_MLA = "it is for language models with multi-head latent attention (MLA), which no diffusion transformer here has"
_OF_HUB = "diffusers takes this kernel from the hub (--backend diffusers), {} takes the installed package"
_TRITON = "Triton is how kernels here are written (video_sparse_attn, int8_attn, ...) and no dense backend's name"


def _backends() -> Iterator[Spelling]:
    for spelling, means in {
        "flash": "fa",
        "flash_varlen": "fa",
        "_flash_3": "fa3",
        "_flash_varlen_3": "fa3",
        "native": "torch_sdpa",
        "_native_cudnn": "cudnn_attn",
        "sage": "sage_attn",
        "sage_varlen": "sage_attn",
        "flex": "flex_attn",
    }.items():
        yield Spelling(spelling, _DIFFUSERS, means)
    for spelling, means in {
        "flash_hub": "fa",
        "flash_varlen_hub": "fa",
        "_flash_3_hub": "fa3",
        "_flash_3_varlen_hub": "fa3",
        "flash_4_hub": "fa4",
        "aiter_fa2_hub": "aiter",
        "sage_hub": "sage_attn",
        "sage_blackwell_hub": "sage_attn_3",
    }.items():
        yield Spelling(spelling, _DIFFUSERS, means, _OF_HUB.format(means))
    for spelling in ("_native_efficient", "_native_flash", "_native_math"):
        yield Spelling(spelling, _DIFFUSERS, "torch_sdpa", _TORCH_CHOOSES)
    for spelling in (
        "_sage_qk_int8_pv_fp8_cuda",
        "_sage_qk_int8_pv_fp8_cuda_sm90",
        "_sage_qk_int8_pv_fp16_cuda",
        "_sage_qk_int8_pv_fp16_triton",
    ):
        yield Spelling(spelling, _DIFFUSERS, "sage_attn", _SAGE_CHOOSES)
    for spelling, means in {
        "flash_attn": "fa",
        "flash_attn_2": "fa2",
        "flash_attn_3": "fa3",
        "flash_attn_4": "fa4",
        "cudnn": "cudnn_attn",
        "sage_attn3": "sage_attn_3",
        "fastvideo_vsa": "video_sparse_attn",
    }.items():
        yield Spelling(spelling, _OMNI, means)
    for spelling, means in {"flash_attn_hub": "fa", "flash_attn_3_hub": "fa3"}.items():
        yield Spelling(spelling, _OMNI, means, f"vLLM-Omni takes this kernel from the hub, {means} the package")
    for spelling, means in {
        "cudnn_sdpa": "cudnn_attn",
        "torch_cudnn_sdpa": "cudnn_attn",
        "dynamic_cudnn_sdpa": "cudnn_attn",
        "sdpa": "torch_sdpa",
        "torch_native": "torch_sdpa",
        "flashinfer": "flashinfer_attn",
        "sage3": "sage_attn_3",
        "sta": "sliding_tile_attn",
        "vsa": "video_sparse_attn",
        "vmoba": "vmoba_attn",
        "svg2": "sparse_video_gen_2_attn",
    }.items():
        yield Spelling(spelling, _SGLANG, means)
    yield Spelling("sage_attn_three", _FASTVIDEO, "sage_attn_3")
    yield Spelling("blasst", "the paper of skip-softmax", "skip_softmax")
    yield Spelling("flash_attention", "ComfyUI", "fa")
    yield Spelling("sageattn", "ComfyUI", "sage_attn")
    for spelling, means in {
        "flash_attention_2": "fa2",
        "flash_attention_3": "fa3",
        "flex_attention": "flex_attn",
        "eager": "reference",
    }.items():
        yield Spelling(spelling, _TRANSFORMERS, means)
    yield Spelling("rocm_aiter_fa", _VLLM, "aiter")
    yield Spelling(
        "intel_amx",
        _SGLANG,
        "torch_sdpa",
        "on a CPU torch_sdpa calls oneDNN, which uses AMX in bfloat16 (--dtype bfloat16) where the chip has it",
    )
    yield Spelling("intel_xpu", _SGLANG, "torch_sdpa", "on an XPU torch_sdpa runs torch's own kernels")
    yield from _refused_backends()


def _refused_backends() -> Iterator[Spelling]:
    rows = [
        (
            "_native_npu",
            _DIFFUSERS,
            "it is torch_npu's fused attention, which diffusers alone calls: it needs --backend diffusers",
            "torch_sdpa",
        ),
        (
            "_native_xla",
            _DIFFUSERS,
            "it is torch_xla's flash attention, which diffusers alone calls: it needs --backend diffusers",
            "torch_sdpa",
        ),
        ("trtllm_attn", _OMNI, "it is TensorRT-LLM's attention, which this runtime does not call", "flashinfer_attn"),
        (
            "sla_attn",
            _SGLANG,
            "sparse-linear attention needs a model trained with it, and no family here is",
            "video_sparse_attn",
        ),
        ("sage_sla_attn", _SGLANG, "sparse-linear attention needs a model trained with it", "video_sparse_attn"),
        (
            "rainfusion",
            _OMNI,
            "it is a sparse method for Ascend NPUs, which this runtime does not have",
            "sliding_tile_attn",
        ),
        (
            "sparse_block",
            _OMNI,
            "it stands for any block-sparse backend in a page about `extra`; blocks here are the tiles or chunks of a "
            "method, whose options `diffusion-runtime backends` lists",
            "video_sparse_attn",
        ),
        ("triton", _SGLANG, _TRITON, "flex_attn"),
        ("triton_attn", _VLLM, _TRITON, "flex_attn"),
        (
            "trtllm_mha",
            _SGLANG,
            "it is TensorRT-LLM's attention over the pages of a server's key-value cache",
            "flashinfer_attn",
        ),
        ("flashmla", _SGLANG, _MLA, "fa"),
        ("flash_attn_mla", _VLLM, _MLA, "fa"),
        ("cutlass_mla", _SGLANG, _MLA, "fa"),
        ("trtllm_mla", _SGLANG, _MLA, "flashinfer_attn"),
        ("flashinfer_mla", _VLLM, _MLA, "flashinfer_attn"),
        ("triton_mla", _VLLM, _MLA, "flex_attn"),
        ("rocm_aiter_mla", _VLLM, _MLA, "aiter"),
        (
            "nsa",
            _SGLANG,
            "it is DeepSeek's sparse attention, which reads tokens of a key-value cache by a trained index; no "
            "diffusion transformer here has that",
            "vmoba_attn",
        ),
        (
            "dual_chunk_flash_attn",
            _SGLANG,
            "it stretches the rotary positions of Qwen2.5-1M over long texts, and no video or image model has those",
            "fa",
        ),
        ("wave", _SGLANG, "its kernels (Wave, for ROCm) are known to SGLang and to no diffusion package", "aiter"),
        (
            "ascend",
            _SGLANG,
            "its kernels are torch_npu's, which this runtime does not call; on an NPU torch_sdpa is the default, and "
            "diffusers' _native_npu needs --backend diffusers",
            "torch_sdpa",
        ),
        ("tree_attn", _VLLM, "it checks a tree of drafted words; no step of a diffusion model drafts", "fa"),
        (
            "hybrid_linear_attn",
            _SGLANG,
            "it dispatches the linear layers of language models, which a model here chooses by itself",
            "fa",
        ),
    ]
    for spelling, origin, reason, nearest in rows:
        yield Spelling(spelling, origin, "", reason, nearest)


_NO_SERVER = "there is no server here"
_LANGUAGE = "it is for language models: diffusion transformers have no"
_ROWS: Mapping[Kind, tuple[Spelling, ...]] = {
    "backend": tuple(_backends()),
    "flag": (
        Spelling("--model", f"{_SGLANG}, {_OMNI}", "--model-path"),
        Spelling("--output", _OMNI, "--output-path"),
        Spelling("--diffusion-attention-backend", _OMNI, "--attention-backend"),
        Spelling("--diffusion-attention-config", _OMNI, "--attention-config"),
        Spelling("--mm-attention-backend", _SGLANG, "--attention-config.per_role.text_encoder.backend"),
        Spelling("--tp", _SGLANG, "--tensor-parallel-size"),
        Spelling("--tp-size", _SGLANG, "--tensor-parallel-size"),
        Spelling("--enable-cfg-parallel", _SGLANG, "--cfg-parallel"),
        Spelling("--enable-cpu-offload", _OMNI, "--offload model"),
        Spelling("--enable-layerwise-offload", _OMNI, "--offload layers"),
        Spelling("--vae-use-tiling", _OMNI, "--vae-tiling on"),
        Spelling(
            "--vae-use-slicing",
            _OMNI,
            remark="the clips of a batch are decoded one after the other anyway",
            instead="leave it out; --vae-tiling on cuts each of them into tiles",
        ),
        Spelling(
            "--dit-cpu-offload", _SGLANG, "--offload model", "all parts of the model move, not the transformer alone"
        ),
        Spelling("--dit-layerwise-offload", _SGLANG, "--offload layers"),
        *(
            Spelling(
                f"--{part}-cpu-offload",
                _SGLANG,
                remark="--offload moves all parts of the model, by the memory plan",
                instead="write --offload auto, model or layers",
            )
            for part in ("text-encoder", "image-encoder", "vae")
        ),
        Spelling(
            "--sp-degree",
            _SGLANG,
            "--ulysses-degree",
            "there it is ulysses-degree times ring-degree; with --ring-degree R give sp-degree / R",
        ),
        Spelling("--enable-torch-compile", _SGLANG, "--compile regional"),
        Spelling(
            "--cache-backend",
            _OMNI,
            remark="a step cache is named by its method, with its options",
            instead="write --step-cache teacache for tea_cache, --step-cache dbcache for cache_dit",
        ),
        Spelling("--preset", f"{_OMNI}'s bench_attention_backends.py", "--shapes", "in `bench attention`"),
        Spelling(
            "--trust-remote-code",
            f"{_SGLANG}, {_OMNI}",
            remark="no code of a model folder is run here, so there is nothing to trust",
            instead="leave it out",
        ),
        Spelling("--host", _SERVERS, remark=_NO_SERVER, instead="generate --prompt-file makes many in one load"),
        Spelling("--port", _SERVERS, remark=_NO_SERVER, instead="generate --prompt-file makes many in one load"),
        Spelling(
            "--enforce-eager",
            _OMNI,
            remark="blocks run eagerly unless --compile says otherwise",
            instead="leave it out",
        ),
        Spelling("--cfg-parallel-size", _OMNI, remark="there are two branches of guidance", instead="--cfg-parallel"),
        Spelling(
            "--moe-runner-backend", _SGLANG, remark=f"{_LANGUAGE} routed experts per token", instead="leave it out"
        ),
        Spelling("--speculative-attention-mode", _SGLANG, remark=f"{_LANGUAGE} drafted words", instead="leave it out"),
        Spelling("--speculative-eagle-topk", _SGLANG, remark=f"{_LANGUAGE} drafted words", instead="leave it out"),
        *(
            Spelling(
                f"--linear-attn-{which}backend",
                _SGLANG,
                remark="linear attention is a kind of layer, which a model's config chooses",
                instead="leave it out",
            )
            for which in ("", "decode-", "prefill-")
        ),
    ),
    "verb": tuple(
        Spelling(
            verb,
            origin,
            remark=_NO_SERVER,
            instead="generate --prompt-file makes many in one load, and load_pipeline keeps a model in Python",
        )
        for verb, origin in (("serve", f"{_SGLANG}, {_OMNI}"), ("launch_server", _SGLANG), ("server", "habit"))
    ),
    "name": (
        Spelling("global_force_attn_backend_context_manager", f"{_SGLANG}, {_FASTVIDEO}", "force_attention_backend"),
        Spelling(
            "OmniDiffusionConfig",
            _OMNI,
            remark="a pipeline takes its attention when it is loaded",
            instead="write load_pipeline(model, attention={'default': {'backend': 'fa'}})",
        ),
        Spelling(
            "Omni",
            _OMNI,
            remark="it is its server in one process",
            instead="write load_pipeline(model)(GenerationRequest(prompt=...))",
        ),
        Spelling(
            "OmniDiffusionSamplingParams",
            _OMNI,
            remark="a request holds its prompt too",
            instead="write GenerationRequest(prompt=..., num_inference_steps=...)",
        ),
        Spelling(
            "ServerArgs",
            _SGLANG,
            remark=f"{_NO_SERVER}, and its attention_backend is an argument",
            instead="write load_pipeline(model, attention='fa')",
        ),
        Spelling(
            "DiffGenerator", _SGLANG, remark="a model is loaded by a function", instead="write load_pipeline(model)"
        ),
        Spelling(
            "VideoGenerator", _FASTVIDEO, remark="a model is loaded by a function", instead="write load_pipeline(model)"
        ),
        Spelling(
            "SamplingParam",
            f"{_SGLANG}, {_FASTVIDEO}",
            remark="a request holds its prompt too",
            instead="write GenerationRequest(prompt=..., seed=...)",
        ),
        Spelling(
            "AttentionBackendEnum",
            f"{_SGLANG}, {_FASTVIDEO}",
            remark="backends are named by text, in any case",
            instead="write 'fa' or 'TORCH_SDPA'",
        ),
    ),
    "shape": (Spelling("hv15", _OMNI, "hunyuan-1.5"),),
}
