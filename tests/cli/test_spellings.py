"""Flags, verbs and names of other projects, and the page that lists them."""

from __future__ import annotations

import logging
import runpy
import threading
from pathlib import Path

import pytest
from cli_support import REPOSITORY, Command
from tables import table

import diffusion_runtime
from diffusion_runtime import (
    AttentionSpec,
    GenerationRequest,
    RuntimeConfig,
    force_attention_backend,
    global_force_attn_backend,
)
from diffusion_runtime.attention.force import current_force
from diffusion_runtime.benchmark.shapes import find_shapes
from diffusion_runtime.cli.app import _command
from diffusion_runtime.cli.flag_syntax import flags_in, in_own_spelling
from diffusion_runtime.config import DTYPES
from diffusion_runtime.core.spellings import resolve, table_of
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.request.generation_request import SAMPLERS

# Of a verb: its flags -> whether they take no value.
FLAGS = {
    "--model-path": False,
    "--prompt": False,
    "--attention-backend": False,
    "--dotted-attention": False,
    "--offload": False,
    "--cfg-parallel": True,
    "--no-cfg-parallel": True,
    "--json": True,
}


@table(
    ("typed", "taken"),
    [
        (["--model", "shapes"], ["--model-path", "shapes"]),
        (["--model=shapes"], ["--model-path", "shapes"]),
        (["--MODEL_PATH", "x"], ["--MODEL_PATH", "x"]),
        (["--model_path=x", "a prompt"], ["--model-path", "x", "a prompt"]),
        (["--diffusion_attention_backend", "fa"], ["--attention-backend", "fa"]),
        (["--diffusion-attention-backend=fa"], ["--attention-backend", "fa"]),
        (
            ["--mm-attention-backend", "eager", "--json"],
            ["--dotted-attention", "per_role.text_encoder.backend=eager", "--json"],
        ),
        (["--mm-attention-backend=eager"], ["--dotted-attention", "per_role.text_encoder.backend=eager"]),
        (["--enable-cpu-offload", "--model", "x"], ["--offload", "model", "--model-path", "x"]),
        (["--enable-cfg-parallel", "a prompt"], ["--cfg-parallel", "a prompt"]),
        # SGLang's switches, and those of several scripts, may be followed by what they say.
        (["--dit-cpu-offload", "false", "a prompt"], ["a prompt"]),
        (["--offload_model", "True", "a prompt"], ["--offload", "model", "a prompt"]),
        (["--enable-cfg-parallel=true"], ["--cfg-parallel"]),
        (["--enable-cfg-parallel", "false", "--json"], ["--no-cfg-parallel", "--json"]),
        # What follows a flag that takes a value is its value, and what stands behind -- is none.
        (["--prompt", "--model"], ["--prompt", "--model"]),
        (["--json", "--", "--model"], ["--json", "--", "--model"]),
        # Not of this verb: the parser says so.
        (["--output", "x"], ["--output", "x"]),
        (["--tp-size", "2"], ["--tp-size", "2"]),
        (["--no_such_flag=1"], ["--no_such_flag=1"]),
        # Advice that the verb could not take is not given.
        (["--steps", "4"], ["--steps", "4"]),
        (["--size", "832*480"], ["--size", "832*480"]),
    ],
)
def test_flags_are_taken_for_those_of_the_verb(typed: list[str], taken: list[str]) -> None:
    assert in_own_spelling(typed, FLAGS) == taken


def test_all_flags_without_a_counterpart_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as failure:
        in_own_spelling(["--trust-remote-code", "--port", "3", "--enforce-eager", "--port=4"], FLAGS)
    assert [line.strip().split(":")[0] for line in str(failure.value).splitlines()] == [
        "--trust-remote-code",
        "--port",
        "--enforce-eager",
    ]
    with pytest.raises(ConfigError, match="--enable-cpu-offload: expected true or false, or no value, got 'some'"):
        in_own_spelling(["--enable-cpu-offload=some"], FLAGS)


# The flags of commands that the projects themselves publish.
COMMANDS_OF_OTHERS = {
    "SGLang": "--model-path --text-encoder-cpu-offload --pin-cpu-memory --num-gpus --ulysses-degree --ring-degree "
    "--save-output --output-path --output-file-name --lora-path --lora-nickname --performance-mode --vae-precision "
    "--dit-precision --component-attention-backends --transformer-weights-path --cache-dit-config --return-frames",
    "FastVideo": "--sp-size --tp-size --num-gpus --dit-cpu-offload --use-fsdp-inference --VSA-sparsity --prompt-txt "
    "--embedded-cfg-scale --enable-torch-compile --workload-type --vae-sp --output-type",
    "vLLM-Omni": "--model --image --guidance-scale-high --frame-rate --sample-solver --output --use-hsdp --usp --ring "
    "--layerwise-num-gpu-layers --vae-patch-parallel-size --cache-backend --enforce-eager --boundary-ratio",
    "Wan": "--task --size --frame_num --ckpt_dir --offload_model --ulysses_size --t5_fsdp --t5_cpu --dit_fsdp --image "
    "--save_file --use_prompt_extend --base_seed --convert_model_dtype --first_frame --last_frame --src_video",
    "HunyuanVideo": "--video-size --video-length --infer-steps --flow-reverse --use-cpu-offload --save-path --use-fp8 "
    "--resolution --aspect_ratio --rewrite --cfg_distilled --sparse_attn --use_sageattn --enable_cache --offloading",
    "LightX2V": "--model_cls --task --model_path --config_json --negative_prompt --image_path --save_result_path "
    "--last_frame_path --src_mask",
    "ComfyUI": "--lowvram --highvram --novram --cpu --use-sage-attention --fp8_e4m3fn-unet --sampler_name --fast",
    "diffusers": "--pretrained_model_name_or_path --enable_model_cpu_offload --torch_dtype --lora_weights --variant",
}


def test_no_published_flag_of_others_is_unknown() -> None:
    verb = switches_of("generate")
    unknown = [
        f"{project}: {flag}"
        for project, flags in COMMANDS_OF_OTHERS.items()
        for flag in flags.split()
        if flag.replace("_", "-") not in verb and resolve("flag", flag) is None
    ]
    assert unknown == []


def test_an_unknown_flag_is_answered_with_those_it_is_like(command: Command) -> None:
    for typed, said in {
        "--hieght": "(Possible options: --height)",
        "--cache": "--step-cache)",
        "--lora_strength": "(Possible options: --lora",
        # Nothing is like these, whatever the parser's own measure says of two dashes; and hidden flags are not named.
        "--ups": "No such option: --ups see:",
        "--dotted-attentio": "No such option: --dotted-attentio see:",
    }.items():
        assert said in command("generate", "x", typed, "1").said, typed


def switches_of(*words: str) -> dict[str, bool]:
    """The flags of a verb, and whether they take no value."""
    found = _command(None)
    for word in words:
        found = found.commands[word]
    options = [each for each in found.params if each.param_type_name == "option"]
    return {name: bool(each.is_flag) for each in options for name in (*each.opts, *each.secondary_opts)}


def test_every_flag_is_taken_as_it_is_typed_or_refused_with_the_reason_and_a_flag_that_there_is() -> None:
    generate, bench = switches_of("generate"), switches_of("bench", "attention")
    for row in table_of("flag").values():
        verb = bench if "bench" in row.remark else generate
        if row.means:
            taken = in_own_spelling([row.spelling, row.example or "2"], verb)
            assert all(flag in verb for flag in taken if flag.startswith("--")), row
            assert taken[0].startswith("--"), row
            continue
        with pytest.raises(ConfigError) as failure:
            in_own_spelling([row.spelling, "x"], verb)
        assert str(failure.value) == f"{row.spelling}: {row.remark}; {row.instead}"
        assert [flag for flag in flags_in(row.instead) if flag not in verb] == [], row


def test_every_verb_that_is_refused_names_one_that_there_is() -> None:
    for row in table_of("verb").values():
        word = row.instead.removeprefix("write ").split(" ")[0]
        # Of verbs, and the flags of the command itself.
        assert word in (*_command(None).commands, "--help", "--version"), row


def test_every_dtype_and_sampler_is_taken_as_it_is_typed() -> None:
    for row in table_of("dtype").values():
        if row.means:
            assert RuntimeConfig(dtype=row.spelling.upper()).dtype == row.means in DTYPES, row
    for row in table_of("quantization").values():
        if row.means:
            assert RuntimeConfig(quantization=row.spelling.upper()).quantization == row.means, row
    for kind in ("dtype", "quantization"):
        for row in table_of(kind).values():
            if not row.means:
                with pytest.raises(ConfigError) as failure:
                    RuntimeConfig(**{kind: row.spelling})
                assert str(failure.value) == f"{kind}: {row.refusal}"
                assert set(flags_in(row.instead)) <= set(switches_of("generate"))
    for row in table_of("sampler").values():
        assert GenerationRequest("a", sampler=row.spelling).sampler == row.means in SAMPLERS, row


def test_a_command_line_in_the_words_of_others(command: Command, tiny_flags: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "star.gif"
    model = ("--model", tiny_flags[1], *tiny_flags[2:-2], "--num_inference_steps=1")
    made = command(
        "generate", "--prompt", "a star", *model, "--diffusion_attention_backend", "TORCH_NATIVE", "--output", out
    )
    assert (made.code, made.out) == (0, f"{out}\n"), made.err
    assert "cli: default says torch_sdpa" in made.said
    refusals = {
        ("launch_server", "--model", "x"): "error: launch_server: there is no verb of this name; write serve",
        ("generate", "x", "--trust_remote_code"): "error: --trust-remote-code: no code of a model folder is run here",
        ("bench", "attention", "--preset", "hv15", "--backends", "nsa"): "error: attention backend 'nsa' has no count",
    }
    for typed, said in refusals.items():
        refused = command(*typed)
        assert refused.code == 2
        assert said in refused.said


def test_shapes_of_others() -> None:
    assert next(shape.name for shape in find_shapes(["hv15", "small"], small_by_default=False)) == "hunyuan-1.5"


def test_names_of_python() -> None:
    for row in table_of("name").values():
        if row.means:
            assert getattr(diffusion_runtime, row.spelling) is getattr(diffusion_runtime, row.means)
            continue
        with pytest.raises(ImportError) as failure:
            exec(f"from diffusion_runtime import {row.spelling}")
        assert str(failure.value) == f"diffusion_runtime has no {row.spelling}: {row.remark}; {row.instead}"
    assert not hasattr(diffusion_runtime, "NoSuchName")


def test_a_spec_takes_the_words_of_vllm_omni() -> None:
    spec = AttentionSpec(backend="FASTVIDEO_VSA", extra={"sparsity": 0.5})
    assert spec == AttentionSpec("video_sparse_attn", {"sparsity": 0.5})
    assert (spec.backend, spec.extra) == (spec.name, spec.options)
    assert AttentionSpec().name == "auto"
    for both in ({"name": "fa", "backend": "fa"}, {"options": {}, "extra": {}}):
        with pytest.raises(ConfigError, match="are two names of the same value"):
            AttentionSpec(**both)


def test_a_choice_of_the_process_is_that_of_every_thread_and_below_any_context() -> None:
    seen: list[list[str]] = []

    def look() -> None:
        seen.append([choice.spec.name for choice in current_force()])

    try:
        global_force_attn_backend("FLEX_ATTENTION")
        with force_attention_backend("torch_sdpa"):
            look()
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        global_force_attn_backend("reference")
        look()
        with pytest.raises(ConfigError, match="flashmla"):
            global_force_attn_backend("flashmla")
        look()
    finally:
        global_force_attn_backend(None)
    look()
    assert seen == [["flex_attn", "torch_sdpa"], ["flex_attn"], ["reference"], ["reference"], []]


def test_the_page_lists_the_table() -> None:
    page = REPOSITORY / "docs" / "spellings.md"
    written = runpy.run_path(str(REPOSITORY / "scripts" / "write_spellings.py"))["page_text"]
    assert page.read_text() == written(page.read_text()), "run: python scripts/write_spellings.py"
    assert all(f"`{row.spelling}`" in page.read_text() for row in table_of("backend").values())


def test_kernels_of_the_hub_say_where_diffusers_takes_them(caplog: pytest.LogCaptureFixture) -> None:
    """In any place where a backend is named, not as the value of a flag alone."""
    from diffusion_runtime.attention.backends import registry

    registry._remark.cache_clear()
    caplog.set_level(logging.WARNING, "diffusion_runtime.attention")
    assert AttentionSpec("_flash_3_hub,native").name == "fa3,torch_sdpa"
    assert "from the hub (--backend diffusers), fa3 takes the installed package" in caplog.text
    with pytest.raises(ConfigError, match="it needs --backend diffusers"):
        AttentionSpec("torch_sdpa,_native_npu")
    row = resolve("backend", " Flash-Attn-3-HUB ")
    assert row is not None
    assert row.means == "fa3"
