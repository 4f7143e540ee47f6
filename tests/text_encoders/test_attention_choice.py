"""`per_role.text_encoder`: transformers' attention chosen, refused before weights are read, and said in the report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import table
from tiny_flux1 import write_tiny_flux1
from tiny_pipelines import write_tiny_image_pipeline

from diffusion_runtime import AttentionConfig, GenerationRequest, attach, force_attention_backend, load_pipeline
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.roles import TEXT_ENCODER
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import BackendUnavailableError, ConfigError
from diffusion_runtime.loading import prepare
from diffusion_runtime.models.published_folders import published_folders
from diffusion_runtime.text_encoders.attention_choice import DEFAULT, choose_encoder_attention
from diffusion_runtime.text_encoders.offloaded import modules_of

REQUEST = GenerationRequest("a red circle", height=32, width=32, num_inference_steps=1)
TWO = {"text_encoder": "CLIPTextModel", "text_encoder_2": "T5EncoderModel"}


def choose(per_role: Any, classes: dict[str, str | None] = TWO, **levels: Any) -> str | None:
    config = AttentionConfig(per_role={} if per_role is None else {TEXT_ENCODER: per_role})
    found = choose_encoder_attention(AttentionPolicy(config=config, device="cpu", **levels), classes)
    return None if found is None else f"{found.implementation}, {found.reason}"


def test_the_highest_level_that_names_text_encoders_decides() -> None:
    assert choose(None) is None
    assert choose("auto") is None
    assert choose("EAGER") == "eager, config: per_role.text_encoder says reference"
    assert choose("fa2,flex_attention") == "flex_attention, config: per_role.text_encoder says fa2,flex_attn"
    above = AttentionConfig(per_role={TEXT_ENCODER: "sdpa"})
    assert choose("eager", cli=above) == "sdpa, cli: per_role.text_encoder says torch_sdpa"
    with force_attention_backend("flex", role=TEXT_ENCODER), force_attention_backend("torch_sdpa"):
        assert choose("eager", cli=above) == "flex_attention, force: force_attention_backend says flex_attn"
    # Choices for every role are for the transformer's.
    assert choose(None, cli=AttentionConfig(default="reference")) is None


@table(
    ("chosen", "classes", "said"),
    [
        ("flash_attention_2", TWO, "text_encoder_2: transformers' T5EncoderModel has no flash_attention_2"),
        ("flash_attention_2", {"text_encoder": "CLIPTextModel"}, "fa2: package 'flash-attn' is not installed"),
        ("flash_attention_3", {"text_encoder": "Qwen3Model"}, "fa3: runs on cuda, not on cpu"),
        ("flex", {"text_encoder": "Qwen2_5_VLForConditionalGeneration"}, "has no flex_attention"),
        ("vsa", TWO, "transformers has no attention of that kind; it has torch_sdpa (sdpa), reference (eager)"),
        ("eager", {"text_encoder": None}, "a module of this runtime, which computes torch_sdpa alone"),
    ],
)
def test_what_an_encoder_or_the_machine_lacks_is_refused_with_what_there_is(
    chosen: str, classes: dict[str, str | None], said: str
) -> None:
    with pytest.raises(BackendUnavailableError, match="usable here for them: torch_sdpa") as failure:
        choose(chosen, classes)
    assert said in str(failure.value)


def test_a_choice_has_no_options_and_no_steps() -> None:
    with pytest.raises(ConfigError, match="unknown option 'sparsity'"):
        choose({"backend": "sdpa", "extra": {"sparsity": 0.5}})
    with pytest.raises(ConfigError, match=r"schedule\[0\]\.role: text encoders have no steps"):
        AttentionConfig(schedule=({"role": TEXT_ENCODER, "steps": "0", "backend": "sdpa"},))


def test_transformers_takes_what_a_plan_says_for_every_class_of_published_encoders() -> None:
    import transformers

    indexes = [files["model_index.json"] for files in published_folders().values() if "model_index.json" in files]
    encoders = [entry for index in indexes for name, entry in index.items() if name.startswith("text_encoder")]
    classes = {entry[1] for entry in encoders if entry and entry[0] == "transformers"}
    assert {"T5EncoderModel", "CLIPTextModel", "Qwen2_5_VLForConditionalGeneration"} <= classes
    for name in classes:
        assert getattr(getattr(transformers, name), f"_supports_{DEFAULT}"), name


def test_every_encoder_of_a_model_runs_it_and_the_report_says_so(tmp_path: Path) -> None:
    folder = str(write_tiny_flux1(tmp_path / "model"))
    config = RuntimeConfig(folder, attention={"per_role": {TEXT_ENCODER: "eager"}})
    planned = {row.component: row for row in prepare(config).description.libraries}
    why = "config: per_role.text_encoder says reference"
    assert dataclasses.astuple(planned["text_encoder"]) == ("text_encoder", "transformers", "eager", why)
    assert planned["vae"].implementation == "AutoencoderKL"
    chosen, usual = load_pipeline(config), load_pipeline(folder)
    models = modules_of(chosen.text_encoder)
    assert [type(model).__name__ for model in models] == ["T5EncoderModel", "CLIPTextModel"]
    assert {model.config._attn_implementation for model in models} == {"eager"}
    reports = [pipeline(REQUEST).attention_report for pipeline in (chosen, usual)]
    assert planned["text_encoder"] in reports[0].libraries
    assert "text_encoder: transformers's own attention (sdpa)" in str(reports[1])
    embeddings = [pipeline.text_encoder.encode(["a red circle"]).embeddings for pipeline in (chosen, usual)]
    torch.testing.assert_close(*embeddings, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*requires torchvision")
def test_encoders_of_diffusers_own_pipelines_too(tmp_path: Path) -> None:
    folder = str(write_tiny_image_pipeline(tmp_path / "model"))
    with pytest.raises(BackendUnavailableError, match="text encoders"):
        prepare(RuntimeConfig(folder, backend="diffusers", attention={"per_role": {TEXT_ENCODER: "fa3"}}))
    pipeline = load_pipeline(folder, backend="diffusers", attention={"per_role": {TEXT_ENCODER: "eager"}})
    assert pipeline.pipeline.text_encoder.config._attn_implementation == "eager"
    report = pipeline(REQUEST).attention_report
    rows = {row.component: (row.implementation, row.chosen) for row in report.libraries}
    assert rows["text_encoder"] == ("eager", "config: per_role.text_encoder says reference")
    # The choice is none for the denoiser, whose attention stays diffusers'.
    assert {row.backend for row in report.rows} == {"diffusers"}
    # attach() loads no text encoder, so there it would choose nothing.
    with pytest.raises(ConfigError, match="have no attention role 'text_encoder'"):
        attach(pipeline.pipeline, {"per_role": {TEXT_ENCODER: "eager"}})
    both = {"per_role": {TEXT_ENCODER: "eager", "self": "torch_sdpa"}}
    report = load_pipeline(folder, backend="diffusers", attention=both)(REQUEST).attention_report
    assert {row.backend for row in report.rows} >= {"torch_sdpa"}
