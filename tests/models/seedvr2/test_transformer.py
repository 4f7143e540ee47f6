"""SeedVR2's transformer: its windows against a specification of their own, and its output against its authors' code.

recorded.npz was made by github.com/ByteDance-Seed/SeedVR at 673b563 (models/dit_v2 and models/dit, on the weights of
tests/tiny_seedvr2.py, without the casts to bfloat16 and with torch's attention for each window in place of
flash-attn's), every 331st number.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy
import pytest
import torch
from tables import table
from tiny_seedvr2 import CHANNELS, write_tiny_seedvr2

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer, ImageCondition
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.models.seedvr2.positions import joint_paces, window_paces
from diffusion_runtime.models.seedvr2.transformer import SeedVR2Block, SeedVR2Transformer
from diffusion_runtime.models.seedvr2.windows import window_size, windows_of
from diffusion_runtime.text_encoders.interface import Conditions

RECORDED = Path(__file__).with_name("recorded.npz")
CPU = torch.device("cpu")
# Several windows along each axis, of several shapes: 92 x 96 latents are 46 x 48 tokens.
SHAPE = (2, 92, 96)


def load(folder: Path) -> tuple[DiffusionTransformer, torch.Tensor]:
    model = family_for_folder(folder).open(folder)
    transformer = model.load_transformer(model.build_transformer(AttentionPolicy()), CPU, torch.float32)
    return transformer.eval(), model.load_text_encoder(CPU, torch.float32).encode(["-"]).embeddings


@pytest.fixture(scope="module", params=["small", "large"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, write_tiny_seedvr2(folder, is_large=request.param == "large")


def given(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    latents = torch.randn(CHANNELS, *shape, generator=generator)
    return latents[None], torch.randn(CHANNELS + 1, *shape, generator=generator)[None]


def run(
    transformer: DiffusionTransformer, latents: torch.Tensor, image: torch.Tensor, text: torch.Tensor
) -> torch.Tensor:
    batch, (frames, height, width) = len(latents), latents.shape[2:]
    inputs = DenoiserInputs(
        Conditions.of(text.expand(batch, -1, -1)),
        ClipSize(8 * height, 8 * width, 4 * frames - 3, 24),
        image=ImageCondition(image),
    )
    return transformer(latents, torch.full((batch,), 1000.0), inputs, AttentionContext())


def test_the_output_is_that_of_the_authors(loaded: tuple[str, Path]) -> None:
    name, folder = loaded
    transformer, text = load(folder)
    latents, image = given(*SHAPE)
    made = run(transformer, latents, image, text)
    expected = numpy.load(RECORDED)[f"transformer_{name}"]
    assert numpy.abs(made.flatten()[::331].numpy() - expected).max() < 1e-5


def test_a_sample_does_not_depend_on_its_batch(loaded: tuple[str, Path]) -> None:
    transformer, text = load(loaded[1])
    latents, image = given(3, 6, 10)
    both = torch.cat([latents, latents.flip(-1)]), torch.cat([image, image.flip(-2)])
    together = run(transformer, *both, text)
    for index in range(2):
        alone = run(transformer, both[0][index : index + 1], both[1][index : index + 1], text)
        assert (together[index] - alone[0]).abs().max() < 1e-5


def window_numbers(length: int, size: int, *, is_shifted: bool) -> torch.Tensor:
    """Specification: the number of the window of each position along an axis. Shifted windows begin half a window
    earlier; of an odd size the odd token belongs to the window behind."""
    shift = -(-size // 2) if is_shifted and size < length else 0
    return (torch.arange(length) + shift) // size


def numbers_of(grid: tuple[int, int, int], *, is_shifted: bool) -> list[torch.Tensor]:
    pairs = zip(grid, window_size(grid), strict=True)
    return [window_numbers(length, size, is_shifted=is_shifted) for length, size in pairs]


@table("is_shifted", [False, True])
@table("grid", [(1, 45, 80), (13, 45, 80), (9, 68, 120), (21, 30, 45), (4, 135, 97), (31, 8, 8), (1, 1, 3)])
def test_windows_are_those_of_the_specification(grid: tuple[int, int, int], is_shifted: bool) -> None:
    frames, rows, columns = numbers_of(grid, is_shifted=is_shifted)
    # One number for each window of the whole grid.
    of_token = (frames[:, None, None] * 1000 + rows[:, None]) * 1000 + columns
    seen = torch.zeros(grid, dtype=torch.int64)
    for t, h, w in windows_of(grid, is_shifted=is_shifted):
        box = of_token[t.start : t.stop, h.start : h.stop, w.start : w.stop]
        assert box.unique().numel() == 1
        assert int((of_token == box.flatten()[0]).sum()) == box.numel()
        seen[t.start : t.stop, h.start : h.stop, w.start : w.stop] += 1
    assert (seen == 1).all()


def test_windows_of_a_720p_clip_are_a_third_of_its_sides() -> None:
    assert window_size((13, 45, 80)) == (4, 15, 27)
    assert len(windows_of((13, 45, 80), is_shifted=False)) == 4 * 3 * 3
    assert len(windows_of((13, 45, 80), is_shifted=True)) == 4 * 4 * 4


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring channels of x [tokens, heads, head_dim] by angles [tokens, pairs]; the rest stays."""
    count = 2 * angles.shape[1]
    numbers = torch.view_as_complex(x[..., :count].double().unflatten(-1, (-1, 2)).contiguous())
    whole = torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)
    return torch.cat([whole.to(x.dtype), x[..., count:]], dim=-1)


def specification(
    product: torch.Tensor, further: torch.Tensor, block: SeedVR2Block, grid: tuple[int, int, int], *, turns_text: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of video and text with a mask of all tokens, and positions counted within windows."""
    layer, of_text = block.attention, block.video if block.text is None else block.text
    q, k, v = product[0].unflatten(-1, (3, layer.num_heads, -1)).clone().unbind(1)
    q_text, k_text, v_text = further[0].unflatten(-1, (3, layer.num_heads, -1)).clone().unbind(1)
    q, k = block.video.norm_q(q.contiguous()), block.video.norm_k(k.contiguous())
    q_text, k_text = of_text.norm_q(q_text.contiguous()), of_text.norm_k(k_text.contiguous())
    numbers, num_words = numbers_of(grid, is_shifted=block.is_shifted), len(q_text)
    places = []
    for own in numbers:
        first = torch.searchsorted(own, own.contiguous())
        place = (torch.arange(len(own)) - first).double()
        size = (own[:, None] == own).sum(1)
        # -1 to 1 across the window; -1 for a window of one token.
        places.append(place if turns_text else -1 + 2 * place / (size - 1).clamp(min=1))
    paces = joint_paces(layer.head_dim) if turns_text else window_paces(layer.head_dim)
    if turns_text:
        places[0] += num_words
        words = torch.arange(num_words).double()[:, None] * paces
        q_text, k_text = (turned(each, words.repeat(1, 3)) for each in (q_text, k_text))
    shape = [(slice(None), None, None), (None, slice(None), None), (None, None, slice(None))]
    angles = torch.cat(
        [
            (place[index].expand(grid)[..., None] * paces).flatten(0, 2)
            for place, index in zip(places, shape, strict=True)
        ],
        dim=-1,
    )
    q, k = turned(q, angles), turned(k, angles)
    window = (numbers[0][:, None, None] * 10**6 + numbers[1][:, None] * 10**3 + numbers[2]).flatten()
    keys, values = torch.cat([k, k_text]), torch.cat([v, v_text])

    def attend(queries: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / layer.head_dim**0.5
        mask = torch.cat([sees, torch.ones(len(sees), num_words, dtype=torch.bool)], dim=1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), values)

    of_video = attend(q, window[:, None] == window)
    of_words = [attend(q_text, (window == each).expand(num_words, -1)) for each in window.unique()]
    return of_video.flatten(1)[None], torch.stack(of_words).mean(0).flatten(1)[None]


def test_attention_within_windows_is_that_of_a_mask(loaded: tuple[str, Path]) -> None:
    """Both kinds of windows; 2 x 34 x 26 tokens are windows of several shapes."""
    transformer, _ = load(loaded[1])
    assert isinstance(transformer, SeedVR2Transformer)
    grid, generator = (2, 34, 26), torch.Generator().manual_seed(4)
    plans, turns = transformer._plans(grid, 5, CPU)
    assert min(plan.num_windows for plan in plans) > 4
    for block in transformer.blocks[:2]:
        assert isinstance(block, SeedVR2Block)
        inner = 3 * block.attention.num_heads * block.attention.head_dim
        product, further = (torch.randn(1, count, inner, generator=generator) for count in (2 * 34 * 26, 5))
        of_text = block.video if block.text is None else block.text
        expected = specification(product, further, block, grid, turns_text=transformer.config.turns_text)
        plan = plans[block.is_shifted]
        contexts = (AttentionContext(),) * len(plan.groups)
        made = block._attend(product.clone(), further.clone(), of_text, plan, turns, contexts)
        for ours, theirs in zip(made, expected, strict=True):
            assert (ours - theirs).abs().max() < 1e-5


def test_windows_of_one_shape_are_one_call(loaded: tuple[str, Path]) -> None:
    transformer, text = load(loaded[1])
    latents, image = given(1, 92, 96)
    calls: list[int] = []
    first = transformer.blocks[0]
    assert isinstance(first, SeedVR2Block)
    first.attention.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    run(transformer, latents, image, text)
    # 46 x 48 tokens in windows of 20 x 21: 2 x 2 whole ones, and smaller ones at two edges and the corner.
    assert sorted(calls) == [1, 2, 2, 4]


def test_plans_are_made_for_a_request_once(loaded: tuple[str, Path]) -> None:
    transformer, text = load(loaded[1])
    latents, image = given(1, 4, 6)
    context, made = AttentionContext(), []
    assert isinstance(transformer, SeedVR2Transformer)
    plans = transformer._plans
    transformer._plans = lambda *sizes: made.append(sizes) or plans(*sizes)  # type: ignore[func-returns-value,method-assign]
    inputs = DenoiserInputs(Conditions.of(text), ClipSize(32, 48, 1, 24), image=ImageCondition(image))
    for index in range(2):
        step = dataclasses.replace(context.step, index=index, num_steps=2)
        transformer(latents, torch.tensor([1000.0]), inputs, dataclasses.replace(context, step=step))
    assert len(made) == 1
