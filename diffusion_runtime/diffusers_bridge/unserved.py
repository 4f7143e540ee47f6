"""Counts attention calls that were not intercepted: how many, of which modules, and why."""

from __future__ import annotations

from diffusion_runtime.diffusers_bridge.module_run import replaced_sdpa
from diffusion_runtime.diffusers_bridge.modules import FoundModule, computer_of, unreached_reason

# How many modules a message lists before it only counts the rest.
_MAX_LISTED = 6


class CallCount:
    """The calls of one report. A run of a module without an intercepted call counts as one call."""

    def __init__(self) -> None:
        self.num_served = 0
        self._unserved: dict[tuple[str, str], int] = {}

    @property
    def num_unserved(self) -> int:
        return sum(self._unserved.values())

    @property
    def places(self) -> frozenset[tuple[str, str]]:
        """Module and reason of every call that was not intercepted."""
        return frozenset(self._unserved)

    def add_unserved(self, module: str, reason: str, num_calls: int) -> None:
        """Record calls that were not intercepted. module: component and path."""
        self._unserved[module, reason] = self._unserved.get((module, reason), 0) + max(1, num_calls)

    def describe(self) -> str:
        """Return `attention calls reached: 4 of 6; 2 not intercepted: blocks.0.attn1 x 2 (why)`; empty for none."""
        if not self._unserved:
            return ""
        shown = [
            f"{module} x {count} ({reason})" for (module, reason), count in list(self._unserved.items())[:_MAX_LISTED]
        ]
        rest = len(self._unserved) - len(shown)
        total = self.num_served + self.num_unserved
        return f"attention calls reached: {self.num_served} of {total}; {self.num_unserved} not intercepted: " + (
            ", ".join(shown) + (f" and {rest} modules more" if rest else "")
        )


def unserved_reason(found: FoundModule) -> str:
    """Return why no call of a module's run was intercepted."""
    module = found.module
    processor = computer_of(module).__name__
    since = "" if processor == found.processor else f"{processor} was set in the meantime: "
    by_hand, other = unreached_reason(module), replaced_sdpa()
    if by_hand:
        return since + by_hand
    if other is not None:
        return f"{since}{other} stands in the place of torch's scaled_dot_product_attention"
    return f"{since}{processor} ran without torch's attention"
