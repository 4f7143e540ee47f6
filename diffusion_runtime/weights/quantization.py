"""Quantisation of a transformer's linear layers: the rules of quantization.yaml, and why the other layers stay."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from diffusion_runtime.errors import ConfigError, shown
from diffusion_runtime.kernels.int8_rows.reference import group_size_of
from diffusion_runtime.layers.eight_bit_linear import EightBitLinear, EightBits, ProductCounter, replace_layer
from diffusion_runtime.layers.fp8_linear import Fp8Linear
from diffusion_runtime.layers.int8_linear import Int8Linear
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.stored_linear import StoredLinear
from diffusion_runtime.untrusted.yaml_text import read_packaged_yaml
from diffusion_runtime.weights.stored_tensors import StoredRows
from diffusion_runtime.weights.weight_files import listed

# For a transformer whose first and last block stay: with fewer, little would be left.
_MIN_BLOCKS = 4
# The mode whose rules hold for weights that a file has in 8 bits, by their layer.
_MODE_OF: Mapping[type[EightBitLinear], str] = {Fp8Linear: "fp8", Int8Linear: "int8"}
_OF_FILE = "as in the file"
RULES_FILE = Path(__file__).with_name("quantization.yaml")


@dataclass(frozen=True)
class KeptLayers:
    """Layers that are not quantised. layers: a shell pattern of names; modes: in which they stay, empty for all."""

    layers: str
    reason: str
    modes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quantization:
    """The quantised layers of one model. mode: `fp8`, `fp8-all` or `int8`, and `none` where only the file's weights
    are. ignored: patterns of the user's own for layers that stay as they are. layers: patterns of those that may be
    quantised; kept: the ones among them that stay; counter: of their products."""

    mode: str
    ignored: tuple[str, ...]
    layers: tuple[str, ...]
    keeps_ends: str
    kept: tuple[KeptLayers, ...]
    counter: ProductCounter = field(default_factory=ProductCounter, compare=False)

    @classmethod
    def of(cls, family: str, mode: str, ignored: Sequence[str]) -> Quantization:
        """Return the rules of a family's transformers."""
        rules = _rules()
        every, own = rules["every_family"], rules["families"].get(family, {})
        kept = [_kept(entry) for entry in (*every["kept"], *own.get("kept", ()))]
        return cls(
            mode,
            tuple(ignored),
            tuple(every["layers"]),
            every["keeps_ends"],
            tuple(kept),
        )

    def reasons(self, module: nn.Module, mode: str | None = None) -> dict[str, str | None]:
        """Return for each linear layer of the blocks, by name, why it stays; None for those that are quantised. mode:
        whose rules are asked for, None for its own."""
        names = [name for name, layer in module.named_modules() if isinstance(layer, Linear)]
        candidates = [name for name in names if any(fnmatch.fnmatchcase(name, each) for each in self.layers)]
        blocks = list(dict.fromkeys(_block(name) for name in candidates))
        ends = {blocks[0], blocks[-1]} if len(blocks) >= _MIN_BLOCKS else set()
        return {name: self._reason(name, ends, mode or self.mode) for name in candidates}

    def apply(self, modules: Mapping[str, nn.Module]) -> None:
        """Replace the layers of empty transformers. modules: by component.

        Does nothing for mode `none`. Raises ConfigError for a pattern of `ignored` that names no layer, and where no
        layer is left to quantise.
        """
        if self.mode == "none":
            return
        reasons = {component: self.reasons(module) for component, module in modules.items()}
        every = [name for of in reasons.values() for name in of]
        for pattern in self.ignored:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in every):
                raise ConfigError(
                    f"quantization_ignored_layers: {shown(pattern)} names no layer that could be quantised; expected a "
                    f"name or a pattern such as {', '.join(dict.fromkeys(map(_in_any_block, every)))}"
                )
        if not any(reason is None for of in reasons.values() for reason in of.values()):
            raise ConfigError(
                f"quantization: {self.mode}: none of the {len(every)} linear layers of the blocks is left to quantise "
                f"({listed(sorted({reason for of in reasons.values() for reason in of.values() if reason}))})"
            )
        for component, of in reasons.items():
            for name, reason in of.items():
                if reason is None:
                    linear = modules[component].get_submodule(name)
                    assert isinstance(linear, Linear)
                    kind = self._kind_for(linear)
                    _check_share(name, linear, kind)
                    kind.replace(modules[component], name, self.counter)

    def _kind_for(self, linear: Linear) -> EightBits:
        """Return the 8-bit layer that holds a weight which the file has in the model's dtype."""
        if self.mode == "int8":
            return EightBits(Int8Linear, group_size_of(linear.in_features))
        return EightBits(Fp8Linear)

    def keep_stored(self, module: nn.Module, quantized: Callable[[str], Sequence[StoredRows]]) -> None:
        """Replace the layers of an empty transformer whose whole weights are quantised in its files, so that they stay
        as they are stored. quantized: the stored rows of a parameter, none where it is not quantised."""
        # By mode: weights that a file has in 8 bits multiply in 8 bits where `--quantization` would have them do so.
        reasons = {mode: self.reasons(module, self._mode_for(mode)) for mode in _MODE_OF.values()}
        for name in reasons["fp8"]:
            linear = module.get_submodule(name)
            rows = quantized(f"{name}.weight")
            if not rows or isinstance(linear, EightBitLinear):
                continue
            assert isinstance(linear, Linear)
            kinds = {each.format.eight_bits for each in rows if each.format is not None}
            kind = kinds.pop() if len(kinds) == 1 else None
            _check_share(name, linear, kind)
            if kind is None:
                replace_layer(module, name, functools.partial(StoredLinear, counter=self.counter))
                continue
            reason = reasons[_MODE_OF[kind.layer]][name]
            if reason is None and any(each.full_precision for each in rows):
                reason = "the file asks for products in full precision"
            kind.replace(module, name, self.counter, reason)

    def _mode_for(self, mode: str) -> str:
        """Return the mode whose rules hold for a file's weights: the chosen one where it is of their kind."""
        return self.mode if self.mode.partition("-")[0] == mode else mode

    def describe(self, modules: Mapping[str, nn.Module]) -> str | None:
        """Return one line on the layers replaced in transformers; None where there are none."""
        layers = [layer for module in modules.values() for layer in module.modules() if isinstance(layer, Linear)]
        total = sum(layer.in_features * layer.out_features for layer in layers)
        # By mode, and by what the layers have.
        found: defaultdict[tuple[str, str], list[Linear]] = defaultdict(list)
        for layer in layers:
            if isinstance(layer, EightBitLinear):
                is_own = self.mode != "none" and self.mode.partition("-")[0] == _MODE_OF[type(layer)]
                found[self.mode if is_own else _OF_FILE, layer.described].append(layer)
            elif isinstance(layer, StoredLinear):
                for kind in layer.kinds:
                    found[_OF_FILE, kind].append(layer)
        described = []
        for (mode, what), several in found.items():
            size = sum(layer.in_features * layer.out_features for layer in several)
            described.append(
                f"{mode}: {len(several)} of {len(layers)} linear layers have {what}, {100 * size / total:.0f} % of "
                "their numbers"
            )
        return "; ".join(described) or None

    def _reason(self, name: str, ends: set[str], mode: str) -> str | None:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored):
            return "quantization_ignored_layers names it"
        for each in self.kept:
            if fnmatch.fnmatchcase(name, each.layers) and (not each.modes or mode in each.modes):
                return each.reason
        return self.keeps_ends if _block(name) in ends else None


def _check_share(name: str, linear: Linear, kind: EightBits | None) -> None:
    """Check that processes may share a weight. kind: of its 8-bit layer, None for one that stays as it is stored.
    Raises ConfigError."""
    if linear.share is None or (kind is not None and not kind.group_size):
        return
    what = "stays as its file has it" if kind is None else "is rotated in groups (int8 ConvRot)"
    raise ConfigError(
        f"parallel.tensor_parallel_size: the weight of {name} is not shared by processes in this version: it {what}; "
        "leave out --tensor-parallel-size, or use weights in bfloat16 or 8-bit floats"
    )


def _block(name: str) -> str:
    """Return `blocks.3` of `blocks.3.feed_forward.up`."""
    return ".".join(name.split(".")[:2])


def _in_any_block(name: str) -> str:
    """Return `blocks.*.feed_forward.up` of `blocks.3.feed_forward.up`."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _kept(entry: Mapping[str, Any]) -> KeptLayers:
    return KeptLayers(entry["layers"], entry["reason"], tuple(entry.get("modes", ())))


@functools.cache
def _rules() -> Mapping[str, Any]:
    rules: Mapping[str, Any] = read_packaged_yaml(RULES_FILE)
    return rules
