"""Entries of ours in diffusers' attention dispatcher, for one run of a pipeline.

`set_attention_backend` changes the whole process: the backend stays active for every other pipeline from then on. Here
only the copied processors (interception.py) get a name. A call that arrives at an entry is served by the interception,
like one of torch's scaled_dot_product_attention. The module's own function is then a backend of diffusers': the chosen
one, with calls refused that it would compute wrong, or else the one the processor requested.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from diffusion_runtime.diffusers_bridge.masks import KeyPadding, is_block_mask, read_mask
from diffusion_runtime.diffusers_bridge.module_run import AttentionModuleCall, current_run
from diffusion_runtime.errors import BackendUnavailableError, ConfigError

# They apply any mask.
_TAKES_EVERY_MASK = frozenset({"native", "_native_cudnn", "_native_efficient", "_native_math", "_native_npu"})
# They count the keys that a mask leaves and take the first ones.
_TAKES_PADDING_ON_THE_RIGHT = frozenset(
    {"flash_varlen", "flash_varlen_hub", "_flash_varlen_3", "_flash_3_varlen_hub", "sage_varlen"}
)
# They take a BlockMask of torch's FlexAttention.
_TAKES_BLOCK_MASKS = frozenset({"flex"})
_NO_BLOCK_MASKS = "it takes no BlockMask, which is how this model hides pairs; flex takes it"


class RegistryEntries:
    """Entries in the dispatcher's registry, removed by `close`.

    name: the diffusers backend that computes the calls in the end, None for the one that each processor requests.
    Raises BackendUnavailableError when diffusers does not have it or cannot run it here; so do calls with a mask that
    it would compute wrong.
    """

    def __init__(self, name: str | None = None) -> None:
        from diffusers.models import attention_dispatch as dispatch

        self._registry = dispatch._AttentionBackendRegistry
        self._name = name
        self._chosen = None if name is None else _usable(name)
        self._entries: dict[str | None, Any] = {}

    def entry_for(self, processor: Any) -> object:
        """Return the value for `_attention_backend` of a processor. It compares equal to the present name, as some
        processors compare it."""
        asked = processor._attention_backend
        wanted = self._name or (None if asked is None else str.__str__(asked))
        if wanted not in self._entries:
            self._entries[wanted] = self._register(wanted)
        return self._entries[wanted]

    def close(self) -> None:
        from diffusers.models.attention_dispatch import AttentionBackendName

        for entry in self._entries.values():
            for table in (*self._tables(), AttentionBackendName._value2member_map_):
                table.pop(entry, None)
        self._entries = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tables(self) -> Sequence[dict[Any, Any]]:
        registry = self._registry
        return registry._backends, registry._constraints, registry._supported_arg_names

    def _register(self, wanted: str | None) -> Any:
        from diffusers.models.attention_dispatch import AttentionBackendName

        own = self._chosen if wanted is None or self._chosen is not None else AttentionBackendName(wanted)
        entry = str.__new__(_entry_type(AttentionBackendName), wanted or "native")
        entry._name_ = entry._value_ = str.__str__(entry)
        entry.place = object.__hash__(entry)

        def run(**arguments: Any) -> Any:
            backend = self._registry.get_active_backend()[0] if own is None else own
            return self._run(backend, arguments)

        # Versions that look a backend up in the enum find the entry there.
        AttentionBackendName._value2member_map_[entry] = entry
        shown = AttentionBackendName.NATIVE if own is None else own
        names = set(self._registry._supported_arg_names[shown]) | {"attn_mask", "dropout_p", "is_causal", "enable_gqa"}
        for table, value in zip(self._tables(), (run, self._constraints(own), names), strict=True):
            table[entry] = value
        return entry

    def _constraints(self, own: Any) -> list[Any]:
        return [] if self._chosen is None else list(self._registry._constraints[own])

    def _run(self, backend: Any, arguments: dict[str, Any]) -> Any:
        run = current_run()
        assert run is not None, "an entry is asked for by a twin, and a twin runs within a ModuleRun"
        name = str.__str__(backend)
        function = self._registry._backends[backend]
        if self._chosen is not None:
            function = checked_function(name, function)
        elif name not in _TAKES_BLOCK_MASKS and is_block_mask(arguments.get("attn_mask")):
            raise _refusal(name, _NO_BLOCK_MASKS)
        known = self._registry._supported_arg_names[backend]
        given = {key: value for key, value in arguments.items() if key in known}

        def run_own() -> torch.Tensor:
            out: torch.Tensor = function(**given)
            return out.transpose(1, 2)

        return run.serve(_call_of(arguments, name, run_own)).transpose(1, 2)


@functools.cache
def _entry_type(names: Any) -> Any:
    """Return the class of entries: members of diffusers' enum that it does not list, so that no other code can request
    one.

    An entry equals the name of a backend, which processors compare, but is a different dictionary key. Its hash is
    Python, which torch.compile can trace: whatever else of this process it compiles looks into the same dictionaries.
    """
    return type.__new__(type(names), "Entry", (names,), {"__hash__": lambda entry: entry.place})


def _call_of(arguments: dict[str, Any], own: str, run_own: Callable[[], torch.Tensor]) -> AttentionModuleCall:
    """Return the call of dispatch_attention_fn's `arguments`; query, key, value: [batch, seq, heads, head_dim]."""
    if arguments.get("return_lse"):
        raise ConfigError("this module asks diffusers' dispatcher for the log-sum-exp; it cannot be attached")
    query, key, value = (arguments[name].transpose(1, 2) for name in ("query", "key", "value"))
    mask = arguments.get("attn_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape == (query.shape[0], key.shape[2]):
        mask = mask[:, None, None]
    return AttentionModuleCall(
        query,
        key,
        value,
        mask,
        arguments.get("dropout_p", 0.0),
        arguments.get("is_causal", False),
        arguments.get("scale"),
        arguments.get("enable_gqa", False),
        own,
        run_own,
    )


def check_dispatcher_backend(name: str) -> None:
    """Check that diffusers' backend `name` can run here. Raises BackendUnavailableError."""
    _usable(name)


def _usable(name: str) -> Any:
    from diffusers.models import attention_dispatch as dispatch

    known = [member.value for member in dispatch.AttentionBackendName]
    if name not in known:
        raise _refusal(name, f"this version of diffusers has {', '.join(known)}")
    own = dispatch.AttentionBackendName(name)
    try:
        dispatch._check_attention_backend_requirements(own)
        dispatch._maybe_download_kernel_for_backend(own)
    except Exception as error:  # any exception: a missing package, an unreachable hub, a kernel for another machine
        raise _refusal(name, str(error)) from error
    return own


def checked_function(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of diffusers' backend `name`, with masks refused that it would compute wrong."""

    def run(**arguments: Any) -> Any:
        query, key, mask = arguments["query"], arguments["key"], arguments.get("attn_mask")
        if is_block_mask(mask) and name not in _TAKES_BLOCK_MASKS:
            raise _refusal(name, _NO_BLOCK_MASKS)
        if isinstance(mask, torch.Tensor) and name not in _TAKES_EVERY_MASK:
            arguments["attn_mask"] = _allowed(name, mask, (query.shape[0], query.shape[1], key.shape[1]))
        return function(**arguments)

    return run


def _allowed(name: str, mask: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor | None:
    """Return the mask, None if it hides nothing. Raises BackendUnavailableError if the backend misapplies it."""
    batch, _, seq_k = shape
    is_short = mask.dim() == 2 and mask.shape == (batch, seq_k)
    seen = read_mask(mask[:, None, None] if is_short else mask, shape)
    if seen is None:
        return None
    if name == "xformers":
        if mask.dtype == torch.bool and not is_short:
            raise _refusal(name, "it ignores a boolean mask of four dimensions")
    elif name == "flex":
        if is_short:
            raise _refusal(name, "it hides queries where a mask of two dimensions hides keys")
    elif name not in _TAKES_PADDING_ON_THE_RIGHT:
        raise _refusal(name, "it takes no mask, and this model has padding to hide")
    elif not (isinstance(seen, KeyPadding) and seen.is_on_the_right):
        raise _refusal(name, "it takes the first keys of each sample, and this mask hides others than the last")
    return mask


def _refusal(name: str, reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"diffusers' attention backend {name!r} cannot run here: {reason}."
        + (
            ""
            if reason == _NO_BLOCK_MASKS
            else " Choose native, or one of ours such as torch_sdpa, which is given padding as lengths"
        ),
        [(name, reason)],
    )
