"""CountedOperations: the floating-point operations of what runs within a block, by torch's own formulas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.flop_counter import flop_registry, shape_wrapper

from diffusion_runtime.explanation.products import own_formulas
from diffusion_runtime.memory.meta_operators import MetaOperators, run_on_meta


class CountedOperations(MetaOperators):  # type: ignore[no-untyped-call]
    """counts: by the operator's name (`mm`, `convolution`), a multiplication and an addition as two. torch's
    FlopCounterMode counts the same by the same formulas and imports torch's compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        own = {packet: shape_wrapper(formula) for packet, formula in own_formulas().items()}  # type: ignore[no-untyped-call]
        self._formulas = {**flop_registry, **own}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        result = run_on_meta(func, args, kwargs)
        packet = func.overloadpacket
        if packet in self._formulas:
            self.counts[packet.__name__] += int(self._formulas[packet](*args, **kwargs, out_val=result))
        return result
