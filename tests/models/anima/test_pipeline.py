"""Anima against diffusers' AnimaModularPipeline and its transformer: same folder, noise and prompts, float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import AnimaModularPipeline, ClassifierFreeGuidance, LayerSkipConfig, SkipLayerGuidance
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.models.transformers import transformer_cosmos
from diffusers.models.transformers.transformer_cosmos import CosmosTransformerBlock
from diffusers.modular_pipelines.anima.before_denoise import AnimaTextConditioningStep
from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep
from family_parity import assert_equal_runs, record_latents, relative
from tables import table
from tiny_anima import CHANNELS, TINY_SIZES

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.attention import AttentionContext
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.models.interface import DenoiserInputs

pytestmark = pytest.mark.filterwarnings("ignore")
# Fewer and more tokens than the text is filled up to.
PROMPTS = ("a red circle", "two objects: a blue star, and a green ring on a striped background. " * 4)
SKIP = {"skip_layers": (1,), "skip_layer_scale": 2.8, "skip_layer_start": 0.2, "skip_layer_stop": 0.75}
Pair = tuple[Pipeline, Any]


class Transforms:
    """What diffusers' transformer calls of torchvision, which need not be here: the mask of padding to the latents'
    size. A mask of zeros is zeros at every size."""

    class InterpolationMode:
        NEAREST = "nearest"

    class functional:
        @staticmethod
        def resize(mask: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
            assert not mask.any()
            return torch.nn.functional.interpolate(mask, size, mode=interpolation)


@pytest.fixture(autouse=True)
def _torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(transformer_cosmos, "transforms"):
        monkeypatch.setattr(transformer_cosmos, "transforms", Transforms, raising=False)


@pytest.fixture(scope="module")
def pair(tiny_folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Ours of the modular folder that theirs writes, and theirs."""
    folder, target = tiny_folder_of("anima"), tmp_path_factory.mktemp("modular")
    theirs = AnimaModularPipeline(pretrained_model_name_or_path=str(folder))
    theirs.load_components(dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    theirs.save_pretrained(str(target))
    ours = load_pipeline(str(target), device="cpu")
    assert isinstance(ours, Pipeline)
    return ours, theirs


def request(**values: Any) -> GenerationRequest:
    fields = {"prompt": PROMPTS[0], "negative_prompt": "", **TINY_SIZES, "seed": 5, "num_inference_steps": 3}
    return GenerationRequest(**{**fields, **values})


def run_theirs(
    theirs: Any, requests: list[GenerationRequest], noise: torch.Tensor
) -> tuple[list[torch.Tensor], numpy.ndarray]:
    """One after the other: where a text is filled up to fewer than 512 tokens, as here, their zeros behind a prompt
    depend on the others of the batch."""
    each = [_run_one(theirs, item, noise[index : index + 1]) for index, item in enumerate(requests)]
    steps = [torch.cat(latents) for latents in zip(*(latents for latents, _ in each), strict=True)]
    return steps, numpy.concatenate([images for _, images in each])[:, None]


# diffusers' layer skipping needs to know what a block returns; this one is not in its list.
TransformerBlockRegistry.register(CosmosTransformerBlock, TransformerBlockMetadata(return_hidden_states_index=0))


def guider_of(item: GenerationRequest) -> Any:
    if item.skip_layers is None:
        return ClassifierFreeGuidance(guidance_scale=item.guidance_scale)
    config = LayerSkipConfig(
        indices=list(item.skip_layers), fqn="transformer_blocks", skip_attention=True, skip_ff=True
    )
    return SkipLayerGuidance(
        guidance_scale=item.guidance_scale,
        skip_layer_guidance_scale=item.skip_layer_scale,
        skip_layer_guidance_start=item.skip_layer_start,
        skip_layer_guidance_stop=item.skip_layer_stop,
        skip_layer_config=config,
    )


def _run_one(theirs: Any, item: GenerationRequest, noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
    latents, step = [], theirs.scheduler.step

    def keep(*arguments: Any, **keywords: Any) -> Any:
        """The pipeline has no callback."""
        result = step(*arguments, **keywords)
        latents.append(result[0].clone())
        return result

    theirs.update_components(guider=guider_of(item))
    theirs.scheduler.step = keep
    try:
        images = theirs(
            prompt=item.prompt,
            negative_prompt=item.negative_prompt,
            height=item.height,
            width=item.width,
            num_inference_steps=item.num_inference_steps,
            latents=noise.clone(),
            output_type="np",
            output="images",
        )
    finally:
        del theirs.scheduler.step
    return latents, images


@table(
    "requests",
    [
        [request(prompt=prompt, seed=seed, negative_prompt="a star" * seed) for seed, prompt in enumerate(PROMPTS)],
        [request(guidance_scale=1.0, height=40, width=8)],
        [request(guidance_scale=2.5, guidance_mode="two_pass", height=8, width=24)],
        [request(guidance_scale=2.5, **SKIP, num_inference_steps=4)],
    ],
    ["unequal prompts", "no guidance", "an empty negative prompt", "skip-layer guidance"],
)
def test_a_generation_equals_diffusers(
    pair: Pair, requests: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = record_latents(monkeypatch)
    assert_equal_runs(pair[0], requests, kept, lambda resolved, noise: run_theirs(pair[1], resolved, noise))


@torch.no_grad()
def their_velocity(theirs: Any, prompts: list[str], latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    encoded = AnimaTextEncoderStep.encode_prompt(theirs, prompts, prepare_unconditional_embeds=False)
    names = ("qwen_prompt_embeds", "qwen_attention_mask", "t5_input_ids", "t5_attention_mask")
    text = AnimaTextConditioningStep._condition_prompt_embeds(
        theirs,
        **{name: encoded[name] for name in names},
        device=torch.device("cpu"),
        conditioning_dtype=torch.float32,
        output_dtype=torch.float32,
    )
    return theirs.transformer(
        hidden_states=latents,
        timestep=timestep / 1000,
        encoder_hidden_states=text,
        padding_mask=latents.new_zeros(1, 1, 8, 8),
        return_dict=False,
    )[0]


@table("prompts", [[""], ["a star"], [PROMPTS[1], "", "a"], ["a red circle " * 200, "a star"]])
@table("size", [(2, 2), (6, 10)])
def test_velocities_equal_those_of_diffusers(pair: Pair, prompts: list[str], size: tuple[int, int]) -> None:
    ours, theirs = pair
    generator, batch = torch.Generator().manual_seed(1), len(prompts)
    latents = torch.randn(batch, CHANNELS, 1, *size, generator=generator)
    timestep = torch.linspace(937.3, 12.0, batch + 1)[:batch]
    text = ours.text_encoder.encode(prompts)
    given = DenoiserInputs(text, ClipSize(4 * size[0], 4 * size[1], 1, 1))
    found = ours.transformer(latents, timestep, given, AttentionContext())
    expected = [
        their_velocity(theirs, [prompt], latents[index : index + 1], timestep[index : index + 1])
        for index, prompt in enumerate(prompts)
    ]
    assert relative(found, torch.cat(expected)) < 1e-5
    # Token ids are exact in what a model's dtype makes of them.
    narrow = dataclasses.replace(given, text=text.to(torch.device("cpu"), torch.bfloat16))
    assert torch.equal(narrow.text.further[0].embeddings.float(), text.further[0].embeddings.float())
