"""Fields of a config that a component's config.json sets: each declared once, by its key, its kind and the value that
published files leave out.

    @config_fields.config
    class SomeConfig:
        num_layers: int = config_fields.layer_count("num_layers")
        num_heads: int = config_fields.whole_number("num_attention_heads", 24)

    config = SomeConfig(**config_fields.read_fields(SomeConfig, file))

A field has no default: a config that is made by hand names all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar, dataclass_transform

from diffusion_runtime.core.model_folder import ConfigFile

T = TypeVar("T")
_KEY = "diffusion_runtime.config_field"
_ONLY = "the only value this family runs"
# (the file, prefix of its keys, values of the fields before) -> the value.
_Read: TypeAlias = Callable[[ConfigFile, str, Mapping[str, Any]], Any]


class _Declared(NamedTuple):
    """keys: of config.json."""

    keys: tuple[str, ...]
    read: _Read


def _declared(keys: str | tuple[str, ...], read: _Read) -> Any:
    return dataclasses.field(metadata={_KEY: _Declared((keys,) if isinstance(keys, str) else keys, read)})


def whole_number(key: str, default: int | None = None, *, minimum: int = 1, multiple_of: int = 1) -> Any:
    """Declare an integer. default: where the file leaves it out; None where it must not."""

    def read(file: ConfigFile, prefix: str, _: Mapping[str, Any]) -> int:
        value = file.whole_number(prefix + key, default, minimum)
        if value % multiple_of:
            raise file.error(prefix + key, f"a multiple of {multiple_of}", value)
        return value

    return _declared(key, read)


def layer_count(key: str, default: int | None = None) -> Any:
    """Declare a number of layers."""
    return _declared(key, lambda file, prefix, _: file.layer_count(prefix + key, default))


def even_number(key: str, default: int | None = None) -> Any:
    """Declare an even integer."""
    return _declared(key, lambda file, prefix, _: file.even_number(prefix + key, default))


def number(key: str, default: float | None = None) -> Any:
    """Declare a finite number."""
    return _declared(key, lambda file, prefix, _: file.number(prefix + key, default))


def flag(key: str, default: bool | None = None) -> Any:
    """Declare true or false."""
    return _declared(key, lambda file, prefix, _: file.flag(prefix + key, default))


def rotary_axes(key: str, default: tuple[int, ...] | None = None, *, length: int = 3) -> Any:
    """Declare the channels of a head that carry each axis of the rotary positions, behind a field `head_dim`."""
    return _declared(key, lambda file, _, found: file.rotary_axes(key, found["head_dim"], length, default=default))


def ffn_width(key: str, default: float) -> Any:
    """Declare the width within feed-forward networks, a ratio in the file, behind the width `dim` or the fields
    `num_heads` and `head_dim`."""

    def read(file: ConfigFile, prefix: str, found: Mapping[str, Any]) -> int:
        dim = found["dim"] if "dim" in found else found["num_heads"] * found["head_dim"]
        return int(dim * file.number(prefix + key, default))

    return _declared(key, read)


def token_patch(frames_key: str, side_key: str) -> Any:
    """Declare the latents of a token in (frames, height, width), whose height and width are one number."""

    def read(file: ConfigFile, prefix: str, _: Mapping[str, Any]) -> tuple[int, int, int]:
        side = file.whole_number(prefix + side_key)
        return file.whole_number(prefix + frames_key, 1), side, side

    return _declared((frames_key, side_key), read)


def equal_channels(default: int | None = None, *, default_out: int | None = None, multiple_of: int = 1) -> Any:
    """Declare in_channels, which out_channels equal, in families whose transformers take latents alone. default_out:
    out_channels where the file leaves them out, None for those of the input."""

    def read(file: ConfigFile, prefix: str, _: Mapping[str, Any]) -> int:
        names = f"{prefix}in_channels", f"{prefix}out_channels"
        taken = file.whole_number(names[0], default)
        made = file.whole_number(names[1], taken if default_out is None else default_out)
        if made != taken:
            expected = f"{taken}, {names[0]}: a transformer that takes latents alone"
            raise file.error(names[1], f"{expected}; `--backend diffusers` runs others", made)
        if taken % multiple_of:
            raise file.error(names[0], f"a multiple of {multiple_of}", taken)
        return taken

    return _declared(("in_channels", "out_channels"), read)


def constant(value: Any) -> Any:
    """Declare a value that no key sets, in place of what the class that a config stands on declares."""
    return _declared((), lambda *_: value)


@dataclass_transform(
    frozen_default=True,
    field_specifiers=(
        whole_number,
        layer_count,
        even_number,
        number,
        flag,
        rotary_axes,
        ffn_width,
        token_patch,
        equal_channels,
        constant,
    ),
)
def config(made: type[T]) -> type[T]:
    """Make a frozen dataclass whose fields may be declared by the functions above."""
    return dataclasses.dataclass(frozen=True)(made)


def _fields(config: type) -> dict[str, _Declared]:
    return {item.name: item.metadata[_KEY] for item in dataclasses.fields(config) if _KEY in item.metadata}


def keys_of(config: type, prefix: str = "") -> tuple[str, ...]:
    """Return the keys of the declared fields of a config's class."""
    return tuple(prefix + key for each in _fields(config).values() for key in each.keys)


def read_declared(config: type, file: ConfigFile, prefix: str = "") -> dict[str, Any]:
    """Read the declared fields of a config's class, whatever else the file has. Raises ModelLoadError that names the
    file and the key."""
    found: dict[str, Any] = {}
    for name, each in _fields(config).items():
        found[name] = each.read(file, prefix, found)
    return found


def read_fields(
    config: type,
    file: ConfigFile,
    *,
    fixed: Mapping[str, object] = MappingProxyType({}),
    why: str = _ONLY,
    others: Collection[str] = (),
) -> dict[str, Any]:
    """Read the declared fields of a config's class from a file that has nothing else. fixed: keys that have one value,
    or are left out; why: that value, for the message. others: keys that the caller reads, or that nothing does.

    Raises ModelLoadError that names the file and the key: for a value of another kind, and for a key that is in none of
    these.
    """
    file.refuse_unknown((*keys_of(config), *fixed, *others))
    file.refuse_other_values(fixed, why)
    return read_declared(config, file)
