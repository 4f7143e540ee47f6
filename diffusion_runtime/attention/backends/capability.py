"""Capabilities: what attention calls require of a backend, and what a backend declares and refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

from diffusion_runtime.attention.roles import CATEGORIES
from diffusion_runtime.core.hardware import DTYPES, PLATFORMS, Hardware
from diffusion_runtime.errors import shown

# What a call may ask of a backend beyond softmax(q k^T / sqrt(head_dim)) v on unpadded [batch, seq, heads, head_dim].
# key_padding: call.layout says which keys each sample has (key_ranges.attend_by_ranges cuts the others off). gqa: fewer
# heads of k and v. scale: call.scale. lse: call.return_lse, AttentionResult.lse. gate, the masks: the call's fields of
# these names. cached_keys: a grid of queries and more keys, those of a key-value cache (CachedLayout, PrefixCache).
FEATURES = (
    "key_padding",
    "gqa",
    "causal",
    "scale",
    "lse",
    "gate",
    "boolean_mask",
    "additive_mask",
    "block_mask",
    "cached_keys",
)
_NO_CAUSAL_PREFIX = "cannot do causal attention, which computes the keys and values of a prefix"
_NO_CACHED_KEYS = "cannot do cached_keys: it attends within one grid, not to keys of earlier chunks or passes"


@dataclass(frozen=True)
class HeadSizes:
    """Head sizes a backend takes: a multiple of `multiple` from `minimum` to `maximum`, or one of `only`."""

    minimum: int = 1
    maximum: int | None = None
    multiple: int = 1
    only: tuple[int, ...] = ()

    def __contains__(self, head_dim: int) -> bool:
        if self.only:
            return head_dim in self.only
        below = self.maximum is None or head_dim <= self.maximum
        return head_dim >= self.minimum and below and head_dim % self.multiple == 0

    def __str__(self) -> str:
        if self.only:
            return ", ".join(map(str, self.only))
        upper = "" if self.maximum is None else f" to {self.maximum}"
        step = "" if self.multiple == 1 else f", multiples of {self.multiple}"
        return f"{self.minimum}{upper}{step}"


@dataclass(frozen=True)
class KeyCounts:
    """Numbers of keys a kernel computes right: whole blocks of `block`, or what fills its last block up to `tolerance`.

    Kernels that do not hide what their last block of keys holds past the end count those as keys of score 0 and value
    0. Where the keys' mean is subtracted from them, as SageAttention does, the weights of n keys sum to n or more
    (Jensen's inequality), so r such keys cost a relative error of r / (n + r) at most. `tolerance` bounds that.

    causal_block: of causal calls, which hide what is past the end, but may read the scales of whole blocks there.
    """

    block: int = 1
    tolerance: float = 0.0
    causal_block: int = 1

    def __contains__(self, num_keys: int) -> bool:
        past_the_end = -num_keys % self.block
        return past_the_end <= self.tolerance * (num_keys + past_the_end)

    def __str__(self) -> str:
        if self.block == 1:
            return "any number of keys"
        near = f", or at most {self.tolerance:.1%} below one" if self.tolerance else ""
        causal = f", of {self.causal_block} in causal calls" if self.causal_block > 1 else ""
        return f"a number of keys that is a multiple of {self.block}{near}{causal}"


@dataclass(frozen=True)
class AttentionRequirements:
    """The facts about a layer that are known when its backend is chosen.

    category: the role's category; needs: the FEATURES its calls use (gqa follows from the head counts).
    keys_in_parts: a call sees a part of the keys, and the parts are merged by their log-sum-exps, as in a ring.
    every_key_on_demand: a backend that needs every key gets them all, in spite of keys_in_parts.
    no_grid: why calls come without the grid of their tokens, as in `which is known of X`; empty when they come with it.
    unchecked: a backend may answer although a self-check found its numbers wrong.
    width: numbers of a token in all heads of the layer, on all processes; 0 where that is not known.
    """

    role: str
    category: str
    head_dim: int
    dtype: str
    hardware: Hardware
    num_heads: int
    num_kv_heads: int
    needs: frozenset[str] = frozenset()
    keys_in_parts: bool = False
    every_key_on_demand: bool = False
    no_grid: str = ""
    unchecked: bool = False
    width: int = 0


@dataclass(frozen=True)
class Capability:
    """The abilities of a backend. Declared once, enforced by `refusals` alone.

    platforms: where it runs; dtypes: input types; head_sizes: see HeadSizes; features: a subset of FEATURES.
    minimum_capability, maximum_capability: inclusive range of compute capabilities on CUDA, None for no bound.
    categories: the role categories it may serve. needs_every_key: it chooses among all keys of the sequence, so a call
    with a part of them means something else; without it, parts are merged by their log-sum-exps. key_counts: see
    KeyCounts; requirements name no number of keys, so calls with another run elsewhere (`calling.run_backend`).
    needs_grid: it reads off the call's layout where the tokens of a grid sit.
    """

    platforms: frozenset[str] = frozenset(PLATFORMS)
    dtypes: frozenset[str] = frozenset(DTYPES)
    head_sizes: HeadSizes = field(default_factory=HeadSizes)
    features: frozenset[str] = frozenset()
    minimum_capability: tuple[int, int] | None = None
    maximum_capability: tuple[int, int] | None = None
    categories: frozenset[str] = frozenset(CATEGORIES)
    needs_every_key: bool = False
    key_counts: KeyCounts = field(default_factory=KeyCounts)
    needs_grid: bool = False

    def on_hardware(self, hardware: Hardware) -> Capability:  # noqa: ARG002
        """Return the part of this capability that one machine supports."""
        return self

    def serves(self, requirements: AttentionRequirements) -> bool:
        """Return whether the backend is made for the role; a general choice passes over it for other roles."""
        return not self.passed_over(requirements)

    def passed_over(self, requirements: AttentionRequirements) -> str:
        """Return why a general choice passes over the backend for the role; empty where it does not."""
        if requirements.category not in self.categories:
            return f"not made for role {shown(requirements.role)}"
        if "cached_keys" in requirements.needs - self.features:
            return _NO_CACHED_KEYS
        if {"cached_keys", "causal"} <= requirements.needs and "causal" not in self.features:
            return _NO_CAUSAL_PREFIX
        return ""

    def refusals(self, requirements: AttentionRequirements) -> list[str]:
        """Every reason why the backend cannot meet `requirements`; empty when it can."""
        reasons = []
        hardware = requirements.hardware
        if requirements.category not in self.categories:
            reasons.append(f"serves {', '.join(sorted(self.categories))} attention, not role {requirements.role!r}")
        if hardware.platform not in self.platforms:
            reasons.append(f"runs on {', '.join(sorted(self.platforms))}, not on {hardware.platform}")
        elif hardware.capability is not None:
            low, high = self.minimum_capability, self.maximum_capability
            if low is not None and hardware.capability < low:
                reasons.append(f"needs sm_{low[0]}{low[1]} or newer, this is {hardware.describe()}")
            if high is not None and hardware.capability > high:
                reasons.append(f"stops at sm_{high[0]}{high[1]}, this is {hardware.describe()}")
        if requirements.dtype not in self.dtypes:
            reasons.append(f"takes {', '.join(sorted(self.dtypes))}, not {requirements.dtype}")
        if requirements.head_dim not in self.head_sizes:
            reasons.append(f"takes head sizes {self.head_sizes}, not {requirements.head_dim}")
        needs = set(requirements.needs)
        if requirements.num_kv_heads != requirements.num_heads:
            needs.add("gqa")
        if requirements.keys_in_parts and self.needs_every_key and not requirements.every_key_on_demand:
            reasons.append(
                "ring attention gives each call a part of the keys, and it chooses among all of them; share the "
                "sequence with ulysses_degree alone"
            )
        if requirements.keys_in_parts and not self.needs_every_key and "lse" not in self.features:
            reasons.append("returns no log-sum-exp, which ring attention merges its parts by")
        if requirements.no_grid and self.needs_grid:
            reasons.append(f"it needs the grid of the tokens, {requirements.no_grid}")
        if requirements.keys_in_parts and "cached_keys" in needs:
            reasons.append(
                "ring attention moves keys between processes, which hold cached ones; share by ulysses_degree"
            )
        missing = {feature: f"cannot do {feature}" for feature in sorted(needs - self.features)}
        if "cached_keys" in missing:
            missing["cached_keys"] = _NO_CACHED_KEYS
        reasons += missing.values()
        return reasons


@dataclass(frozen=True)
class NarrowedCapability(Capability):
    """A capability that chip and versions narrow: in the fields what the backend can do on the best machine.

    key_counts alone are those of the worst machine: where they limit nothing, no call is asked about its keys.

    narrow: the capability on a machine, read off its chip and the versions installed there.
    """

    narrow: Callable[[Hardware], Capability] = field(kw_only=True)

    def on_hardware(self, hardware: Hardware) -> Capability:
        return self.narrow(hardware)

    def refusals(self, requirements: AttentionRequirements) -> list[str]:
        return self.narrow(requirements.hardware).refusals(requirements)


def narrowed(best: Capability, narrow: Callable[[Hardware], Capability]) -> NarrowedCapability:
    """`best`, and what one machine leaves of it."""
    return NarrowedCapability(**{field.name: getattr(best, field.name) for field in fields(best)}, narrow=narrow)
