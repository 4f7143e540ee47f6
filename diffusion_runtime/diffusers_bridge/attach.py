"""attach: replaces the attention inside a diffusers model or pipeline, until detached."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.self_check import SelfCheck, SelfChecker, remarks_on
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.diffusers_bridge.attached_model import AttachedModel
from diffusion_runtime.diffusers_bridge.attending import ForwardPass, ModuleAttention
from diffusion_runtime.diffusers_bridge.denoisers import denoisers_of, device_of, dtype_of, uncompiled
from diffusion_runtime.diffusers_bridge.dispatcher import RegistryEntries
from diffusion_runtime.diffusers_bridge.explicit_choices import check_choices, is_chosen
from diffusion_runtime.diffusers_bridge.grids import TOKEN_ORDERS, token_order
from diffusion_runtime.diffusers_bridge.interception import is_taken
from diffusion_runtime.diffusers_bridge.module_run import AttentionModuleCall
from diffusion_runtime.diffusers_bridge.modules import FoundModule, find_in_models
from diffusion_runtime.diffusers_bridge.steps import StepFollower
from diffusion_runtime.diffusers_bridge.unserved import CallCount
from diffusion_runtime.errors import BackendUnavailableError, ConfigError
from diffusion_runtime.report.attention_report import AttentionRecorder, AttentionReport

_logger = logging.getLogger("diffusion_runtime.diffusers_bridge")

# Held while modules are intercepted: several threads may attach to one model at once.
_TAKING = threading.Lock()

# How many modules a message lists before it only counts the rest.
_MAX_LISTED = 6


@dataclass(frozen=True)
class UnreachedModule:
    """An attention module that keeps diffusers' own attention. component: of the pipeline; path: in the component."""

    component: str
    path: str
    processor: str
    reason: str


def attach(
    model_or_pipeline: Any,
    config: Any = None,
    *,
    override: Any = None,
    scheduler: Any = None,
    device: str | torch.device | None = None,
    self_check: bool = True,
) -> AttachedAttention:
    """Put our attention into a diffusers pipeline (its transformers or UNets), or into one model, until detached.

    config: any form of AttentionConfig.parse: a backend's name, per role, schedules; None leaves it to the environment
    and the platform. override: the same at the next higher level, such as a command line's. scheduler: of the pipeline
    that a single model belongs to, for choices by step. device: where it will run, when it is moved there later.
    self_check: whether third-party kernels are compared with the definition on an accelerator first, once per version.

    Nothing outside the model is changed, so other pipelines of the process keep their attention, attached or not. The
    handle is a context manager; `detach()` restores the model.

    Raises ConfigError for choices that are wrong, an object without attention, or a model that is attached already, and
    BackendUnavailableError for choices that cannot run or that reach no attention module at all. Modules that are not
    reached while others are: a warning that lists them. A model in training mode: a warning about what cannot be
    trained.
    """
    checker = SelfChecker(enabled=self_check)
    handle = plan_attachment(
        model_or_pipeline, config, override=override, scheduler=scheduler, device=device, checker=checker
    )
    handle.take_modules()
    for remark in ([handle.reach] if handle.others else []) + list(handle.remarks):
        _logger.warning(remark)
    return handle


def plan_attachment(
    model_or_pipeline: Any,
    config: Any = None,
    *,
    override: Any = None,
    scheduler: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    component: str | None = None,
    checker: SelfChecker | None = None,
) -> AttachedAttention:
    """Check what `attach` would do without doing it: return the handle of a model that is not changed yet.

    dtype: the compute dtype, where the model's weights do not show it. component: the name of a single model in
    messages. checker: self-checks of the chosen backends. Raises what `attach` raises.
    """
    checker = SelfChecker() if checker is None else checker
    denoisers = denoisers_of(model_or_pipeline)
    if component is not None:
        denoisers = dict(zip((component,), denoisers.values(), strict=True))
    if scheduler is None:
        scheduler = getattr(model_or_pipeline, "scheduler", None)
    found = find_in_models(denoisers)
    everything = [(name, module) for name, modules in found.items() for module in modules]
    if not everything:
        raise ConfigError(f"attach: {type(model_or_pipeline).__name__} has no attention module")
    _check_free(module for _, module in everything)
    others = tuple(
        UnreachedModule(name, module.path, module.processor, module.unreached)
        for name, module in everything
        if module.unreached
    )
    if len(others) == len(everything):
        raise BackendUnavailableError(
            f"attach: none of the {len(everything)} attention modules of {type(model_or_pipeline).__name__} can be "
            f"reached: {listed(others)}. It runs with diffusers' own attention only",
            [("attach", f"{other.processor}: {other.reason}") for other in others[:1]],
        )
    above, below = AttentionConfig.parse(override), AttentionConfig.parse(config)
    roles = sorted({module.layer.role for _, module in everything})
    for level in (above, below):
        level.check_roles(roles, type(model_or_pipeline).__name__)
        level.check_phases(type(model_or_pipeline).__name__)
    policies = {
        name: AttentionPolicy(
            cli=above,
            config=below,
            device=str(device_of(model_or_pipeline, model, device)),
            dtype=dtype_of(model) if dtype is None else dtype,
            no_grid=""
            if token_order(uncompiled(model)) is not None
            else f"which is known for {', '.join(TOKEN_ORDERS)}",
            self_check=checker.enabled,
        )
        for name, model in denoisers.items()
    }
    reached = {name: [module for module in modules if not module.unreached] for name, modules in found.items()}
    check_choices([(policies[name], modules) for name, modules in reached.items()])
    handle, self_checks = checker.build_checked(
        lambda: AttachedAttention(denoisers, found, others, policies, StepFollower(scheduler)),
        lambda built: (layer for module in built.modules for layer in module.layers),
    )
    handle.self_checks = self_checks
    return handle


class AttachedAttention:
    """The handle that `attach` returns. num_modules, num_reached: attention modules, all and those with our attention;
    others: the rest, with the reason for each. self_checks: of the chosen backends."""

    def __init__(
        self,
        denoisers: dict[str, nn.Module],
        found: dict[str, list[FoundModule]],
        others: tuple[UnreachedModule, ...],
        policies: dict[str, AttentionPolicy],
        follower: StepFollower,
    ) -> None:
        self.others = others
        self.self_checks: tuple[SelfCheck, ...] = ()
        self.num_modules = sum(map(len, found.values()))
        self.num_reached = self.num_modules - len(others)
        self._follower = follower
        self._recorder = AttentionRecorder()
        self._entries: RegistryEntries | None = None
        self._calls = CallCount()
        self._logged: frozenset[tuple[str, str]] = frozenset()
        self._is_chosen = any(map(is_chosen, policies.values()))
        now = threading.local()
        self._denoisers = [
            AttachedModel(name, model, index, found[name], policies[name], self, now)
            for index, (name, model) in enumerate(denoisers.items())
        ]

    def take_modules(self) -> None:
        """Intercept the modules. Only `attach` calls it, once every choice is known to run.

        Raises ConfigError when one of the models has been attached in the meantime.
        """
        with _TAKING:
            for denoiser in self._denoisers:
                _check_free(module.found for module in denoiser.modules)
            self._entries = RegistryEntries()
            try:
                for denoiser in self._denoisers:
                    denoiser.take(self._entries)
            except BaseException:
                self.detach()
                raise

    @property
    def reach(self) -> str:
        """`attention modules reached: 2 of 3; ...` with the reason for each that is not."""
        text = f"attention modules reached: {self.num_reached} of {self.num_modules}"
        return text + (f"; diffusers' own attention stays in {listed(self.others)}" if self.others else "")

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks about whole models, for users."""
        return tuple(remark for denoiser in self._denoisers for remark in denoiser.remarks)

    @property
    def modules(self) -> tuple[ModuleAttention, ...]:
        """The reached modules, in the order in which the models hold them."""
        return tuple(module for denoiser in self._denoisers for module in denoiser.modules)

    def report(self) -> AttentionReport:
        """Return the attention report since attaching or the last `start_report`."""
        report = self._recorder.report()
        remarks = (self.reach, *self.remarks, *remarks_on(self.self_checks), self._calls.describe(), *report.notes)
        return dataclasses.replace(report, notes=tuple(filter(None, remarks)))

    def start_report(self, *, counts_density: bool = False) -> None:
        """Begin a new report. counts_density: see Hooks.counts_density."""
        self._recorder = AttentionRecorder(counts_density=counts_density)
        self._calls = CallCount()
        self._logged = frozenset()

    def set_step(self, index: int, num_steps: int, branch: str = "cond") -> None:
        """Set the next denoising step, in a loop of your own without a supported scheduler."""
        self._follower.set_step(StepInfo(index=index, num_steps=num_steps, branch=branch))

    def check_request(self, num_steps: int) -> None:
        """Check options that depend on the number of steps. Raises ConfigError for those that do not fit."""
        for module in self.modules:
            module.check_request(num_steps)

    def detach(self) -> None:
        """Restore the model. Idempotent, also after an exception."""
        for denoiser in self._denoisers:
            denoiser.give_back()
        if self._entries is not None:
            self._entries.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def begin_pass(self, denoiser: AttachedModel, arguments: dict[str, Any]) -> ForwardPass:
        """Begin a forward pass of one of the models."""
        num_steps = self._follower.begins_request()
        if num_steps is not None:
            self.check_request(num_steps)
        step = self._follower.next_pass(denoiser.index, arguments.get("timestep", arguments.get("t")))
        order = denoiser.order
        grid = None if order is None else order.read_grid(arguments, dict(denoiser.model.config))
        return ForwardPass(step, self._follower.state, order, grid)

    def attend(
        self, module: ModuleAttention, now: ForwardPass, call: AttentionModuleCall, number: int, masks: Any
    ) -> torch.Tensor:
        self._calls.num_served += 1
        return module.attend(call, number, masks, now, self._recorder)

    def add_unserved(self, module: str, reason: str, num_calls: int) -> None:
        """Record calls of a reached module that were not intercepted. module: component and path."""
        self._calls.add_unserved(module, reason, num_calls)

    def record_linear(self, module: FoundModule, step: StepInfo) -> None:
        """Count a run of linear attention, which is the model's own."""
        self._recorder.record(
            module.layer,
            step,
            backend="diffusers",
            implementation=module.processor,
            source="platform",
            reason="linear attention, which the architecture sets",
            kept=(),
            kind="linear",
        )

    def end_pass(self) -> None:
        """End a forward pass that raised no exception: log calls that were not intercepted, the first time.

        Raises BackendUnavailableError when a choice serves no call of the models.
        """
        if self._calls.places == self._logged:
            return
        self._logged = self._calls.places
        if self._is_chosen and self._calls.num_served == 0:
            raise BackendUnavailableError(
                f"attach: the attention choice serves no call: {self._calls.describe()}. Undo that before attaching, "
                "or run without a choice",
                [("attach", reason) for reason in sorted({reason for _, reason in self._logged})],
            )
        _logger.warning(self._calls.describe())


def _check_free(modules: Iterable[FoundModule]) -> None:
    if any(is_taken(module.module) for module in modules):
        raise ConfigError("attach: this model is attached already; call detach() on its handle first")


def listed(others: Sequence[UnreachedModule]) -> str:
    """Return `transformer.blocks.0.attn1 (X computes attention by hand), ... and 12 more`."""
    shown = [f"{other.component}.{other.path} ({other.reason})" for other in others[:_MAX_LISTED]]
    rest = len(others) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
