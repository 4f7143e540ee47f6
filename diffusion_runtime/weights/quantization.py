"""Quantisation of a transformer's linear layers: the rules of quantization.yaml, and why the other layers stay."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from diffusion_runtime.errors import ConfigError, shown
from diffusion_runtime.layers.fp8_linear import Fp8Linear, ProductCounter, replace_layer, replace_linear
from diffusion_runtime.layers.gguf_linear import GgufLinear
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.untrusted.yaml_text import read_packaged_yaml
from diffusion_runtime.weights.stored_tensors import StoredRows
from diffusion_runtime.weights.weight_files import listed

# For a transformer whose first and last block stay: with fewer, little would be left.
_MIN_BLOCKS = 4
_DEFAULT = "fp8"
RULES_FILE = Path(__file__).with_name("quantization.yaml")


@dataclass(frozen=True)
class KeptLayers:
    """Layers that are not quantised. layers: a shell pattern of names; modes: in which they stay, empty for all."""

    layers: str
    reason: str
    modes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quantization:
    """The quantised layers of one model. mode: `fp8` or `fp8-all`, and `none` where only the file's weights are.
    ignored: patterns of the user's own for layers that stay as they are. layers: patterns of those that may be
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
            # Weights that a file has in 8 bits multiply in 8 bits where `fp8` would.
            tuple(each for each in kept if not each.modes or (_DEFAULT if mode == "none" else mode) in each.modes),
        )

    def reasons(self, module: nn.Module) -> dict[str, str | None]:
        """Return for each linear layer of the blocks, by name, why it stays; None for those that are quantised."""
        names = [name for name, layer in module.named_modules() if isinstance(layer, Linear)]
        candidates = [name for name in names if any(fnmatch.fnmatchcase(name, each) for each in self.layers)]
        blocks = list(dict.fromkeys(_block(name) for name in candidates))
        ends = {blocks[0], blocks[-1]} if len(blocks) >= _MIN_BLOCKS else set()
        return {name: self._reason(name, ends) for name in candidates}

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
                    replace_linear(modules[component], name, self.counter)

    def keep_stored(self, module: nn.Module, quantized: Callable[[str], Sequence[StoredRows]]) -> None:
        """Replace the layers of an empty transformer whose whole weights are quantised in its files, so that they stay
        as they are stored. quantized: the stored rows of a parameter, none where it is not quantised."""
        for name, reason in self.reasons(module).items():
            rows = quantized(f"{name}.weight")
            if not rows or isinstance(module.get_submodule(name), Fp8Linear):
                continue
            if all(each.is_blocks for each in rows):
                replace_layer(module, name, functools.partial(GgufLinear, counter=self.counter))
                continue
            if reason is None and any(each.full_precision for each in rows):
                reason = "the file asks for products in full precision"
            replace_linear(module, name, self.counter, reason)

    def describe(self, modules: Mapping[str, nn.Module]) -> str | None:
        """Return one line on the layers replaced in transformers; None where there are none."""
        layers = [layer for module in modules.values() for layer in module.modules() if isinstance(layer, Linear)]
        total = sum(layer.in_features * layer.out_features for layer in layers)
        kinds = (
            ("as in the file" if self.mode == "none" else self.mode, Fp8Linear, "8-bit weights"),
            ("as in the file", GgufLinear, "GGUF blocks"),
        )
        described = []
        for mode, kind, what in kinds:
            found = [layer for layer in layers if isinstance(layer, kind)]
            size = sum(layer.in_features * layer.out_features for layer in found)
            if found:
                described.append(
                    f"{mode}: {len(found)} of {len(layers)} linear layers have {what}, {100 * size / total:.0f} % of "
                    "their numbers"
                )
        return "; ".join(described) or None

    def _reason(self, name: str, ends: set[str]) -> str | None:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored):
            return "quantization_ignored_layers names it"
        for each in self.kept:
            if fnmatch.fnmatchcase(name, each.layers):
                return each.reason
        return self.keeps_ends if _block(name) in ends else None


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
