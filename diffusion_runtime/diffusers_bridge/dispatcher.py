"""diffusers' own attention backends for one run, with the calls that they would get wrong refused.

`set_attention_backend` changes the process: it leaves an active backend behind that serves every other pipeline from
then on. Here the name goes into the twins of the processors (interception.py) and nowhere else; what they ask the
dispatcher for is an entry of their own in its registry, which goes with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from diffusion_runtime.diffusers_bridge.masks import KeyPadding, read_mask
from diffusion_runtime.errors import BackendUnavailableError

# They do what a mask says, whatever it is.
_TAKES_EVERY_MASK = frozenset({"native", "_native_cudnn", "_native_efficient", "_native_math", "_native_npu"})
# They count the keys that a mask leaves and take the first ones.
_TAKES_PADDING_ON_THE_RIGHT = frozenset(
    {"flash_varlen", "flash_varlen_hub", "_flash_varlen_3", "_flash_3_varlen_hub", "sage_varlen"}
)


@contextlib.contextmanager
def dispatcher_entry(name: str) -> Iterator[Any]:
    """Gives what a processor's `_attention_backend` has to be for its calls to go to diffusers' backend `name`.

    Raises BackendUnavailableError when diffusers does not have it or cannot run it here; so do calls with a mask that
    it would get wrong.
    """
    from diffusers.models import attention_dispatch as dispatch

    registry = dispatch._AttentionBackendRegistry
    own = _usable(name)
    # An enum member that the enum does not list: nobody else can ask for it.
    entry: Any = str.__new__(dispatch.AttentionBackendName, f"{name}, checked, {object.__hash__(object())}")
    entry._name_ = entry._value_ = str.__str__(entry)
    tables = (registry._backends, registry._constraints, registry._supported_arg_names)
    values = (
        checked_function(name, registry._backends[own]),
        registry._constraints[own],
        registry._supported_arg_names[own],
    )
    for table, value in zip(tables, values, strict=True):
        table[entry] = value
    try:
        yield entry
    finally:
        for table in tables:
            table.pop(entry, None)


def check_dispatcher_backend(name: str) -> None:
    """Raises BackendUnavailableError when diffusers' backend `name` cannot run here."""
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
    except Exception as error:  # a missing package, a hub that is not reached, a kernel for another machine
        raise _refusal(name, str(error)) from error
    return own


def checked_function(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """What diffusers registers as its backend `name`, with the masks that it would get wrong refused."""

    def run(**arguments: Any) -> Any:
        query, key, mask = arguments["query"], arguments["key"], arguments.get("attn_mask")
        if isinstance(mask, torch.Tensor) and name not in _TAKES_EVERY_MASK:
            arguments["attn_mask"] = _allowed(name, mask, (query.shape[0], query.shape[1], key.shape[1]))
        return function(**arguments)

    return run


def _allowed(name: str, mask: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor | None:
    """The mask, None when it hides nothing. Raises BackendUnavailableError when the backend would get it wrong."""
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
        f"diffusers' attention backend {name!r} cannot run here: {reason}. Choose native, or one of ours such as "
        "torch_sdpa, which is given padding as lengths",
        [(name, reason)],
    )
