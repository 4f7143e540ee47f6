"""The blocks of a model: what is streamed one after the other, and how many bytes modules hold."""

from __future__ import annotations

import torch
from torch import nn

# A list of fewer modules than this is no stack of blocks: embeddings of two streams, heads of an output.
MIN_BLOCKS = 2


def num_bytes_of(module: nn.Module) -> int:
    """Bytes of its parameters and persistent buffers, each counted once; on the meta device those it would take."""
    return sum({id(tensor): tensor.nbytes for tensor in module.state_dict(keep_vars=True).values()}.values())


def blocks_of(root: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules of its outermost ModuleLists of one class each, or of subclasses of one of them, in the order
    of declaration, which is the order they run in."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in root.modules():
        if not isinstance(module, nn.ModuleList) or module in inside:
            continue
        elements = list(module)
        kinds = {type(each) for each in elements}
        is_stack = len(elements) >= MIN_BLOCKS and any(all(issubclass(each, kind) for each in kinds) for kind in kinds)
        if is_stack and any(True for _ in module.parameters()):
            found += elements
            inside.update(each for element in elements for each in element.modules())
    return tuple(found)


def read_once(block: nn.Module) -> list[tuple[nn.Module, list[torch.Tensor]]]:
    """Modules of a block with tensors of theirs that its forward does not read: what `read_once` of the module names,
    such as the projections of a text to keys and values. Code that reads them enters `held_weights`
    (layers/held_weights.py)."""
    found = []
    for module in block.modules():
        names: tuple[str, ...] = getattr(module, "read_once", ())
        tensors: list[torch.Tensor] = [tensor for name in names for tensor in module.get_submodule(name).parameters()]
        if tensors:
            found.append((module, tensors))
    return found


def largest_held_bytes(root: nn.Module) -> int:
    """Return the most bytes present at once of weights that are read outside of a forward of a module's blocks."""
    held = (tensors for block in blocks_of(root) for _, tensors in read_once(block))
    return max((sum(tensor.nbytes for tensor in tensors) for tensors in held), default=0)


def streamed_bytes(block: nn.Module) -> tuple[int, int]:
    """(bytes of a block that its forward reads, bytes that are read once a request)."""
    apart = sum(tensor.nbytes for _, tensors in read_once(block) for tensor in tensors)
    return num_bytes_of(block) - apart, apart
