"""Cases of the self-test: small inputs for everything a backend may declare."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diffusion_runtime.core.token_layout import CachedLayout, TokenLayout

BATCH, NUM_HEADS = 2, 4
# Two tiles of 128 and a rest; sparse methods find more than one tile along every axis.
GRID = (4, 8, 9)
_TEXT = 24
# Numbers of keys around the blocks of 64 and 128 that kernels read, whole and not; _TEXT is less than one block.
_WHOLE, _ONE_MORE, _CLIP = 128, 65, 77
_MAX_KEYS = 1024


@dataclass(frozen=True)
class SelfTestCase:
    """One thing to try. needs: the FEATURES it uses; layout: of the keys, and of the queries in self-attention."""

    name: str
    needs: frozenset[str] = frozenset()
    role: str = "self"
    layout: TokenLayout = TokenLayout(GRID)  # noqa: RUF009 (frozen)

    @property
    def num_kv_heads(self) -> int:
        return NUM_HEADS // 2 if "gqa" in self.needs else NUM_HEADS

    @property
    def num_queries(self) -> int:
        if isinstance(self.layout, CachedLayout):
            return self.layout.num_query_frames * math.prod(self.layout.grid[1:])
        return self.layout.num_tokens if self.role == "self" else math.prod(GRID)

    @property
    def scale(self) -> float | None:
        return 0.2 if "scale" in self.needs else None


_AFTER = TokenLayout(GRID, num_suffix_tokens=_TEXT, valid_lengths=(_TEXT, 5))
_BEFORE = TokenLayout(GRID, num_prefix_tokens=_TEXT, valid_lengths=(17, 0))

CASES = (
    SelfTestCase("plain"),
    SelfTestCase("cross-attention", role="cross", layout=TokenLayout.text(_TEXT)),
    SelfTestCase("128 keys", role="cross", layout=TokenLayout.text(_WHOLE)),
    SelfTestCase("65 keys", role="cross", layout=TokenLayout.text(_ONE_MORE)),
    # As many keys as CLIP's text encoder has tokens.
    SelfTestCase("77 keys", role="cross", layout=TokenLayout.text(_CLIP)),
    SelfTestCase("padding after", frozenset({"key_padding"}), layout=_AFTER),
    SelfTestCase("padding before", frozenset({"key_padding"}), layout=_BEFORE),
    # The second sample has no keys at all: its result is 0.
    SelfTestCase("padded cross-attention", frozenset({"key_padding"}), "cross", TokenLayout.text(_TEXT, (7, 0))),
    SelfTestCase("gqa", frozenset({"gqa"})),
    SelfTestCase("scale", frozenset({"scale"})),
    SelfTestCase("causal", frozenset({"causal"})),
    SelfTestCase("lse", frozenset({"lse"})),
    SelfTestCase("padding+gqa+scale+lse", frozenset({"key_padding", "gqa", "scale", "lse"}), layout=_AFTER),
    SelfTestCase("boolean mask", frozenset({"boolean_mask"})),
    SelfTestCase(
        "boolean mask+padding+gqa+lse", frozenset({"boolean_mask", "key_padding", "gqa", "lse"}), layout=_BEFORE
    ),
    SelfTestCase("additive mask", frozenset({"additive_mask"})),
    SelfTestCase(
        "additive mask+padding+causal+lse", frozenset({"additive_mask", "key_padding", "causal", "lse"}), layout=_AFTER
    ),
    SelfTestCase("block mask", frozenset({"block_mask"})),
    SelfTestCase(
        "cached keys",
        frozenset({"cached_keys"}),
        layout=CachedLayout(GRID, num_query_frames=1, key_frames=(3, 0, 1, 2)),
    ),
    # What a gate weighs is each method's own; a gate of 0 leaves what every method shares.
    SelfTestCase("gate of 0", frozenset({"gate"})),
)


def case_with_keys(num_keys: int) -> SelfTestCase:
    """Self-attention to so many keys. Kernels read keys in blocks of up to 256, so a large number is made smaller by
    whole blocks: what differs is how the last block ends."""
    bounded = num_keys if num_keys <= _MAX_KEYS else _MAX_KEYS - 256 + num_keys % 256
    return SelfTestCase(f"{bounded} keys", layout=TokenLayout((1, 1, bounded)))
