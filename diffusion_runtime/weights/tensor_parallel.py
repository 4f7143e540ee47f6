"""Tensor parallel: the layers of a transformer that processes share, from tensor_parallel.yaml, and the part of each
checkpoint tensor that a process reads."""

from __future__ import annotations

import fnmatch
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import nn

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.layers.eight_bit_linear import replace_layer
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.weight_share import ShareKind, WeightShare
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.untrusted.yaml_text import read_packaged_yaml
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.tensor_part import TensorPart

RULES_FILE = Path(__file__).with_name("tensor_parallel.yaml")
_ALL = "all"


@dataclass(frozen=True)
class ShareRule:
    """Layers that are shared alike. layers: a shell pattern of names; sections: see the file."""

    layers: str
    kind: ShareKind
    sections: tuple[str, ...]


@dataclass(frozen=True)
class TensorParallel:
    """The rules of one family's transformers, and the processes that share them. whole: patterns of layers that stay
    whole, with the reason."""

    rules: tuple[ShareRule, ...]
    whole: Mapping[str, str]
    group: RankGroup

    @classmethod
    def of(cls, family: str, group: RankGroup) -> TensorParallel:
        """Return the rules of a family. Raises ConfigError for a family without sharing rules, where there are several
        processes."""
        families = _rules()
        if family not in families:
            if group.size > 1:
                raise ConfigError(
                    f"parallel.tensor_parallel_size: {family} models hold their weights whole in this version; leave "
                    f"out --tensor-parallel-size, or share the sequence with --num-gpus (families that share weights: "
                    f"{', '.join(sorted(families))})"
                )
            return cls((), {}, group)
        stated = families[family]
        rules = [
            ShareRule(layers, kind, tuple(sections))
            for kind in cast("tuple[ShareKind, ...]", get_args(ShareKind))
            for layers, sections in stated.get(kind, {}).items()
        ]
        return cls(tuple(rules), stated["whole"], group)

    def rule_of(self, name: str) -> ShareRule | None:
        """Return the rule for a layer; None for one that stays whole."""
        return next((rule for rule in self.rules if fnmatch.fnmatchcase(name, rule.layers)), None)

    def apply(self, transformer: nn.Module) -> None:
        """Make the layers of an empty transformer as large as this process's part of them; those that are already stay.

        Raises ConfigError for features that the processes cannot share evenly.
        """
        if self.group.size == 1:
            return
        for name, layer in list(transformer.named_modules()):
            if not isinstance(layer, Linear | RMSNorm) or layer.share is not None:
                continue
            rule = self.rule_of(name)
            if rule is not None and (rule.kind == "norm") == isinstance(layer, RMSNorm):
                self._replace(transformer, name, layer, rule)

    def _replace(self, transformer: nn.Module, name: str, layer: Linear | RMSNorm, rule: ShareRule) -> None:
        num_features = _divided_features(layer, rule.kind)
        config = getattr(transformer, "config", None)
        sections = [num_features if each == _ALL else operator.attrgetter(each)(config) for each in rule.sections]
        share = WeightShare(rule.kind, tuple(sections), self.group)
        share.check(name, num_features)
        if isinstance(layer, Linear):
            sizes = {"in_features": layer.in_features, "out_features": layer.out_features}
            sizes["in_features" if rule.kind == "row" else "out_features"] = share.num_features
            replace_layer(transformer, name, lambda *_, bias: Linear(**sizes, bias=bias))
        else:
            owner, _, leaf = name.rpartition(".")
            with torch.device(layer.weight.device):
                setattr(transformer.get_submodule(owner), leaf, RMSNorm(share.num_features, layer.eps))
        made = transformer.get_submodule(name)
        assert isinstance(made, Linear | RMSNorm)
        made.share = share


def _divided_features(layer: Linear | RMSNorm, kind: ShareKind) -> int:
    if isinstance(layer, RMSNorm):
        return layer.weight.shape[0]
    return layer.in_features if kind == "row" else layer.out_features


def shared_pieces(module: nn.Module, pieces: Mapping[str, tuple[Piece, ...]]) -> Mapping[str, tuple[Piece, ...]]:
    """Return the pieces of a transformer's parameters with the part of each that this process reads. module: with the
    layers that `TensorParallel.apply` made; pieces: of whole tensors."""
    parts: dict[str, tuple[Piece, ...]] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, Linear | RMSNorm) and layer.share is not None:
            for parameter in ("weight", "bias"):
                if (own := pieces.get(f"{name}.{parameter}")) is not None:
                    parts[f"{name}.{parameter}"] = tuple(_parts_of(own, layer.share, is_bias=parameter == "bias"))
    return {**pieces, **parts} if parts else pieces


def _parts_of(pieces: Sequence[Piece], share: WeightShare, *, is_bias: bool) -> Iterator[Piece]:
    if share.kind == "row":
        for piece in pieces:
            # The bias is added by one process alone.
            part = TensorPart(is_zero=not share.adds_bias) if is_bias else TensorPart(columns=share.ranges)
            yield piece.some(part)
        return
    first = 0
    for piece in pieces:
        stop = first + piece.shape[0]
        rows = _within(share.ranges, first, stop)
        assert rows, f"{piece.name}: no section of {share.sections} reaches into it"
        yield piece.some(TensorPart(rows=rows))
        first = stop


def _within(ranges: Sequence[slice], first: int, stop: int) -> tuple[slice, ...]:
    """Return the parts of the ranges within first..stop - 1, counted from `first`."""
    cut = (slice(max(each.start, first) - first, min(each.stop, stop) - first) for each in ranges)
    return tuple(each for each in cut if each.start < each.stop)


@functools.cache
def _rules() -> Mapping[str, Any]:
    rules: Mapping[str, Any] = read_packaged_yaml(RULES_FILE)
    families: Mapping[str, Any] = rules["families"]
    return families
