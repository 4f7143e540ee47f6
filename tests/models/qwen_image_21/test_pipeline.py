"""The whole generation against diffusers' own QwenImage21Pipeline: same folder, noise and prompts, float32 on the
CPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch
import transformers
from diffusers import QwenImage21Pipeline
from family_cases import VAE, change
from family_parity import assert_equal_runs, record_latents
from safetensors.torch import save_file
from tables import table
from tiny_qwen_image_21 import TINY_SIZES, write_tiny_qwen_image_21

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import ModelLoadError, RequestError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.loading import prepare
from diffusion_runtime.memory.plan import MemoryPlan
from diffusion_runtime.models.qwen_image_21 import text
from diffusion_runtime.models.qwen_image_21.family import FAMILY

# As many tokens each: in diffusers the place of a picture depends on the longest prompt of its batch.
PROMPTS = ("a red circle moving left", "a blue star moving right")
NUM_STEPS = 3


class Processor:
    """What QwenImage21Pipeline asks of Qwen3VLProcessor without pictures, by its tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: list[str], **how: Any) -> Any:
        return self.tokenizer(text, **how)

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> list[list[int]]:
        """Qwen's chat format."""
        (message,) = messages
        (part,) = message["content"]
        return [self.tokenizer(f"<|im_start|>{message['role']}\n{part['text']}<|im_end|>\n").input_ids]


def load_theirs(folder: Path) -> QwenImage21Pipeline:
    float32 = {"dtype": torch.float32}
    theirs = QwenImage21Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        vae=diffusers.AutoencoderKLQwenImage21.from_pretrained(folder / "vae", **float32),
        text_encoder=transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder", **float32),
        processor=Processor(transformers.Qwen2Tokenizer.from_pretrained(folder / "processor")),
        transformer=diffusers.QwenImage21Transformer2DModel.from_pretrained(folder / "transformer", **float32),
    )
    theirs.set_progress_bar_config(disable=True)
    return theirs


@pytest.fixture(scope="module")
def pair(tiny_qwen_image_21_folder: Path) -> tuple[Pipeline, QwenImage21Pipeline]:
    ours = load_pipeline(str(tiny_qwen_image_21_folder), device="cpu")
    assert isinstance(ours, Pipeline)
    return ours, load_theirs(tiny_qwen_image_21_folder)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The latents after every step of the last generation."""
    return record_latents(monkeypatch)


def write_lora(transformer: torch.nn.Module, path: Path) -> str:
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, module in transformer.named_modules():
        if isinstance(module, torch.nn.Linear):
            down = torch.randn(3, module.in_features, generator=generator) / module.in_features**0.5
            tensors[f"transformer.{name}.lora_A.weight"] = 0.5 * down
            tensors[f"transformer.{name}.lora_B.weight"] = 0.1 * torch.randn(
                module.out_features, 3, generator=generator
            )
    save_file(tensors, path)
    return str(path)


def request(**values: Any) -> GenerationRequest:
    fields = {"prompt": PROMPTS[0], **TINY_SIZES, "seed": 5, "num_inference_steps": NUM_STEPS}
    return GenerationRequest(**{**fields, **values})


def run_theirs(
    theirs: QwenImage21Pipeline, requests: list[GenerationRequest], noise: torch.Tensor, sigmas: list[float] | None
) -> tuple[list[torch.Tensor], numpy.ndarray]:
    first = requests[0]
    latents: list[torch.Tensor] = []

    def keep(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        latents.append(tensors["latents"].transpose(1, 2).unflatten(2, noise.shape[2:]).clone())
        return {}

    images = theirs(
        prompt=[request.prompt for request in requests],
        negative_prompt=[request.negative_prompt for request in requests] if first.guidance_scale > 1 else None,
        true_cfg_scale=first.guidance_scale,
        height=first.height,
        width=first.width,
        num_inference_steps=first.num_inference_steps,
        sigmas=sigmas,
        latents=noise.flatten(2).transpose(1, 2).clone(),
        callback_on_step_end=keep,
        output_type="np",
    ).images
    colours, opacity = images[..., :3], images[..., 3:]
    assert opacity.std() > 0.01
    return latents, (colours * opacity + 1 - opacity)[:, None]


def check(
    pair: tuple[Pipeline, QwenImage21Pipeline],
    requests: list[GenerationRequest],
    kept: list[torch.Tensor],
    sigmas: list[float] | None = None,
) -> None:
    ours, theirs = pair
    assert_equal_runs(ours, requests, kept, lambda given, noise: run_theirs(theirs, given, noise, sigmas))


@table("guidance_mode", ["batched", "two_pass"])
@table("guidance_scale", [1.0, 4.0])
def test_a_batch_of_two_prompts(
    pair: tuple[Pipeline, QwenImage21Pipeline], kept: list[torch.Tensor], guidance_mode: str, guidance_scale: float
) -> None:
    how = {"guidance_mode": guidance_mode, "guidance_scale": guidance_scale}
    # As long as the prompts where both branches are one batch, too.
    negatives = ("a yellow square moving up", "a green ring moving down")
    check(
        pair,
        [
            request(prompt=prompt, negative_prompt=negative, seed=seed, **how)
            for prompt, negative, seed in zip(PROMPTS, negatives, (5, 6), strict=True)
        ],
        kept,
    )


def test_another_size_the_default_guidance_and_an_empty_negative_prompt(
    pair: tuple[Pipeline, QwenImage21Pipeline], kept: list[torch.Tensor]
) -> None:
    """A branch of its own each: the negative prompt is shorter."""
    for values in (
        request(height=96, width=32, num_inference_steps=5),
        request(negative_prompt="", guidance_scale=3.0, guidance_mode="two_pass"),
    ):
        check(pair, [values], kept)
    assert pair[0].resolve(request()).guidance_scale == 1.0
    assert pair[0].resolve(request(guidance_scale=2.0)).negative_prompt == " "


def test_prompts_of_other_lengths_do_not_change_a_picture(pair: tuple[Pipeline, QwenImage21Pipeline]) -> None:
    """Unlike in diffusers, where the longest prompt of a batch moves every picture of it away from its text."""
    ours, _ = pair
    requests = [request(), request(prompt="two objects: a blue star, and a green ring", seed=6)]
    together = ours.generate(requests)
    for alone, media in zip(requests, together, strict=True):
        assert numpy.abs(ours(alone).frames.astype(int) - media.frames).max() <= 1


def test_prompts_and_seed_matter(pair: tuple[Pipeline, QwenImage21Pipeline]) -> None:
    """Otherwise the comparisons could not tell whether one went astray."""
    values: tuple[dict[str, Any], ...] = (
        {},
        {"prompt": PROMPTS[1]},
        {"guidance_scale": 4.0, "negative_prompt": "a star"},
        {"guidance_scale": 4.0},
        {"seed": 6},
    )
    frames = [pair[0](request(**each)).frames.astype(int) for each in values]
    assert all(numpy.abs(one - other).max() > 1 for i, one in enumerate(frames) for other in frames[:i])


def test_the_report_tells_the_prefill_from_the_steps(pair: tuple[Pipeline, QwenImage21Pipeline]) -> None:
    report = pair[0](request(guidance_scale=2.0, guidance_mode="two_pass")).attention_report
    assert report is not None
    # 3 layers, two branches.
    assert {row.phase: (row.count, row.steps) for row in report.rows} == {
        "denoise": (NUM_STEPS * 3 * 2, "0-2"),
        "commit": (3 * 2, ""),
    }
    assert any("keys and values of" in note and "computed once" in note for note in report.notes)
    (decoder,) = [part for part in report.libraries if part.component == "vae"]
    assert decoder.implementation == "AutoencoderKLQwenImage21, laid over white"


def test_explain_and_the_memory_plan_know_prefill_and_decoder(tiny_qwen_image_21_folder: Path) -> None:
    prepared = prepare(RuntimeConfig(str(tiny_qwen_image_21_folder), device="cpu"), is_dry_run=True)
    explanation = explain(prepared, prepared.rules.resolve(request(), None))
    parts = {part.name: part.operations for part in explanation.parts}
    # 24 tokens and a prompt of 2048: keys of both, two products of two operations each, 3 steps, 3 layers, 32 channels.
    assert parts["attention, self"] == 3 * 3 * 4 * 32 * 24 * (24 + text.MAX_TOKENS)
    assert parts["prefill"] > 3 * 4 * 32 * text.MAX_TOKENS * (text.MAX_TOKENS + 1) / 2
    assert parts["decode"] > 0
    assert isinstance(prepared.planned_for(()).description.memory, MemoryPlan)


def test_words_are_no_pictures_and_a_long_prompt_is_cut_and_told(
    pair: tuple[Pipeline, QwenImage21Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    assert theirs.prompt_template_t2i == text._BEFORE + "{}" + text._AFTER
    assert ours.text_encoder.template.num_cropped == theirs._drop_idx
    found, plain = (ours.text_encoder.encode([prompt]) for prompt in ("a <|image_pad|>star", "a star"))
    assert torch.equal(found.embeddings, plain.embeddings)
    monkeypatch.setattr(ours.text_encoder, "max_tokens", 12)
    media = ours(request(prompt="a red star and " * 4))
    assert any("past 12 are cut off" in note for note in media.recipe["notes"])


def test_sizes_and_frames_that_do_not_fit_are_refused(pair: tuple[Pipeline, QwenImage21Pipeline]) -> None:
    for values, told in (
        ({"height": 80}, "height: expected a multiple of 32, got 80; use 64 or 96"),
        ({"num_frames": 5}, "num_frames: this model makes images, expected 1, got 5"),
        ({"true_cfg_scale": 2.0}, "true_cfg_scale"),
    ):
        with pytest.raises(RequestError, match=told):
            pair[0].resolve(request(**values))


def test_levels_that_are_no_list_are_named(tiny_qwen_image_21_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_qwen_image_21_folder, tmp_path / "damaged"))
    change(folder, VAE, {"temperal_downsample": 3})
    with pytest.raises(ModelLoadError, match=r"vae/config.json: key 'temperal_downsample': expected a list"):
        FAMILY.describe(folder)


def test_a_lora_equals_that_of_diffusers(
    tiny_qwen_image_21_folder: Path, tmp_path: Path, kept: list[torch.Tensor]
) -> None:
    """Of every linear layer, merged as the weights are read."""
    folder, theirs = tiny_qwen_image_21_folder, load_theirs(tiny_qwen_image_21_folder)
    path = write_lora(theirs.transformer, tmp_path / "lora.safetensors")
    theirs.load_lora_weights(path)
    ours = load_pipeline(str(folder), device="cpu", lora=[path])
    assert isinstance(ours, Pipeline)
    check((ours, theirs), [request()], kept)


def test_noise_levels_of_the_folder_are_the_defaults(tmp_path: Path, kept: list[torch.Tensor]) -> None:
    """As of a model that was distilled to a few steps."""
    sigmas = [1.0, 0.7, 0.4]
    folder = write_tiny_qwen_image_21(tmp_path / "turbo", sample_sigmas=sigmas)
    ours = load_pipeline(str(folder), device="cpu")
    assert isinstance(ours, Pipeline)
    check((ours, load_theirs(folder)), [request(num_inference_steps=None)], kept, sigmas)
