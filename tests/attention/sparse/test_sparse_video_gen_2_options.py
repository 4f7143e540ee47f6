"""The options of Sparse VideoGen 2."""

from __future__ import annotations

import dataclasses

import pytest
from sparse_oracle import random_qkv
from tables import table

from diffusion_runtime.attention import TokenLayout, list_backends, plan_attention
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.errors import ConfigError

NAME = "sparse_video_gen_2_attn"


def test_options_are_those_of_sglang() -> None:
    backend = find_backend(NAME)
    assert backend is not None
    assert dataclasses.asdict(backend.options_type()) == {
        "svg2_num_q_centroids": 300,
        "svg2_num_k_centroids": 1000,
        "svg2_top_p_kmeans": 0.9,
        "svg2_min_kc_ratio": 0.1,
        "svg2_kmeans_iter_init": 50,
        "svg2_kmeans_iter_step": 2,
        "svg2_zero_step_kmeans_init": False,
        "svg2_first_layers_fp": 0.03,
        "svg2_first_times_fp": 0.2,
        "min_tokens": 0,
        "tail": "none",
        "svg2_seed": 0,
    }
    assert NAME in [info.name for info in list_backends()]


@table(
    ("key", "value", "message"),
    [
        ("svg2_num_q_centroids", 0, "svg2_num_q_centroids: expected 1 or more, got 0"),
        ("svg2_num_k_centroids", -1, "svg2_num_k_centroids: expected 1 or more, got -1"),
        ("svg2_kmeans_iter_step", -1, "svg2_kmeans_iter_step: expected 0 or more, got -1"),
        ("min_tokens", -1, "min_tokens: expected 0 or more, got -1"),
        ("svg2_top_p_kmeans", 90, "svg2_top_p_kmeans: expected a share from 0 to 1, got 90"),
        ("svg2_top_p_kmeans", float("nan"), "svg2_top_p_kmeans: expected float, got nan"),
        ("svg2_min_kc_ratio", -0.1, "svg2_min_kc_ratio: expected a share from 0 to 1"),
        ("svg2_first_layers_fp", 2, "svg2_first_layers_fp: expected a share from 0 to 1"),
        ("svg2_first_times_fp", 1.5, "svg2_first_times_fp: expected a share from 0 to 1"),
        ("svg2_zero_step_kmeans_init", 3, "svg2_zero_step_kmeans_init: expected bool"),
        ("svg2_top_p", 0.9, "unknown option 'svg2_top_p'.*svg2_top_p_kmeans"),
    ],
)
def test_options_that_make_no_sense(key: str, value: float, message: str) -> None:
    layout = TokenLayout((2, 2, 2))
    q, k, _ = random_qkv(layout)
    with pytest.raises(ConfigError, match=message):
        plan_attention(q, k, backend=NAME, options={key: value}, layout=layout)
