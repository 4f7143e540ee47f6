"""Attention choices of a HunyuanVideo folder; what it says and may not say is in family_cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffusion_runtime.attention import AttentionConfig, AttentionPolicy
from diffusion_runtime.errors import BackendUnavailableError
from diffusion_runtime.models.registry import family_for_folder


def test_a_choice_by_role_reaches_the_refiner_and_a_sparse_one_passes_over_it(tiny_folder: Path) -> None:
    choice = {"default": {"backend": "video_sparse_attn"}, "per_role": {"cross": {"backend": "flex_attn"}}}
    model = family_for_folder(tiny_folder).describe(tiny_folder)
    policy = AttentionPolicy(config=AttentionConfig.parse(choice))
    layers = model.build_transformer(policy).attention_layers()
    chosen = {layer.layer.role: layer.decisions.possible[0][1].backend for layer in layers}
    assert chosen == {"self": "video_sparse_attn", "hunyuan_video.text_refiner": "flex_attn"}
    wrong = {"per_role": {"hunyuan_video.text_refiner": {"backend": "video_sparse_attn"}}}
    with pytest.raises(BackendUnavailableError, match="video_sparse_attn"):
        model.build_transformer(AttentionPolicy(config=AttentionConfig.parse(wrong)))
