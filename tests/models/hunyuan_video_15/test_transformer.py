"""Our transformer against diffusers' HunyuanVideo15Transformer3DModel on the same weights, float32 on the CPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from family_parity import CPU, relative, write_plain_scheduler
from tables import table
from tiny_hunyuan_video_15 import CHANNELS, GLYPH_DIM, IMAGE_DIM, TEXT_DIM, random_transformer

from diffusion_runtime.attention import AttentionConfig, AttentionContext, AttentionPolicy, StepInfo, TokenLayout
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.hunyuan_video_15.family import FAMILY
from diffusion_runtime.models.hunyuan_video_15.text_stream import REFINER_ROLE, Tokens, joined
from diffusion_runtime.models.hunyuan_video_15.transformer import HunyuanVideo15Transformer
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.text_encoders.interface import Conditions, TextStream

NUM_TEXT_TOKENS, NUM_GLYPH_TOKENS, NUM_IMAGE_TOKENS = 9, 6, 4
SIZE = ClipSize(32, 48, 9, 24)
VARIANTS: dict[str, dict[str, Any]] = {
    "text": {},
    "image": {"starts_from_image": True},
    "text, three heads, other axes": {"num_heads": 3, "axis_channels": (8, 4, 4)},
    "image, other patch": {"starts_from_image": True, "patch": (2, 2)},
    "image, meanflow": {"starts_from_image": True, "use_meanflow": True},
}


@dataclass(frozen=True)
class Inputs:
    """What one forward pass gets. lengths, glyph_lengths: real tokens; what lies behind them is noise on purpose."""

    latents: torch.Tensor
    timestep: torch.Tensor
    text: torch.Tensor
    lengths: tuple[int, ...]
    glyphs: torch.Tensor
    glyph_lengths: tuple[int, ...]
    image: ImageCondition | None

    def take(self, index: int) -> Inputs:
        part = slice(index, index + 1)
        image = self.image
        if image is not None:
            assert image.embeddings is not None
            image = ImageCondition(image.latents[part], image.embeddings[part])
        return Inputs(
            self.latents[part],
            self.timestep[part],
            self.text[part],
            self.lengths[part],
            self.glyphs[part],
            self.glyph_lengths[part],
            image,
        )

    def for_ours(self) -> DenoiserInputs:
        written = TextStream(self.glyphs, self.glyph_lengths)
        return DenoiserInputs(
            text=Conditions.of(self.text, self.lengths, further=[written]), size=SIZE, image=self.image
        )


def make_inputs(
    shape: tuple[int, int, int],
    lengths: tuple[int, ...] = (5, 9),
    glyph_lengths: tuple[int, ...] = (6, 0),
    has_image: bool = False,
) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    batch = len(lengths)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(batch, *sizes, generator=generator)

    image = ImageCondition(random(CHANNELS, 1, *shape[1:]), random(NUM_IMAGE_TOKENS, IMAGE_DIM))
    return Inputs(
        random(CHANNELS, *shape),
        torch.linspace(937.3, 12.0, batch + 1)[:batch],
        random(NUM_TEXT_TOKENS, TEXT_DIM),
        lengths,
        random(NUM_GLYPH_TOKENS, GLYPH_DIM),
        glyph_lengths,
        image if has_image else None,
    )


def write_rest(folder: Path) -> None:
    """What a family reads beside the transformer's folder."""
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text(json.dumps({"latent_channels": CHANNELS}))
    index = {"transformer": ["diffusers", "HunyuanVideo15Transformer3DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    write_plain_scheduler(folder)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            path = folders[name] = tmp_path_factory.mktemp("hunyuan_video_15")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                random_transformer(**VARIANTS[name]).save_pretrained(path / "transformer")
            write_rest(path)
        return folders[name]

    return folder


def load_ours(folder: Path, dtype: torch.dtype = torch.float32, attention: Any = None) -> HunyuanVideo15Transformer:
    model = family_for_folder(folder).describe(folder)
    policy = AttentionPolicy(dtype=dtype, config=AttentionConfig.parse(attention))
    transformer = model.load_transformer(model.build_transformer(policy), CPU, dtype)
    assert isinstance(transformer, HunyuanVideo15Transformer)
    return transformer


def load_theirs(folder: Path, dtype: torch.dtype = torch.float32) -> HunyuanVideo15Transformer3DModel:
    return HunyuanVideo15Transformer3DModel.from_pretrained(folder / "transformer", dtype=dtype).eval()


def run_ours(
    model: HunyuanVideo15Transformer,
    inputs: Inputs,
    context: AttentionContext | None = None,
    given: DenoiserInputs | None = None,
) -> torch.Tensor:
    given = inputs.for_ours() if given is None else given
    return model(inputs.latents, inputs.timestep, given, AttentionContext() if context is None else context)


@torch.no_grad()
def run_theirs(
    model: HunyuanVideo15Transformer3DModel,
    inputs: Inputs,
    dtype: torch.dtype = torch.float32,
    next_timestep: float | None = None,
) -> torch.Tensor:
    def mask(num_tokens: int, lengths: tuple[int, ...]) -> torch.Tensor:
        return (torch.arange(num_tokens)[None] < torch.tensor(lengths)[:, None]).to(dtype)

    batch, _, frames, height, width = inputs.latents.shape
    condition, where = torch.zeros_like(inputs.latents), torch.zeros(batch, 1, frames, height, width)
    tokens = torch.zeros(batch, NUM_IMAGE_TOKENS, IMAGE_DIM)
    if inputs.image is not None:
        assert inputs.image.embeddings is not None
        condition[:, :, :1] = inputs.image.latents
        where[:, :, 0] = 1
        tokens = inputs.image.embeddings
    return model(
        torch.cat([inputs.latents, condition, where], dim=1).to(dtype),
        inputs.timestep.to(dtype),
        inputs.text.to(dtype),
        mask(NUM_TEXT_TOKENS, inputs.lengths),
        encoder_hidden_states_2=inputs.glyphs.to(dtype),
        encoder_attention_mask_2=mask(NUM_GLYPH_TOKENS, inputs.glyph_lengths),
        image_embeds=tokens.to(dtype),
        timestep_r=None if next_timestep is None else torch.full_like(inputs.timestep, next_timestep),
        return_dict=False,
    )[0]


# --- parity -----------------------------------------------------------------------------------------------------------


@table("name", VARIANTS)
def test_forward_equals_diffusers(folder_of: Callable[[str], Path], name: str) -> None:
    folder = folder_of(name)
    ours, theirs = load_ours(folder), load_theirs(folder)
    frames, height, width = ours.geometry.patch
    for grid in ((1, 2, 3), (3, 5, 2)):
        for lengths, glyph_lengths in (((4,), (0,)), ((5, 9), (6, 0)), ((2, 3), (0, 0)), ((9, 4), (3, 5))):
            shape = (grid[0] * frames, grid[1] * height, grid[2] * width)
            inputs = make_inputs(shape, lengths, glyph_lengths, has_image="image" in name)
            before = [tensor.clone() for tensor in (inputs.latents, inputs.text, inputs.glyphs)]
            following = 610.5 if "meanflow" in name else None
            out = run_ours(ours, inputs, AttentionContext(step=StepInfo(next_timestep=following)))
            assert out.shape == inputs.latents.shape
            assert relative(out, run_theirs(theirs, inputs, next_timestep=following)) < 1e-5
            after = (inputs.latents, inputs.text, inputs.glyphs)
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_the_next_timestep_is_an_input_of_meanflow_models_alone(folder_of: Callable[[str], Path]) -> None:
    inputs = make_inputs((2, 4, 6), has_image=True)
    contexts = [AttentionContext(step=StepInfo(next_timestep=timestep)) for timestep in (500.0, 0.0)]
    for name, differs in (("image, meanflow", True), ("image", False)):
        model = load_ours(folder_of(name))
        one, other = (run_ours(model, inputs, context) for context in contexts)
        assert (relative(one, other) > 1e-3) == differs


def test_a_batch_that_starts_from_images_equals_its_samples(folder_of: Callable[[str], Path]) -> None:
    ours = load_ours(folder_of("image"))
    inputs = make_inputs((2, 4, 6), (9, 3, 6), (0, 2, 6), has_image=True)
    together = run_ours(ours, inputs)
    for index in range(3):
        assert relative(together[index : index + 1], run_ours(ours, inputs.take(index))) < 1e-5


def test_every_condition_matters(folder_of: Callable[[str], Path]) -> None:
    """Otherwise the comparisons above could not tell whether one of them went astray."""
    ours = load_ours(folder_of("image"))
    inputs = make_inputs((2, 4, 4), (5,), (3,), has_image=True)
    out, image = run_ours(ours, inputs), inputs.image
    assert image is not None
    assert image.embeddings is not None
    text, glyphs = inputs.text.clone(), inputs.glyphs.clone()
    text[0, 4] += 1.0
    glyphs[0, 2] = glyphs[0, 2].flip(0)
    changes: list[dict[str, Any]] = [
        {"text": text},
        {"glyphs": glyphs},
        {"lengths": (4,)},
        {"glyph_lengths": (0,)},
        {"image": ImageCondition(image.latents + 1.0, image.embeddings)},
        {"image": ImageCondition(image.latents, image.embeddings.flip(2))},
        {"timestep": inputs.timestep - 100},
    ]
    for change in changes:
        assert relative(run_ours(ours, dataclasses.replace(inputs, **change)), out) > 1e-3


def test_bfloat16_is_as_exact_as_diffusers(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("image")
    # Their pipeline rounds the timestep to the dtype; ours does not, so one that needs no rounding.
    inputs = dataclasses.replace(make_inputs((2, 6, 8), has_image=True), timestep=torch.tensor([936.0, 480.0]))
    reference = run_theirs(load_theirs(folder), inputs)
    theirs_error = relative(run_theirs(load_theirs(folder, torch.bfloat16), inputs, torch.bfloat16), reference)
    ours = load_ours(folder, torch.bfloat16)
    for name, parameter in ours.named_parameters():
        assert FAMILY.weights.stays_float32(name) == (parameter.dtype == torch.float32)
    out = run_ours(ours, inputs)
    assert out.dtype == torch.float32
    assert relative(out, reference) < 1.5 * theirs_error < 0.3


# --- attention --------------------------------------------------------------------------------------------------------


def test_padding_of_all_streams_is_one_length_and_no_mask_reaches_a_layer(folder_of: Callable[[str], Path]) -> None:
    ours = load_ours(folder_of("image"))
    seen: dict[str, list[TokenLayout]] = {REFINER_ROLE: [], "self": []}

    def keep(module: AttentionLayer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        assert options.get("mask") is None
        seen[module.layer.role].append(arguments[3].layout)

    for layer in ours.attention_layers():
        layer.register_forward_pre_hook(keep, with_kwargs=True)
    run_ours(ours, make_inputs((2, 4, 6), (5, 3), (2, 6), has_image=True))
    # 4 tokens of the image, then of text to write, then of the prompt; 13 is the longest of both samples.
    assert set(seen["self"]) == {TokenLayout((2, 4, 6), num_suffix_tokens=13, valid_lengths=(11, 13))}
    assert set(seen[REFINER_ROLE]) == {TokenLayout.text(5, (5, 3))}


def test_real_tokens_of_every_part_come_first() -> None:
    parts = [torch.full((2, num, 1), float(value)) for num, value in ((2, 1), (3, 2), (4, 3))]
    whole = joined([Tokens(parts[0], (2, 2)), Tokens(parts[1], (1, 0)), Tokens(parts[2], (2, 4))])
    assert whole.lengths == (5, 6)
    assert whole.values.squeeze(-1).tolist() == [[1, 1, 2, 3, 3, 0], [1, 1, 3, 3, 3, 3]]


def test_a_sparse_backend_that_keeps_everything_equals_dense(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("image")
    inputs = make_inputs((3, 8, 6), (5, 9), has_image=True)
    sparse = load_ours(folder, attention={"backend": "video_sparse_attn", "extra": {"sparsity": 0.0}})
    context = AttentionContext()
    assert relative(run_ours(sparse, inputs, context), run_ours(load_ours(folder), inputs)) < 1e-5
    backends = {row.role: row.backend for row in context.recorder.report().rows}
    assert backends == {"self": "video_sparse_attn", REFINER_ROLE: "torch_sdpa"}


# --- what is kept between steps ---------------------------------------------------------------------------------------


def test_text_and_image_are_projected_once_a_request_and_branch(folder_of: Callable[[str], Path]) -> None:
    ours = load_ours(folder_of("image"))
    calls: list[str] = []
    for name in ("refiner.projection", "glyphs", "image"):
        module = ours.text.get_submodule(name)
        module.register_forward_hook(lambda module, arguments, out, name=name: calls.append(name))
    inputs = make_inputs((1, 4, 4), has_image=True)
    given = inputs.for_ours()
    other = dataclasses.replace(inputs, text=inputs.text.flip(2)).for_ours()
    first, second = (run_ours(ours, inputs, given=words) for words in (given, other))
    assert relative(first, second) > 1e-3
    calls.clear()
    cond = AttentionContext(step=StepInfo(branch="cond"))
    uncond = AttentionContext(step=StepInfo(branch="uncond"), state=cond.state)
    for _ in range(3):
        assert torch.equal(run_ours(ours, inputs, cond, given), first)
        assert torch.equal(run_ours(ours, inputs, uncond, other), second)
    assert sorted(calls) == ["glyphs", "glyphs", "image", "image", "refiner.projection", "refiner.projection"]
    # The same branch with another text.
    assert torch.equal(run_ours(ours, inputs, cond, other), second)
    assert len(calls) == 9


def test_a_model_that_starts_from_an_image_says_when_there_is_none(folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(RequestError, match="image_path: this checkpoint makes videos from an image"):
        run_ours(load_ours(folder_of("image")), make_inputs((1, 4, 4)))
