"""Fields of a config that declare their keys: kinds, values that are left out, prefixes, classes on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tables import table

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.model_folder import ConfigFile
from diffusion_runtime.errors import ModelLoadError


@config_fields.config
class Sizes:
    num_layers: int = config_fields.layer_count("layers")
    num_heads: int = config_fields.whole_number("heads", 4)
    head_dim: int = config_fields.even_number("head_size", 12)
    num_channels: int = config_fields.equal_channels(8, multiple_of=4)
    ffn_dim: int = config_fields.ffn_width("ratio", 4.0)
    axes: tuple[int, ...] = config_fields.rotary_axes("axes", (4, 4, 4))
    patch: tuple[int, int, int] = config_fields.token_patch("patch_t", "patch")
    is_odd: bool = config_fields.flag("odd", False)
    eps: float = config_fields.number("eps", 1e-6)
    # Computed of others.
    dim: int = 0


@config_fields.config
class Later(Sizes):
    eps: float = config_fields.number("epsilon", 1e-5)
    is_odd: bool = config_fields.constant(True)


def file_of(**values: Any) -> ConfigFile:
    return ConfigFile(Path("config.json"), {"_class_name": "Some", "layers": 3, "patch": 2, **values})


def test_values_that_are_left_out_are_those_of_published_files() -> None:
    found = config_fields.read_fields(Sizes, file_of(fixed=1, unread="x"), fixed={"fixed": 1}, others=("unread",))
    assert Sizes(**found, dim=48) == Sizes(3, 4, 12, 8, 192, (4, 4, 4), (1, 2, 2), False, 1e-6, dim=48)


def test_a_class_on_another_has_its_keys_but_for_those_that_it_declares_again() -> None:
    keys = set(config_fields.keys_of(Later))
    assert keys == set(config_fields.keys_of(Sizes)) - {"eps", "odd"} | {"epsilon"}
    found = config_fields.read_fields(Later, file_of(epsilon=0.5))
    assert (found["eps"], found["is_odd"]) == (0.5, True)
    with pytest.raises(ModelLoadError, match="key 'odd' is unknown to this runtime"):
        config_fields.read_fields(Later, file_of(odd=True))


def test_a_prefix_is_that_of_every_key() -> None:
    values = {"layers": 2, "patch": 2, "heads": 2, "in_channels": 4, "odd": True, "ratio": 2}
    file = ConfigFile(Path("config.json"), {f"audio_{key}": value for key, value in values.items()})
    found = config_fields.read_declared(Sizes, file, "audio_")
    assert (found["num_layers"], found["num_heads"], found["patch"]) == (2, 2, (1, 2, 2))
    assert (found["num_channels"], found["is_odd"], found["ffn_dim"]) == (4, True, 48)
    assert "audio_in_channels" in config_fields.keys_of(Sizes, "audio_")


@table(
    ("values", "told"),
    [
        ({"layers": None}, "key 'layers' is missing"),
        ({"heads": 0}, "key 'heads': expected a whole number from 1"),
        ({"head_size": 13}, "key 'head_size': expected an even number"),
        ({"in_channels": 6}, "key 'in_channels': expected a multiple of 4, got 6"),
        ({"out_channels": 4}, "key 'out_channels': expected 8, in_channels"),
        ({"axes": [4, 4, 6]}, "key 'axes': expected even numbers whose sum is attention_head_dim, 12"),
        ({"fixed": True}, "key 'fixed': expected 1, as published, got True"),
        ({"fixed": 2}, "key 'fixed': expected 1, as published, got 2"),
        ({"layer": 3}, "key 'layer' is unknown to this runtime. Did you mean 'layers'"),
    ],
)
def test_a_value_of_another_kind_and_an_unknown_key_are_named(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelLoadError, match=told):
        config_fields.read_fields(Sizes, file_of(**values), fixed={"fixed": 1}, why="as published")
