"""The Qwen-Image 2.1 transformer and its prefix cache against diffusers' own on tiny weights, float32: within 1e-5 of
the largest value."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from family_parity import load_transformer, relative
from tables import table
from tiny_encoders import HIDDEN
from tiny_qwen_image_21 import CHANNELS

from diffusion_runtime.attention import (
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    StepInfo,
    TokenLayout,
    register_backend,
)
from diffusion_runtime.attention.backends.reference import ReferenceBackend
from diffusion_runtime.attention.backends.registry import unregister_backend
from diffusion_runtime.attention.cache.prefix import PrefixCache
from diffusion_runtime.attention.layers import AttentionLayer, LocalAttention
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.errors import BackendUnavailableError, ConfigError
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.models.qwen_image_21.family import FAMILY
from diffusion_runtime.models.qwen_image_21.transformer import QwenImage21Transformer
from diffusion_runtime.text_encoders.interface import Conditions


@pytest.fixture(scope="module")
def ours(tiny_qwen_image_21_folder: Path) -> QwenImage21Transformer:
    return load_transformer(FAMILY, tiny_qwen_image_21_folder)


@pytest.fixture(scope="module")
def theirs(tiny_qwen_image_21_folder: Path) -> QwenImage21Transformer2DModel:
    folder = tiny_qwen_image_21_folder / "transformer"
    return QwenImage21Transformer2DModel.from_pretrained(folder, dtype=torch.float32).eval()


@contextlib.contextmanager
def no_causal() -> Iterator[str]:
    """A backend that attends to a prefix and does not do causal attention, as fp8_attn on a GPU."""

    class NoCausal(ReferenceBackend):
        name: ClassVar[str] = "no_causal"
        capability = dataclasses.replace(
            ReferenceBackend.capability, features=ReferenceBackend.capability.features - {"causal"}
        )

    register_backend(NoCausal)
    try:
        yield NoCausal.name
    finally:
        unregister_backend(NoCausal.name)


def arguments(
    lengths: tuple[int, ...] = (7,), rows: int = 4, columns: int = 6
) -> tuple[torch.Tensor, torch.Tensor, DenoiserInputs]:
    generator = torch.Generator().manual_seed(1)
    batch = len(lengths)
    latents = torch.randn(batch, CHANNELS, 1, rows, columns, generator=generator)
    text = torch.randn(batch, max(lengths), HIDDEN, generator=generator)
    size = ClipSize(16 * rows, 16 * columns, 1, 1)
    return latents, torch.linspace(937.3, 12.0, batch + 1)[:batch], DenoiserInputs(Conditions.of(text, lengths), size)


@torch.no_grad()
def run_theirs(
    model: QwenImage21Transformer2DModel,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    inputs: DenoiserInputs,
    **cache: Any,
) -> torch.Tensor:
    batch, rows, columns = len(latents), *latents.shape[-2:]
    num_text_tokens, num_tokens = inputs.text.embeddings.shape[1], rows * columns
    # Each slot of a picture stands for four tokens.
    slots = torch.arange(num_text_tokens + num_tokens // 4) >= num_text_tokens
    out = model(
        hidden_states=latents.flatten(2).transpose(1, 2),
        encoder_hidden_states=inputs.text.embeddings,
        timestep=timestep / 1000,
        img_shapes=[[(1, rows, columns)]] * batch,
        img_mask=slots.expand(batch, -1),
        return_dict=False,
        **cache,
    )[0][:, -num_tokens:]
    return out.transpose(1, 2).unflatten(2, (1, rows, columns))


@table("lengths", [(7,), (5, 5), (1,)])
@table("size", [(4, 6), (2, 2), (8, 2)])
def test_velocities_equal_those_of_diffusers(
    ours: QwenImage21Transformer, theirs: Any, lengths: tuple[int, ...], size: tuple[int, int]
) -> None:
    given = arguments(lengths, *size)
    before = given[0].clone(), given[2].text.embeddings.clone()
    assert relative(ours(*given, AttentionContext()), run_theirs(theirs, *given)) < 1e-5
    assert torch.equal(given[0], before[0])
    assert torch.equal(given[2].text.embeddings, before[1])


def test_the_prefix_of_the_first_pass_serves_the_others(ours: QwenImage21Transformer, theirs: Any) -> None:
    """Later passes read the text's keys and values, in diffusers' class too; both equal passes without a cache."""
    latents, timestep, inputs = arguments((6, 6))
    context, cache = AttentionContext(), QwenImage21KVCache(3)
    calls: list[int] = []
    hook = ours.text_embedding.register_forward_hook(lambda *_: calls.append(1))
    for factor, mode in ((1.0, "extract"), (0.6, "cached"), (0.3, "cached")):
        given = factor * latents, factor * timestep, inputs
        found = ours(*given, context)
        assert relative(found, run_theirs(theirs, *given, kv_cache=cache, kv_cache_mode=mode)) < 1e-5
        assert relative(found, run_theirs(theirs, *given)) < 1e-5
    hook.remove()
    assert len(calls) == 1
    report = context.recorder.report()
    # 6 tokens of two samples, of 2 heads of 16 numbers in 3 layers, float32.
    assert "text: keys and values of 6 tokens computed once, 0.0 MB" in report.notes
    assert sum(row.count for row in report.rows) == 3 + 3 * 3


def test_every_input_matters(ours: QwenImage21Transformer) -> None:
    """Otherwise the comparisons could not tell whether one went astray on both sides."""
    latents, timestep, inputs = arguments()
    out = ours(latents, timestep, inputs, AttentionContext())
    text = inputs.text
    others = [
        (timestep / 2, inputs),
        (timestep, dataclasses.replace(inputs, text=dataclasses.replace(text, embeddings=-text.embeddings))),
        (timestep, dataclasses.replace(inputs, text=dataclasses.replace(text, embeddings=text.embeddings.flip(1)))),
    ]
    for other in others:
        assert relative(ours(latents, *other, AttentionContext()), out) > 1e-3


def test_a_batch_equals_its_samples_and_padding_is_left_out(ours: QwenImage21Transformer) -> None:
    latents, timestep, inputs = arguments((4, 9))
    together = ours(latents, timestep, inputs, AttentionContext())
    for index, length in enumerate(inputs.text.lengths):
        part = slice(index, index + 1)
        alone = dataclasses.replace(inputs, text=Conditions.of(inputs.text.embeddings[part, :length]))
        assert relative(together[part], ours(latents[part], timestep[part], alone, AttentionContext())) < 1e-5


def test_layers_see_the_grid_and_the_text_apart(ours: QwenImage21Transformer) -> None:
    seen: list[tuple[bool, TokenLayout | None]] = []

    def keep(module: AttentionLayer, given: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        assert keywords.get("mask") is None
        seen.append((module.causal, given[3].layout))

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in ours.attention_layers()]
    ours(*arguments((4, 9)), AttentionContext())
    for hook in hooks:
        hook.remove()
    assert seen == [(True, None)] * 3 + [(False, TokenLayout((1, 4, 6)))] * 3


def test_text_behind_a_prefix_with_padding_is_refused() -> None:
    layer = LocalAttention(2, 16, cached_keys=True)
    keys = torch.zeros(2, 5, 2, 16)
    context = AttentionContext(TokenLayout((1, 2, 2), num_suffix_tokens=1), prefix=PrefixCache(((keys, keys),), (3, 5)))
    with pytest.raises(
        ConfigError, match="self: expected a grid alone for a prefix cache with padding, got TokenLayout"
    ):
        layer(keys, keys, keys, context)


def test_each_phase_has_its_own_choices(tiny_qwen_image_21_folder: Path) -> None:
    """A choice for the steps is no choice for the text's causal pass, which a general one that cannot do it passes
    over; a rule for a phase in which no layer of its kind runs is refused."""

    def served(**choices: Any) -> dict[bool, str]:
        policy = AttentionPolicy(config=AttentionConfig.parse(choices), has_phases=True)
        layers = FAMILY.describe(tiny_qwen_image_21_folder).build_transformer(policy).attention_layers()
        found = {
            layer.causal: layer.decisions.resolved_at(StepInfo(phase="commit" if layer.causal else "denoise"), None)
            for layer in layers
            # A picture's tokens are of the text's phase, and not causal.
            if not layer.layer.name.endswith("picture_attention")
        }
        return {causal: resolved.decision.backend for causal, resolved in found.items()}

    with no_causal() as name:
        assert served(default=name) == {False: name, True: "torch_sdpa"}
        assert served(schedule=[{"phase": "decode", "role": "self", "backend": name}]) == {
            False: name,
            True: "torch_sdpa",
        }
        assert served(schedule=[{"phase": "prefill", "backend": "reference"}]) == {
            False: "torch_sdpa",
            True: "reference",
        }
        with pytest.raises(BackendUnavailableError, match="cannot do causal"):
            served(schedule=[{"phase": "prefill", "role": "self", "backend": name}])
