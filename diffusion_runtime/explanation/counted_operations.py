"""CountedOperations: the floating-point operations of what runs within a block, by torch's own formulas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.flop_counter import flop_registry

from diffusion_runtime.memory.meta_operators import MetaOperators, run_on_meta


class CountedOperations(MetaOperators):  # type: ignore[no-untyped-call]
    """counts: by the operator's name (`mm`, `convolution`), a multiplication and an addition as two. torch's
    FlopCounterMode counts the same and imports torch's compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        result = run_on_meta(func, args, kwargs)
        packet = func.overloadpacket
        if packet in flop_registry:
            self.counts[packet.__name__] += int(flop_registry[packet](*args, **kwargs, out_val=result))
        return result
