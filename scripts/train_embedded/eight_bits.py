"""Weights in 8 bits, in formats that the runtime reads of anyone (docs/your_files.md): states, folders, LoRA files.

Weights of two or more dimensions become int8 with one scale per output channel and ComfyUI's mark `int8_tensorwise`,
everything else stays in 16 bits, and so do the layers at both ends (`ENDS`). Rows of linear layers may be rotated in
groups first (`convrot`), which evens out large numbers. Where it is known what a weight is multiplied with, the columns
that are rounded later make good the errors of those before (Frantar et al., GPTQ, arXiv:2210.17323).

The factors of a LoRA become 8-bit floats without scales, which every reader takes for numbers: each row of A and its
column of B are balanced first, so that both lie where these floats are finest.

    python -m scripts.train_embedded.eight_bits transformer.pt transformer.safetensors    # what --init takes
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from diffusion_runtime.kernels.int8_rows.reference import group_size_of, rotate
from diffusion_runtime.weights.stored_tensors import stored_rows
from diffusion_runtime.weights.tensor_files import SafetensorsFile
from diffusion_runtime.weights.weight_files import MARKS, QUANTIZATION_METADATA

WEIGHTS = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
}
"""Components that are stored in 8 bits, and the file of each."""
LORA = "pytorch_lora_weights.safetensors"
ENDS = {"patch_embedding", "proj_out", "encoder.conv_in", "decoder.conv_out"}
"""Layers that turn latents or pixels into hidden numbers, or back. They are 0.5 % of a transformer's weights, and made
0.0096 of the 0.0110 by which the velocity of `shapes-causal` was off when all were rounded."""
# int8 is symmetric here. The share of the mean moment that is added to every one, as in GPTQ.
_MAX, _DAMPING = 127, 0.01
_NOTES, _WEIGHT, _DOWN, _UP = "notes", ".weight", ".lora_A.weight", ".lora_B.weight"


def save_eight_bits(
    state: Mapping[str, Tensor],
    path: Path,
    notes: dict[str, Any] | None = None,
    other: torch.dtype = torch.float16,
    moments: Mapping[str, Tensor] | None = None,
    *,
    rotates: bool = False,
) -> None:
    """Write a state. notes: come back with it, must be JSON; other: dtype of what stays in 16 bits; moments: by the
    name of a layer, the sum of x xT over its inputs x, [in, in]; rotates: linear layers."""
    stored: dict[str, Tensor] = {}
    layers: dict[str, dict[str, Any]] = {}
    for name, value in state.items():
        wide = value.detach().float().cpu()
        layer = name.removesuffix(_WEIGHT)
        # A name may begin with that of a part (`main`).
        is_end = layer in ENDS or layer.partition(".")[2] in ENDS
        if wide.ndim < 2 or layer == name or is_end:
            stored[name] = wide.to(other)
            continue
        mark: dict[str, Any] = {"format": "int8_tensorwise"}
        moment = (moments or {}).get(layer)
        if rotates and wide.ndim == 2 and (group := group_size_of(wide.shape[1])):
            mark |= {"convrot": True, "convrot_groupsize": group}
            wide = rotate(wide, group)
            # Of the rotated inputs: both sides of a symmetric matrix.
            moment = None if moment is None else rotate(rotate(moment.double(), group).T, group)
        stored[name], stored[f"{name}_scale"] = rounded(wide, moment)
        layers[layer] = mark
    marks = json.dumps({"format_version": "1.0", "layers": layers})
    save_file(stored, path, metadata={"format": "pt", QUANTIZATION_METADATA: marks, _NOTES: json.dumps(notes or {})})


def rounded(weight: Tensor, moment: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return a weight [out, in, ...] in int8 and its scales [out]. moment: of its inputs, [in, in]; without it every
    number is rounded to the nearest."""
    scale = weight.flatten(1).abs().amax(dim=1).clamp(min=1e-8) / _MAX
    if moment is None:
        return (weight / scale.view(-1, *[1] * (weight.ndim - 1))).round().to(torch.int8).contiguous(), scale
    # The columns of the largest inputs first: their errors are made good by most others.
    order = moment.diagonal().argsort(descending=True)
    columns = (weight.double() / scale.double()[:, None])[:, order]
    share = _shares(moment.double()[order][:, order])
    found = torch.empty_like(columns)
    for index in range(columns.shape[1]):
        found[:, index] = columns[:, index].round().clamp(-_MAX, _MAX)
        error = (columns[:, index] - found[:, index]) / share[index, index]
        columns[:, index + 1 :] -= error[:, None] * share[index, index + 1 :]
    return found[:, order.argsort()].to(torch.int8).contiguous(), scale


def _shares(moment: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse: what an error in one column is worth in those behind it."""
    moment = moment.clone()
    moment.diagonal().add_(_DAMPING * moment.diagonal().mean().clamp(min=1e-12))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moment))
    return torch.linalg.cholesky(inverse, upper=True)


@contextmanager
def watched_inputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield the moments of the inputs of a model's linear layers, by name, which grow while it runs."""
    moments: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            rows = inputs[0].detach().float().flatten(0, -2)
            product = (rows.T @ rows).cpu()
            moments[name] = moments[name] + product if name in moments else product

        return add

    layers = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers]
    try:
        yield moments
    finally:
        for hook in hooks:
            hook.remove()


def load_eight_bits(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state in float32 and the notes, of a file in 8 bits or not."""
    with closing(SafetensorsFile(path)) as file:
        notes: dict[str, Any] = json.loads(file.metadata.get(_NOTES, "{}"))
        rows = stored_rows([file])
        return {name: several[0].numbers(torch.float32).float().clone() for name, several in rows.items()}, notes


def write_folder(
    source: Path,
    target: Path,
    moments: Mapping[str, Mapping[str, Tensor]] | None = None,
    keep: Collection[str] = (),
    *,
    rotates: bool = False,
) -> None:
    """Copy a model folder, its weights in 8 bits but for those of the components `keep`. moments: by component.

    The transformer's config.json asks for weights that are dequantised at load: a model this small gains nothing by
    products in 8 bits. The other components always are.
    """
    if target != source:
        shutil.copytree(source, target, dirs_exist_ok=True)
    for component in WEIGHTS.keys() - set(keep):
        path = target / component / WEIGHTS[component]
        state, own = load_eight_bits(path)[0], (moments or {}).get(component)
        save_eight_bits(state, path, other=torch.bfloat16, moments=own, rotates=rotates)
        path.chmod(0o644)
    if "transformer" not in keep:
        config = target / "transformer" / "config.json"
        values = json.loads(config.read_text())
        values["quantization_config"] = {"quant_method": MARKS, "dequantize": True}
        config.write_text(json.dumps(values, indent=2) + "\n")


def write_lora(source: Path, target: Path, share: float = 1.0) -> None:
    """Copy the folder of a LoRA, its factors in 8-bit floats. share: how many of its numbers are kept, 0 to 1."""
    state, stored = load_file(source / LORA), {}
    with closing(SafetensorsFile(source / LORA)) as file:
        metadata = dict(file.metadata)
    downs = [name for name in state if name.endswith(_DOWN)]
    ups = [name.removesuffix(_DOWN) + _UP for name in downs]
    if state.keys() != {*downs, *ups}:
        raise ValueError(
            f"{source / LORA}: expected factors lora_A and lora_B alone, got {sorted(state.keys() - {*downs, *ups})}"
        )
    pairs = [(state[down].float(), state[up].float()) for down, up in zip(downs, ups, strict=True)]
    for down_name, up_name, (down, up) in zip(downs, ups, shortened(pairs, share), strict=True):
        # The rank's two vectors get the same length, which their product does not notice.
        balance = (up.norm(dim=0) / down.norm(dim=1).clamp(min=1e-8)).sqrt().clamp(min=1e-8)
        stored[down_name] = (balance[:, None] * down).to(torch.float8_e4m3fn).contiguous()
        stored[up_name] = (up / balance).to(torch.float8_e4m3fn).contiguous()
    if target != source:
        shutil.copytree(source, target, dirs_exist_ok=True)
    save_file(stored, target / LORA, metadata=metadata)
    (target / LORA).chmod(0o644)


def shortened(pairs: Sequence[tuple[Tensor, Tensor]], share: float) -> list[tuple[Tensor, Tensor]]:
    """Return factors (down [rank, in], up [out, rank]) with at most `share` of all numbers, one rank a layer at least:
    of the products' singular values those that are largest for the numbers that they take."""
    if share >= 1:
        return list(pairs)
    parts = []
    for down, up in pairs:
        (out_base, outer), (in_base, inner) = torch.linalg.qr(up), torch.linalg.qr(down.T)
        left, values, right = torch.linalg.svd(outer @ inner.T)
        parts.append((right @ in_base.T, out_base @ left, values))
    costs = [down.shape[1] + up.shape[0] for down, up in pairs]
    left_over = share * sum(cost * len(down) for cost, (down, _) in zip(costs, pairs, strict=True)) - sum(costs)
    ranks = [1] * len(pairs)
    gains = [(float(value**2) / costs[at], at) for at, (_, _, values) in enumerate(parts) for value in values[1:]]
    for _, at in sorted(gains, reverse=True):
        if costs[at] > left_over:
            break
        left_over -= costs[at]
        ranks[at] += 1
    return [
        (values[:rank, None] * down[:rank], up[:, :rank]) for rank, (down, up, values) in zip(ranks, parts, strict=True)
    ]


def load_parts(path: Path) -> dict[str, dict[str, Tensor]]:
    """Return the states of `transformer`, `text_encoder` and `heads` that `main` joined, each under its own names."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in load_eight_bits(path)[0].items():
        part, _, key = name.partition(".")
        parts.setdefault(part, {})[key] = value
    return parts


def main() -> None:
    """Write a transformer.pt, which holds the states of several parts, as one 8-bit file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path, help="transformer.pt")
    parser.add_argument("file", type=Path, help="transformer.safetensors, as --init takes it")
    arguments = parser.parse_args()
    parts: dict[str, dict[str, Tensor]] = torch.load(arguments.parts, map_location="cpu", weights_only=True)
    save_eight_bits(
        {f"{part}.{name}": value for part, state in parts.items() for name, value in state.items()}, arguments.file
    )
    arguments.file.chmod(0o644)


if __name__ == "__main__":
    main()
