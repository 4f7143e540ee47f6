"""Later requests: a loaded model's memory is planned again for those that take more than what it was loaded for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import DeviceMemoryError
from diffusion_runtime.loading.memory_planning import PlannedDemand, planned_batch, replan, takes_more
from diffusion_runtime.memory.offloading import Offloading
from diffusion_runtime.memory.plan import MemoryPlan
from diffusion_runtime.models.memory_demand import PlannedRequest
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.request_rules import RequestRules


class LaterRequests:
    """plan, planned: what the model was loaded with, and the request it was made for; None where nothing is known.
    demand_of: what a request takes; offloading: of the loaded model, None where everything is on the device.
    fitting: MemoryAdviser.fitting.

    A plan counts on what was free when the model was loaded. Where everything is on the device and no limit was given,
    nothing can be arranged, and a request is left to try.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        device: torch.device,
        rules: RequestRules,
        demand_of: Callable[[PlannedRequest], PlannedDemand | None],
        plan: MemoryPlan | None,
        planned: PlannedRequest | None,
        offloading: Offloading | None,
        fitting: Callable[[GenerationRequest], str],
    ) -> None:
        self._config = config
        self._device = device
        self._rules = rules
        self._demand_of = demand_of
        self._plan = plan
        self._largest = planned
        self._offloading = offloading
        self.fitting = fitting

    def make_room(self, batch: Sequence[GenerationRequest]) -> None:
        """Arrange the offloaded parts so that a batch of resolved requests fits. Raises DeviceMemoryError where it does
        not, before anything is computed."""
        plan, largest = self._plan, self._largest
        if plan is None or largest is None or (self._offloading is None and self._config.memory_limit is None):
            return
        wanted = planned_batch(self._rules, batch)
        if not takes_more(self._rules, wanted, largest, keeps_rows=plan.demand.modulation_rows > 0):
            return
        demand = self._demand_of(wanted)
        if demand is None:
            return
        try:
            found = replan(demand, plan, self._device)
        except DeviceMemoryError as error:
            raise DeviceMemoryError(
                f"{error}. The model was loaded for {largest.num_samples} x {largest.size.height} x "
                f"{largest.size.width}, {largest.size.num_frames} frames: where more would be offloaded for a larger "
                "request, load it with that size (generate: in a command of its own)"
            ) from error
        if self._offloading is not None:
            self._offloading.adopt(dataclasses.replace(found, reason=plan.reason))
        self._plan, self._largest = found, wanted
