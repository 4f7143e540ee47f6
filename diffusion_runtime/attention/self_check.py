"""The self-check at load: what third-party kernels compute on this chip, compared with the definition of attention.

A package can import, run and be wrong: a kernel that was built for another chip, or one whose last block of keys is not
hidden. So a backend that declares it (`Backend.self_check_platforms`) computes the cases of the self-test in the head
size, the dtype and the features that the model uses, before any weight is read. One that fails is refused like a
package that is missing. One that passes is not checked again on this machine until a version changes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from diffusion_runtime.attention.backends.capability import AttentionRequirements
from diffusion_runtime.attention.backends.interface import Backend
from diffusion_runtime.attention.backends.refusals import remember_wrong
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.errors import BackendUnavailableError

if TYPE_CHECKING:
    from diffusion_runtime.attention.layers import AttentionLayer
    from diffusion_runtime.attention.select import Decision
    from diffusion_runtime.attention.self_test import SelfTest
    from diffusion_runtime.core.hardware import Hardware

# What a call may bring that no layer knows of when it is built.
_FEATURES_OF_CALLS = frozenset({"key_padding", "boolean_mask", "additive_mask"})
_FIX = "choose another backend, install another version of it, or turn the check off (--no-self-check)"

_logger = logging.getLogger("diffusion_runtime.attention")

Built = TypeVar("Built")
FromFirst = Callable[[Callable[[], str]], str]


@dataclass(frozen=True)
class CheckedUse:
    """The demands of a model's layers on one backend. categories, needs: of all of them together, sorted."""

    backend: str
    version: str
    head_dim: int
    dtype: str
    categories: tuple[str, ...]
    needs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.backend} ({self.version}), head size {self.head_dim}, {self.dtype}"


@dataclass(frozen=True)
class SelfCheck:
    """The outcome of the check of one use.

    status: `passed`; `kept`: passed when a model was loaded earlier; `failed`; `due`: to be made when the model is
    loaded; `off`: turned off. error: the largest of all cases, relative, in the Frobenius norm; bound: what it may be.
    problem: of a check that failed.
    """

    use: CheckedUse
    status: str
    num_cases: int = 0
    error: float | None = None
    bound: float | None = None
    problem: str = ""

    def __str__(self) -> str:
        figures = "" if self.error is None else f": error {self.error:.1e}, {self.bound:.1e} allowed"
        outcomes = {
            "passed": f"passed{figures}",
            "kept": f"passed on an earlier load{figures}",
            "failed": f"failed: {self.problem}",
            "due": "made when the model is loaded",
            "off": "off: its numbers are not checked on this machine",
        }
        return f"self-check of {self.use}: {outcomes[self.status]}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SelfCheck:
        use: dict[str, Any] = values["use"]
        checked = CheckedUse(**{**use, "categories": tuple(use["categories"]), "needs": tuple(use["needs"])})
        return cls(**{**values, "use": checked})


@dataclass(frozen=True)
class SelfChecker:
    """Checks what the layers of a model chose.

    enabled: False checks nothing, and what failed before is not refused either, where the policy turns it off too.
    may_run: False makes no check: what was kept of earlier ones is all that is known. from_first: what its argument
    returns on the first of several processes, which alone runs the checks. num_keys: of the model's self-attention.
    """

    enabled: bool = True
    may_run: bool = True
    from_first: FromFirst | None = None
    num_keys: tuple[int, ...] = ()

    def build_checked(
        self,
        build: Callable[[], Built],
        layers_of: Callable[[Built], Iterable[AttentionLayer]],
        built: Built | None = None,
    ) -> tuple[Built, tuple[SelfCheck, ...]]:
        """Return what `build` makes from choices that pass, and their checks. build: makes a model's attention layers,
        which choose; it is called again, and chooses otherwise, after a check that failed. built: what it made already,
        which is checked first.

        Raises BackendUnavailableError when a choice fails that has no other candidate, and what `build` raises.
        """
        failed: list[SelfCheck] = []
        while True:
            built = build() if built is None else built
            checks = self._check(list(layers_of(built)))
            wrong = [check for check in checks if check.status == "failed"]
            failed += wrong
            if not wrong:
                return built, (*failed, *checks)
            for check in wrong:
                use = check.use
                reason = f"its self-check failed here: {check.problem} ({use}); fix: {_FIX}"
                remember_wrong(use.backend, use.head_dim, use.dtype, reason)
            built = None

    def _check(self, layers: Sequence[AttentionLayer]) -> list[SelfCheck]:
        uses = uses_of(layers)
        if not self.enabled:
            return [SelfCheck(use, "off") for use in uses]
        if not uses:
            return []
        requirements = layers[0].decisions.requirements
        device = layers[0].policy.device

        def check_all() -> str:
            return json.dumps([self._check_use(use, requirements.hardware, device).to_dict() for use in uses])

        text = check_all() if self.from_first is None else self.from_first(check_all)
        return [SelfCheck.from_dict(values) for values in json.loads(text)]

    def _check_use(self, use: CheckedUse, hardware: Hardware, device: str) -> SelfCheck:
        from diffusion_runtime.attention.machine_cache import SelfCheckCache
        from diffusion_runtime.attention.self_test import tests_of_use

        tests = tests_of_use(
            use.backend,
            hardware,
            head_dim=use.head_dim,
            dtype=use.dtype,
            categories=use.categories,
            needs=use.needs,
            num_keys=self.num_keys,
        )
        backend = find_backend(use.backend)
        assert backend is not None, "it was chosen"
        cache = SelfCheckCache(backend, hardware, [test.title for test in tests])
        kept = cache.read()
        if kept is not None:
            return SelfCheck(use, "kept", len(tests), kept.error, kept.bound)
        if not self.may_run:
            return SelfCheck(use, "due", len(tests))
        check = _run(use, tests, device)
        if check.status == "passed" and check.error is not None and check.bound is not None:
            cache.write(check.error, check.bound)
        return check


def uses_of(layers: Iterable[AttentionLayer]) -> tuple[CheckedUse, ...]:
    """Return the uses of backends whose numbers are checked on this machine: those that the layers chose, and those
    that these may hand calls to."""
    uses: dict[tuple[str, int, str], CheckedUse] = {}
    for layer in layers:
        for _, decision in layer.decisions.possible:
            for backend in _serving(decision, layer.decisions.requirements):
                requirements, key = (
                    layer.decisions.requirements,
                    (backend.name, layer.decisions.requirements.head_dim, layer.decisions.requirements.dtype),
                )
                version = str(backend.probe(requirements.hardware).version)
                known = uses.get(key, CheckedUse(backend.name, version, key[1], key[2], (), ()))
                categories = {*known.categories, requirements.category}
                needs = {*known.needs, *_needs(requirements)} & backend.capability.features
                uses[key] = replace(known, categories=tuple(sorted(categories)), needs=tuple(sorted(needs)))
    return tuple(uses.values())


def remarks_on(checks: Iterable[SelfCheck]) -> tuple[str, ...]:
    """Notes on the checks for the report; a failed one is given there as the reason for another choice."""
    return tuple(dict.fromkeys(str(check) for check in checks if check.status != "failed"))


def _serving(decision: Decision, requirements: AttentionRequirements) -> list[Backend]:
    """Who may compute calls of a decision, its dense calls included, among those that are checked on their machine."""
    chosen = [decision] if decision.dense is None else [decision, decision.dense]
    backends = [find_backend(each.backend) for each in chosen]
    backends += [find_backend(name) for each in backends if each is not None for name in each.delegates(requirements)]
    platform = requirements.hardware.platform
    return [each for each in backends if each is not None and platform in each.self_check_platforms]


def _needs(requirements: AttentionRequirements) -> Collection[str]:
    grouped = {"gqa"} if requirements.num_kv_heads != requirements.num_heads else set()
    in_parts = {"lse"} if requirements.keys_in_parts else set()
    return requirements.needs | grouped | in_parts | _FEATURES_OF_CALLS


def _run(use: CheckedUse, tests: Sequence[SelfTest], device: str) -> SelfCheck:
    """All cases, until one fails."""
    from diffusion_runtime.attention.self_test import device_answers, run_self_test

    _logger.info(
        "self-check of %s: %d small cases against float64, once for this version, chip and torch; a package that "
        "compiles its kernels now may take minutes",
        use,
        len(tests),
    )
    started = time.perf_counter()
    worst: tuple[float, float] | None = None
    for test in tests:
        result = run_self_test(test, device)
        if not result.passed:
            check = SelfCheck(
                use, "failed", len(tests), result.error, result.bound, f"{test.case.name}: {result.problem}"
            )
            _logger.warning("%s", check)
            if not device_answers(device):
                # Whatever comes next would fail alike, so there is nothing to fall back to.
                message = f"{check}; it took the device {device} down. Start again with another backend"
                raise BackendUnavailableError(message, [(use.backend, check.problem)])
            return check
        if result.error is not None and (worst is None or result.error / result.bound > worst[0] / worst[1]):
            worst = result.error, result.bound
    check = SelfCheck(use, "passed", len(tests), *(worst or (None, None)))
    _logger.info("%s (%.1f s)", check, time.perf_counter() - started)
    return check
