"""read_lora_file: a file or folder of any trainer, as changes of named modules; binding.py finds these in a model.

An adapter at strength 1 adds alpha / rank * B @ A. Where alpha is not given, it is the rank.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from diffusion_runtime.errors import ConfigError, ModelLoadError, did_you_mean, shown, shown_name
from diffusion_runtime.layers.weight_range import unusable_numbers
from diffusion_runtime.untrusted.files import shown_path
from diffusion_runtime.weights.cached_folder import snapshot_in
from diffusion_runtime.weights.lora.adapters import (
    Adapter,
    Decomposed,
    Difference,
    Factor,
    Hadamard,
    Kronecker,
    LowRank,
    Replacement,
    TuckerFactor,
)
from diffusion_runtime.weights.lora.few_step import FewStepHint, few_step_hint
from diffusion_runtime.weights.lora.keys import LOHA, LOKR, LoraKey, Names, Role, other_method, parse_key
from diffusion_runtime.weights.lora.settings import FILES_IN_FOLDERS, AdapterSettings, read_settings
from diffusion_runtime.weights.lora.shipped import SHIPPED_LORAS, lora_path
from diffusion_runtime.weights.tensor_files import read_tensors
from diffusion_runtime.weights.weight_files import DAMAGED, SAFETENSORS, listed

_HOW_TO_GIVE = (
    "Give a file or a folder on this machine, or the hub's ORG/NAME or ORG/NAME/FILE: --lora FILE, FILE@0.8, or "
    "transformer=FILE, transformer_2=FILE, both=FILE"
)

# Numbers of tensors in the metadata of FastVideo's files (`fastvideo-lora-v2`), and the roles of those.
_COUNTS = {
    "low_rank_tensors": (Role.DOWN, Role.UP),
    "diff_tensors": (Role.DIFF, Role.DIFF_BIAS),
    "set_weight_tensors": (Role.SET,),
}


@dataclass(frozen=True)
class ModuleChange:
    """Change of one module by a file. name: the file's, without prefix; flattened: its dots are underscores. component:
    as in LoraKey. weight, bias: added at strength 1, one after the other, or one that replaces what is there. rank: of
    its low rank, None without one."""

    name: str
    flattened: bool
    component: str
    keys: tuple[str, ...]
    weight: tuple[Adapter, ...]
    bias: tuple[Difference | Replacement, ...]
    rank: int | None

    @property
    def replaces(self) -> bool:
        """Return whether it replaces a weight or a bias."""
        return any(isinstance(each, Replacement) for each in (*self.weight, *self.bias))


@dataclass(frozen=True)
class LoraFile:
    """A file, read. unknown: keys of no format that is known here. names: whose way of writing names it follows. kinds:
    what its tensors are, in words."""

    path: Path
    modules: tuple[ModuleChange, ...]
    unknown: tuple[str, ...]
    names: tuple[Names, ...]
    kinds: tuple[str, ...]
    few_step_hint: FewStepHint | None

    @property
    def num_keys(self) -> int:
        return sum(len(module.keys) for module in self.modules) + len(self.unknown)

    @property
    def num_replaced(self) -> int:
        """Weights and biases that it replaces."""
        adapters = (each for module in self.modules for each in (*module.weight, *module.bias))
        return sum(isinstance(each, Replacement) for each in adapters)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({module.rank for module in self.modules if module.rank is not None}))


def read_lora_file(path: str, key: str = "lora.path") -> LoraFile:
    """path: a safetensors file, a folder of PEFT or diffusers, or the name of a shipped one. key: what named it, for
    messages.

    Raises ConfigError for a path that no file can have and for a folder that holds none, ModelLoadError for a file that
    is missing, damaged, without numbers, or whose tensors do not belong together.
    """
    place = lora_file(path, key)
    tensors, metadata = read_tensors(place, key)
    # Before their settings, which have other meanings.
    _refuse_other_methods(place, [name for name in tensors if parse_key(name) is None])
    settings = read_settings(place, metadata, in_folder=place != lora_path(path))
    groups: dict[tuple[str, bool, str], dict[Role, LoraKey]] = {}
    unknown: list[str] = []
    for name in tensors:
        parsed = parse_key(name)
        if parsed is None:
            unknown.append(name)
            continue
        group = groups.setdefault((parsed.component, parsed.flattened, parsed.module), {})
        if parsed.role in group:
            raise ModelLoadError(
                f"{place}: keys {shown(group[parsed.role].key)} and {shown(name)} are both the {parsed.role.value} of "
                f"{shown_name(parsed.module)}, with or without a prefix; leave one out"
            )
        group[parsed.role] = parsed
    # A module of a format that is not known here is not one with an alpha alone.
    strange = {key.rpartition(".")[0] for key in unknown}
    for group_name, group in list(groups.items()):
        alpha = group.get(Role.ALPHA)
        if len(group) == 1 and alpha is not None and alpha.key.removesuffix(".alpha") in strange:
            unknown.append(alpha.key)
            del groups[group_name]
    modules = []
    for (component, flattened, module), keys in groups.items():
        found = {role: _usable(place, parsed, tensors[parsed.key]) for role, parsed in keys.items()}
        modules.append(_Reader(place, module, settings.of(component), found).change(flattened, component, keys))
    if settings.use_dora and not any(Role.MAGNITUDE in keys for keys in groups.values()):
        raise ModelLoadError(f"{place}: use_dora: expected magnitudes (dora_scale) among its keys, there are none")
    parsed_keys = [parsed for keys in groups.values() for parsed in keys.values()]
    _check_counts(place, metadata, [parsed.role for parsed in parsed_keys])
    return LoraFile(
        place,
        tuple(modules),
        tuple(unknown),
        tuple(dict.fromkeys(parsed.names for parsed in parsed_keys)),
        _kinds({parsed.role for parsed in parsed_keys}),
        few_step_hint(place.parent.name if place.name in FILES_IN_FOLDERS else place.stem, metadata),
    )


def lora_file(given: str, key: str) -> Path:
    """The safetensors file behind what `read_lora_file` is given. Raises ConfigError."""
    path = lora_path(given, key)
    if not os.path.lexists(path):
        how = did_you_mean(given, SHIPPED_LORAS) or (f" {_HOW_TO_GIVE}" if key == "lora.path" else "")
        raise ModelLoadError(f"{key}: {shown_path(given)}: no such file.{how}")
    if not path.is_dir():
        return path
    path = snapshot_in(path) or path
    for name in FILES_IN_FOLDERS:
        if (path / name).exists():
            return path / name
    files = sorted(each for each in path.iterdir() if each.suffix in SAFETENSORS)
    if len(files) != 1:
        raise ConfigError(
            f"{key}: {path}: this is a folder, expected {' or '.join(FILES_IN_FOLDERS)} in it, or one safetensors "
            f"file, found {listed(file.name for file in files) or 'none'}; give the path of the file itself"
        )
    return files[0]


def _refuse_other_methods(path: Path, unknown: Sequence[str]) -> None:
    """Raises ModelLoadError for a file of a method that changes weights otherwise, such as OFT, which turns them."""
    methods = sorted({method for key in unknown if (method := other_method(key)) is not None})
    if methods:
        keys = [key for key in unknown if other_method(key) is not None]
        raise ModelLoadError(
            f"{path}: {len(keys)} of its keys are of {' and '.join(methods)}, which this runtime does not apply: "
            f"{listed(keys)}. Merge the file into the transformer with the library that made it (peft: "
            "merge_and_unload(), then save_pretrained(FOLDER)), and give the result by --transformer-path"
        )


def _check_counts(path: Path, metadata: Mapping[str, str], roles: Sequence[Role]) -> None:
    """Raises ModelLoadError for a file that has another number of tensors than its metadata says, as FastVideo writes
    it."""
    for key, of in _COUNTS.items():
        stated, found = metadata.get(key), sum(role in of for role in roles)
        if stated is not None and stated != str(found):
            raise ModelLoadError(
                f"{path}: {key}: its metadata says {shown(stated)}, and it has {found}: the file is incomplete; copy "
                "or download it again"
            )


def _usable(path: Path, key: LoraKey, tensor: torch.Tensor) -> torch.Tensor:
    is_integer = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool
    if is_integer and key.role in (Role.ALPHA, Role.RANK):
        # Trainers that were given no alpha save the rank, as it is.
        return tensor.double()
    if not tensor.is_floating_point():
        raise ModelLoadError(f"{path}: tensor {shown(key.key)}: expected floating-point numbers, got {tensor.dtype}")
    # 8-bit floats have no minimum in torch; float64 is computed with in float32.
    try:
        values = tensor.float() if tensor.dtype.itemsize in (1, 8) else tensor
    except NotImplementedError as error:
        raise ModelLoadError(
            f"{path}: tensor {shown(key.key)}: {tensor.dtype} cannot be read; save the file in bfloat16"
        ) from error
    wrong = unusable_numbers(values)
    if wrong is not None:
        raise ModelLoadError(f"{path}: tensor {shown_name(key.key)} {wrong}. {DAMAGED}")
    return tensor


def _kinds(roles: set[Role]) -> tuple[str, ...]:
    kinds = {
        "low rank": Role.UP in roles,
        "LoKr": bool(roles & LOKR),
        "LoHa": bool(roles & LOHA),
        "DoRA": Role.MAGNITUDE in roles,
        "whole differences": Role.DIFF in roles,
        "biases": bool(roles & {Role.DIFF_BIAS, Role.UP_BIAS, Role.SET_BIAS}),
        "replaced weights": Role.SET in roles,
    }
    return tuple(kind for kind, holds in kinds.items() if holds)


@dataclass(frozen=True)
class _Reader:
    """The tensors of one module, put together."""

    path: Path
    name: str
    settings: AdapterSettings
    tensors: Mapping[Role, torch.Tensor]

    def change(self, flattened: bool, component: str, keys: Mapping[Role, LoraKey]) -> ModuleChange:
        weight: list[Adapter] = []
        bias: list[Difference | Replacement] = []
        rank = None
        if {Role.DOWN, Role.UP} & self.tensors.keys():
            low_rank = self._low_rank()
            rank = low_rank.down.shape[0]
            weight.append(low_rank)
            if Role.UP_BIAS in self.tensors:
                bias.append(Difference(_column(self.tensors[Role.UP_BIAS]), low_rank.factor))
        if LOKR & self.tensors.keys():
            weight.append(self._kronecker())
        if LOHA & self.tensors.keys():
            weight.append(self._hadamard())
        if Role.MAGNITUDE in self.tensors:
            if len(weight) != 1:
                raise self._error("a DoRA magnitude without lora_A and lora_B, or without LoKr or LoHa factors")
            weight = [Decomposed(weight[0], self._magnitude(weight[0]))]
        if Role.DIFF in self.tensors:
            weight.append(Difference(self._matrix(Role.DIFF)))
        if Role.DIFF_BIAS in self.tensors:
            bias.append(Difference(_column(self.tensors[Role.DIFF_BIAS])))
        for role, changes in ((Role.SET, weight), (Role.SET_BIAS, bias)):
            if role not in self.tensors:
                continue
            if changes:
                others = ", ".join(each.value for each in self.tensors if each is not role)
                raise self._error(f"{role.value}, which replaces what is there, beside {others}; leave one out")
            values = self._matrix(role) if role is Role.SET else _column(self.tensors[role])
            changes.append(Replacement(values))
        if not weight and not bias:
            raise self._error(f"only {', '.join(role.value for role in self.tensors)}, which changes nothing")
        of = tuple(parsed.key for parsed in keys.values())
        return ModuleChange(self.name, flattened, component, of, tuple(weight), tuple(bias), rank)

    def _low_rank(self) -> LowRank:
        if not {Role.DOWN, Role.UP} <= self.tensors.keys():
            raise self._error("only one of lora_A (lora_down) and lora_B (lora_up); the file is incomplete")
        down, up = self._matrix(Role.DOWN), self._matrix(Role.UP)
        rank = down.shape[0]
        if not rank or rank != up.shape[1]:
            raise self._error(
                f"a rank that does not fit: lora_A is {list(down.shape)} and lora_B {list(up.shape)}, expected "
                "[rank, in] and [out, rank]"
            )
        stated = self.settings.rank_of(self.name)
        if stated is not None and stated != rank:
            raise self._error(f"a rank that does not fit: its settings say {stated}, its tensors have {rank}")
        if Role.RANK in self.tensors and self.tensors[Role.RANK].tolist() not in (rank, [rank]):
            raise self._error(
                f"a rank that does not fit: {shown(self.tensors[Role.RANK].tolist())} beside tensors of {rank}"
            )
        return LowRank(down, up, self.settings.scale(self._alpha(rank), rank))

    def _kronecker(self) -> Kronecker:
        first = self._factor(Role.W1, Role.W1_A, Role.W1_B)
        second = self._factor(Role.W2, Role.W2_A, Role.W2_B, Role.W2_CORE)
        # LyCORIS scales only what is decomposed, and by the second factor's rank where both are.
        rank = second.rank or first.rank
        if self.settings.is_lycoris and Role.ALPHA not in self.tensors:
            rank = self.settings.rank_of(self.name) or rank
        return Kronecker(first, second, 1.0 if rank is None else self.settings.scale(self._alpha(rank), rank))

    def _hadamard(self) -> Hadamard:
        first = self._decomposed(Role.HADA_1_A, Role.HADA_1_B, Role.HADA_1_CORE)
        second = self._decomposed(Role.HADA_2_A, Role.HADA_2_B, Role.HADA_2_CORE)
        rank = first.rank
        if rank is None or second.rank != rank or (first.rows, first.columns) != (second.rows, second.columns):
            raise self._error(
                f"two LoHa factors that do not fit: {[first.rows, first.columns]} of rank {rank} and "
                f"{[second.rows, second.columns]} of rank {second.rank}"
            )
        return Hadamard(first, second, self.settings.scale(self._alpha(rank), rank))

    def _factor(self, whole: Role, left: Role, right: Role, core: Role | None = None) -> Factor:
        parts = {left, right} & self.tensors.keys()
        if whole not in self.tensors:
            if len(parts) < 2:
                raise self._error(
                    f"neither {whole.value} nor both of {left.value} and {right.value}; the file is incomplete"
                )
            return self._decomposed(left, right, core)
        if parts:
            raise self._error(
                f"{whole.value} beside {' and '.join(sorted(part.value for part in parts))}: leave one out"
            )
        return Factor(self._matrix(whole))

    def _decomposed(self, left: Role, right: Role, core: Role | None) -> Factor:
        """A factor by its halves, and by the core between them where the file has one."""
        missing = [role.value for role in (left, right) if role not in self.tensors]
        if missing:
            raise self._error(f"no {' and no '.join(missing)}; the file is incomplete")
        a, b = self._matrix(left), self._matrix(right)
        if core is None or core not in self.tensors:
            if a.shape[1] != b.shape[0]:
                raise self._error(
                    f"a rank that does not fit: {left.value} is {list(a.shape)}, {right.value} {list(b.shape)}"
                )
            return Factor(a, b)
        between = self.tensors[core]
        if between.dim() < 3 or not between.numel() or between.shape[:2] != (a.shape[0], b.shape[0]):
            raise self._error(
                f"a rank that does not fit: {core.value} is {list(between.shape)}, expected "
                f"{[a.shape[0], b.shape[0]]} before its kernel"
            )
        return TuckerFactor(a, b, core=between)

    def _magnitude(self, inner: Adapter) -> torch.Tensor:
        magnitude = self.tensors[Role.MAGNITUDE]
        if magnitude.numel() == inner.rows and (magnitude.dim() == 1 or magnitude.shape[0] == inner.rows):
            return _column(magnitude)
        if magnitude.numel() == inner.columns and magnitude.dim() > 1 and magnitude.shape[0] == 1:
            return magnitude.reshape(1, -1)
        raise self._error(
            f"expected a DoRA magnitude for {inner.rows} rows or {inner.columns} columns, got {list(magnitude.shape)}"
        )

    def _alpha(self, rank: int) -> float:
        if Role.ALPHA not in self.tensors:
            stated = self.settings.alpha_of(self.name)
            return rank if stated is None else stated
        if self.tensors[Role.ALPHA].numel() != 1:
            raise self._error(f"expected one number as alpha, got {list(self.tensors[Role.ALPHA].shape)}")
        alpha = float(self.tensors[Role.ALPHA])
        if not math.isfinite(alpha):
            raise self._error(f"alpha: expected a number, got {alpha}")
        return alpha

    def _matrix(self, role: Role) -> torch.Tensor:
        """[rows, columns]; the kernel of a convolution is columns."""
        tensor = self.tensors[role]
        has_vector = role in (Role.DIFF, Role.SET)
        if tensor.dim() == 0 or (tensor.dim() == 1 and not has_vector) or not tensor.numel():
            raise self._error(f"{role.value}: expected a matrix, got {list(tensor.shape)}")
        return tensor.reshape(tensor.shape[0], -1)

    def _error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {shown_name(self.name)} has {what}")


def _column(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, 1)
