"""MOSS-Image against numbers of sglang 0.5.23, which has the authors' transformer, and against a plain specification of
it, which those numbers hold to. diffusers has no such model."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLFlux2
from family_parity import assert_equal_runs, record_latents, relative
from safetensors.torch import load_file
from tables import table
from tiny_moss_image import CHANNELS, DIM, HEADS, LAYERS, TINY_SIZES, WAVES, tiny_weights

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.attention import AttentionContext, StepInfo
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.denoising.flow_schedule import TrainedLevels
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.models.moss_image.text import TEMPLATE
from diffusion_runtime.text_encoders.interface import Conditions

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = ("a red circle", " two objects: a blue star, and a green ring on a striped background. ")
Weights = Mapping[str, torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Channel i with channel i + half. angles: [tokens, head_dim / 2]."""
    a, b = x.unflatten(-1, (HEADS, -1)).chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    v = v.unflatten(-1, (HEADS, -1))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def situ(features: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(features / 25)


def angles_of(height: int, width: int, num_text: int) -> torch.Tensor:
    """Of the picture's tokens, then the text's, float64: (0, place, row, column)."""
    picture = [
        (0, num_text, row - (height - 1) / 2, column - (width - 1) / 2)
        for row in range(height)
        for column in range(width)
    ]
    places = torch.tensor([*picture, *((0, place, 0, 0) for place in range(num_text))], dtype=torch.float64)
    num_bands = DIM // HEADS // 8
    bands = 10000.0 ** -(torch.arange(num_bands, dtype=torch.float64) / num_bands)
    return (places[:, :, None] * bands).flatten(1)


def specified(
    w: Weights, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, skipped: Sequence[int] = ()
) -> torch.Tensor:
    """The velocity of one sample, float64. latents: [channels, height, width]; text: [tokens, dim], without padding."""
    w = {name: each.double() for name, each in w.items()}

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    _, height, width = latents.shape
    angles, latents = angles_of(height, width, len(text)), latents.double()
    x = linear("text_embedder.proj", text.double())
    for index in range(2):
        block = f"text_embedder.blocks.{index}"
        q, k, v = linear(f"{block}.qkv", norm(x, w[f"{block}.norm1.weight"])).chunk(3, -1)
        q, k = (
            norm(each.unflatten(-1, (HEADS, -1)), w[f"{block}.{name}.weight"]).flatten(1)
            for each, name in ((q, "q_norm"), (k, "k_norm"))
        )
        q, k = (turned(each, angles[height * width :]) for each in (q, k))
        x = x + linear(f"{block}.proj", attended(q, k, v))
        y = norm(x, w[f"{block}.norm2.weight"])
        x = x + linear(f"{block}.ffn_down", situ(linear(f"{block}.ffn_up", y), linear(f"{block}.ffn_gate", y)))
    phase = timestep.double() * 10000.0 ** -(torch.arange(WAVES // 2, dtype=torch.float64) / (WAVES // 2))
    waves = torch.cat([phase.cos(), phase.sin()])
    time = linear("time_embedding.2", F.silu(linear("time_embedding.0", waves)))
    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = linear("shared_block_modulation", time).chunk(6)
    x = torch.cat([linear("video_embedder", latents.flatten(1).T), x])
    for index in set(range(LAYERS)) - set(skipped):
        block = f"layers.{index}"
        y = norm(x, w[f"{block}.norm1.weight"]) * (1 + scale) + shift
        q, k = (
            turned(
                norm(
                    linear(f"{block}.proj.{name}", y).unflatten(-1, (HEADS, -1)), w[f"{block}.{name}_norm.weight"]
                ).flatten(1),
                angles,
            )
            for name in "qk"
        )
        x = x + gate * linear(f"{block}.proj.o", attended(q, k, linear(f"{block}.proj.v", y)))
        y = norm(x, w[f"{block}.norm2.weight"]) * (1 + ffn_scale) + ffn_shift
        features, opened = linear(f"{block}.proj.ffn_up_gate", y).chunk(2, -1)
        x = x + ffn_gate * linear(f"{block}.proj.ffn_down", situ(features, opened))
    shift, scale = linear("video_head_modulation", time).chunk(2)
    x = norm(x[: height * width], w["final_norm_video.weight"]) * (1 + scale) + shift
    return linear("final_linear_video", x).T.unflatten(1, (height, width))


def wave(shape: tuple[int, ...], pace: float) -> torch.Tensor:
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float64) * pace).view(shape).float()


@table(("name", "skipped"), [("whole", ()), ("without block 1", (1,))])
def test_the_specification_has_the_numbers_of_sglang(name: str, skipped: tuple[int, ...]) -> None:
    recorded = json.loads(Path(__file__).with_name("sglang_velocities.json").read_text())[name]
    latents, text, timestep = wave((2, 8, 3, 2), 0.7), wave((2, 5, 12), 1.3), torch.tensor([938.0, 24.0])
    found = [
        specified(tiny_weights(12), latents[index], timestep[index], text[index, :length], skipped)
        for index, length in enumerate((5, 2))
    ]
    assert relative(torch.stack(found), torch.tensor(recorded).view(2, 8, 3, 2)) < 2e-6


@pytest.fixture(scope="module")
def pipeline(tiny_folder_of: Callable[[str], Path]) -> Pipeline:
    loaded = load_pipeline(str(tiny_folder_of("moss_image")), device="cpu")
    assert isinstance(loaded, Pipeline)
    return loaded


@pytest.fixture(scope="module")
def weights(tiny_folder_of: Callable[[str], Path]) -> Weights:
    return load_file(tiny_folder_of("moss_image") / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def vae(tiny_folder_of: Callable[[str], Path]) -> Any:
    return AutoencoderKLFlux2.from_pretrained(tiny_folder_of("moss_image") / "vae").eval()


@table("lengths", [(7,), (9, 3), (1, 40, 8)])
@table("size", [(1, 1), (3, 5), (6, 4)])
@table("skipped", [(), (0, 2)])
def test_velocities_are_the_specified_ones(
    pipeline: Pipeline, weights: Weights, lengths: tuple[int, ...], size: tuple[int, int], skipped: tuple[int, ...]
) -> None:
    """Noise stands where a text is padding."""
    generator, batch = torch.Generator().manual_seed(1), len(lengths)
    latents = torch.randn(batch, CHANNELS, 1, *size, generator=generator)
    text = torch.randn(batch, max(lengths), pipeline.text_encoder.model.config.hidden_size, generator=generator)
    timestep = torch.tensor([938.0, 24.0, 500.0])[:batch]
    given = DenoiserInputs(Conditions.of(text, lengths), ClipSize(4 * size[0], 4 * size[1], 1, 1))
    context = AttentionContext(step=StepInfo(skipped_blocks=skipped))
    found = pipeline.transformer(latents, timestep, given, context)
    expected = [
        specified(weights, latents[index, :, 0], timestep[index], text[index, :length], skipped)
        for index, length in enumerate(lengths)
    ]
    assert relative(found, torch.stack(expected)[:, :, None]) < 1e-5


def test_noise_levels_are_those_of_sglang() -> None:
    """Of its own test; the last is the trained one nearest to a shifted one."""
    schedule = TrainedLevels()
    found = [1000 * level for level in schedule.levels(5, 5.0)]
    assert found == pytest.approx([1000, 938, 835, 630, 24], abs=1e-4)
    with pytest.raises(RequestError, match="num_inference_steps: 900 steps are closer"):
        schedule.levels(900, 5.0)


@torch.no_grad()
def test_a_prompt_is_that_of_the_chat_format(pipeline: Pipeline) -> None:
    encoder = pipeline.text_encoder
    found = encoder.encode(PROMPTS)
    for index, prompt in enumerate(PROMPTS):
        message = [{"role": "user", "content": prompt}]
        text = encoder.tokenizer.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        assert text == f"{TEMPLATE.before}{prompt.strip()}{TEMPLATE.after}"
        expected = encoder.model(**encoder.tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        assert found.lengths[index] == len(expected)
        assert relative(found.embeddings[index, : len(expected)], expected) < 1e-5


def request(**values: Any) -> GenerationRequest:
    fields = {"prompt": PROMPTS[0], "negative_prompt": "", **TINY_SIZES, "seed": 5, "num_inference_steps": 4}
    return GenerationRequest(**{**fields, **values})


@table(
    "requests",
    [
        [request(prompt=prompt, seed=seed, negative_prompt="a star") for seed, prompt in enumerate(PROMPTS)],
        [request(guidance_scale=2.5, skip_layers=(1,), skip_layer_start=0.3)],
        [
            request(
                guidance_scale=2.5, skip_layers=(0, 2), skip_layer_scale=1.5, skip_layer_stop=0.6, height=20, width=4
            )
        ],
        [request(guidance_scale=1.0, skip_layers=(1,), skip_layer_scale=1.5, flow_shift=2.0)],
    ],
    ["two prompts", "a block left out of the second branch", "skip-layer guidance", "skip-layer guidance alone"],
)
def test_a_generation_is_the_specified_one(
    pipeline: Pipeline,
    weights: Weights,
    vae: Any,
    requests: list[GenerationRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def velocity(latents: torch.Tensor, at: float, prompt: str, skipped: Sequence[int] = ()) -> torch.Tensor:
        text = pipeline.text_encoder.encode([prompt]).embeddings[0]
        return specified(weights, latents, torch.tensor(at), text, skipped)

    def run(each: GenerationRequest, x: torch.Tensor) -> list[torch.Tensor]:
        """As sglang's stage: guidance, then the term of the third pass."""
        assert each.num_inference_steps is not None
        assert each.flow_shift is not None
        levels = [*TrainedLevels().levels(each.num_inference_steps, each.flow_shift), 0.0]
        kept, blocks, scale = [], each.skip_layers or (), each.skip_layer_scale or 0.0
        for index, (level, after) in enumerate(itertools.pairwise(levels)):
            share = index / each.num_inference_steps
            stop = 1.0 if each.skip_layer_stop is None else each.skip_layer_stop
            active = blocks if (each.skip_layer_start or 0.0) <= share < stop else ()
            cond = made = velocity(x, 1000 * level, each.prompt)
            if each.guidance_scale != 1.0:
                uncond = velocity(x, 1000 * level, each.negative_prompt or "", () if scale else active)
                made = uncond + each.guidance_scale * (cond - uncond)
            if scale and active:
                cut = velocity(x, 1000 * level, each.prompt, active)
                made = (cut if each.guidance_scale == 1.0 else made) + scale * (cond - cut)
            x = x + (after - level) * made.float()
            kept.append(x[None, :, None])
        return kept

    def run_theirs(resolved: list[GenerationRequest], noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
        each = [run(item, noise[index, :, 0]) for index, item in enumerate(resolved)]
        steps = [torch.cat(latents) for latents in zip(*each, strict=True)]
        return steps, decoded(vae, steps[-1])

    kept = record_latents(monkeypatch)
    assert_equal_runs(pipeline, requests, kept, run_theirs)


@torch.no_grad()
def decoded(vae: Any, latents: torch.Tensor) -> numpy.ndarray:
    """By diffusers' autoencoder, as sglang's pipeline gives it latents."""
    deviation = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
    packed = latents[:, :, 0] * deviation.view(1, -1, 1, 1) + vae.bn.running_mean.view(1, -1, 1, 1)
    pixels = vae.decode(F.pixel_shuffle(packed, 2)).sample
    return (pixels / 2 + 0.5).clamp(0, 1).movedim(1, -1)[:, None].numpy()
