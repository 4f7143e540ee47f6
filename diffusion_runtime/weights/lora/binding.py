"""bind: a LoRA file for one model: its changes at their rows of the tensors of a checkpoint, or the reason why not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.config import LoraConfig
from diffusion_runtime.errors import ModelLoadError, shown_name
from diffusion_runtime.weights.checkpoint import WeightChange
from diffusion_runtime.weights.lora.adapters import Adapter, Decomposed, Replacement
from diffusion_runtime.weights.lora.detection import families_of
from diffusion_runtime.weights.lora.few_step import FewStepHint
from diffusion_runtime.weights.lora.keys import SECOND, TEXT_ENCODER
from diffusion_runtime.weights.lora.names import LoraNames, Rows
from diffusion_runtime.weights.lora.reading import LoraFile, ModuleChange, read_lora_file
from diffusion_runtime.weights.lora.text_encoder_names import is_text_encoder, text_module
from diffusion_runtime.weights.weight_files import listed

Shapes = Mapping[str, tuple[int, ...]]
_NOISE_OF_NAME = re.compile(r"(high|low)[-_ ]?noise", re.IGNORECASE)


@dataclass(frozen=True)
class LoraTarget:
    """A model, as far as LoRA files are concerned. names: how files name its modules. shapes: by transformer, of the
    checkpoint's tensors. known: the names of all families. beside: as shapes, of the text encoders
    (text_encoder_names.py) and of what else takes part in them; asked where a file has keys that no transformer has."""

    names: LoraNames
    shapes: Mapping[str, Shapes]
    known: Callable[[], Sequence[LoraNames]]
    beside: Callable[[], Mapping[str, Shapes]] = dict


@dataclass(frozen=True)
class Placed:
    """Rows `source` of what an adapter adds, at rows `target` of a tensor."""

    adapter: Adapter
    source: slice
    target: slice


class Lora(WeightChange):
    """A file bound to a model; `bind` makes it. changes: by component, then by the checkpoint's tensor. strength: on
    all of them. num_keys, num_applied: of the file; num_replaced: weights that it replaces. remarks: what of it was not
    applied, and why; and num_replaced."""

    def __init__(
        self,
        file: LoraFile,
        strength: float,
        changes: Mapping[str, Mapping[str, tuple[Placed, ...]]],
        shapes: Mapping[str, Shapes],
        num_applied: int,
        remarks: tuple[str, ...],
    ) -> None:
        self.path = file.path
        self.few_step_hint: FewStepHint | None = file.few_step_hint
        self.strength = strength
        self.changes = changes
        self.num_keys = file.num_keys
        self.num_applied = num_applied
        self.num_replaced = file.num_replaced
        self.remarks = remarks
        self._shapes = shapes

    def check(self, component: str, shapes: Shapes) -> None:
        wrong = [name for name in self.changes.get(component, {}) if shapes.get(name) != self._shapes[component][name]]
        if wrong:
            raise ModelLoadError(
                f"{self.path}: {len(wrong)} tensors that this LoRA changes are missing in the {component}'s files, or "
                f"have another shape than its config.json says: {listed(wrong)}"
            )

    def changed(self, component: str) -> frozenset[str]:
        return frozenset(self.changes.get(component, {}))

    def delta(self, component: str, name: str, weight: torch.Tensor) -> torch.Tensor | None:
        placed = self.changes.get(component, {}).get(name)
        if placed is None:
            return None
        added = [each for each in placed if not isinstance(each.adapter, Replacement)]
        if not added:
            return None
        base = weight.reshape(weight.shape[0], -1)
        total = torch.zeros_like(base)
        for each in added:
            total[each.target] += each.adapter.delta(base[each.target], each.source)
        return total.mul_(self.strength).reshape(weight.shape)

    def replaced(self, component: str) -> Mapping[str, tuple[int, ...]]:
        rows: dict[str, int] = {}
        for name, placed in self.changes.get(component, {}).items():
            for each in placed:
                if isinstance(each.adapter, Replacement):
                    rows[name] = rows.get(name, 0) + each.target.stop - each.target.start
        shapes = self._shapes.get(component, {})
        return {name: shapes[name] for name, count in rows.items() if count == shapes[name][0]}

    def base(self, component: str, name: str, weight: torch.Tensor) -> torch.Tensor:
        for each in self.changes.get(component, {}).get(name, ()):
            if isinstance(each.adapter, Replacement):
                weight = weight.clone()
                weight.reshape(weight.shape[0], -1)[each.target] = each.adapter.values[each.source].float()
        return weight


def bind_files(configs: Sequence[LoraConfig], target: LoraTarget) -> tuple[Lora, ...]:
    """Read LoRA files and bind them to a model. Raises what reading and `bind` raise, and ModelLoadError for a tensor
    that two of the files replace."""
    loras = tuple(bind(read_lora_file(config.path), config, target) for config in configs)
    owners: dict[tuple[str, str], Lora] = {}
    for lora in loras:
        for component in lora.changes:
            for name in lora.replaced(component):
                other = owners.setdefault((component, name), lora)
                if other is not lora:
                    raise ModelLoadError(
                        f"{other.path} and {lora.path} both replace {name} of the {component}; leave one out"
                    )
    return loras


def bind(file: LoraFile, config: LoraConfig, target: LoraTarget) -> Lora:
    """Raises ModelLoadError for keys that match nothing (with the family that the file is for), for sizes that do not
    fit, and for a file that does not tell which of two transformers it is for."""
    return _Binding(file, config, target).lora()


class _Binding:
    def __init__(self, file: LoraFile, config: LoraConfig, target: LoraTarget) -> None:
        self.file, self.config, self.target = file, config, target
        self.changes: dict[str, dict[str, list[Placed]]] = {}
        self.owners: dict[tuple[str, str, int], str] = {}
        self.own_names: dict[tuple[str, bool], dict[str, str]] = {}
        # Of the transformers, and of the other components once they are asked for.
        self.shapes: dict[str, Shapes] = dict(target.shapes)
        self.unmatched_text: list[str] = []
        self.unmatched: list[str] = []
        self.misfits: list[str] = []
        # By the reason, keys that are for parts which this model does not have.
        self.absent: dict[str, set[str]] = {}

    def lora(self) -> Lora:
        self._refuse_unknown_keys()
        why = self.target.names.refusal([key for module in self.file.modules for key in module.keys])
        if why is not None:
            raise ModelLoadError(f"{self.file.path}: {why}")
        self._refuse_scaled_replacements()
        num_applied = 0
        for module in self.file.modules:
            components = self._components(module)
            placed = bool(components)
            for component in components:
                placed = self._place(component, module)
            num_applied += len(module.keys) if placed else 0
        if self.unmatched_text:
            raise self._not_of_these_encoders()
        if self.unmatched or (not num_applied and not self.misfits):
            raise self._not_of_this_model()
        if self.misfits:
            raise ModelLoadError(
                f"{self.file.path}: {len(self.misfits)} of its {len(self.file.modules)} modules have other sizes than "
                f"this model: {listed(self.misfits)}. Use a LoRA that was made for this {self.target.names.title} "
                "model and its size"
            )
        changes = {
            component: {name: tuple(placed) for name, placed in of.items()} for component, of in self.changes.items()
        }
        remarks = tuple(
            f"{self.file.path}: {len(keys)} of its {self.file.num_keys} keys were not applied: they are for {reason}, "
            "which this model does not have"
            for reason, keys in self.absent.items()
        )
        if self.file.num_replaced:
            remarks += (f"{self.file.path}: {self.file.num_replaced} of its tensors replace weights (.set_weight)",)
        return Lora(self.file, self.config.scale, changes, self.shapes, num_applied, remarks)

    def _refuse_unknown_keys(self) -> None:
        file = self.file
        if file.unknown or not file.modules:
            whole = "" if file.modules else "; the weights of a whole transformer are given by --transformer-path"
            raise ModelLoadError(
                f"{file.path}: expected keys of LoRA files, such as 'transformer.blocks.0.attn1.to_q.lora_A.weight' or "
                f"'lora_unet_blocks_0_self_attn_q.lora_down.weight'; {len(file.unknown)} of {file.num_keys} keys are "
                f"others: {listed(file.unknown) or 'there are none'}. docs/lora.md lists the formats{whole}"
            )

    def _refuse_scaled_replacements(self) -> None:
        replaced, scale = [module.keys[0] for module in self.file.modules if module.replaces], self.config.scale
        if replaced and scale != 1:
            raise ModelLoadError(
                f"{self.file.path}: lora.scale: expected 1, got {scale:g}: {len(replaced)} of its modules hold weights "
                f"that replace the model's ({listed(replaced)}), which a scale has no one meaning for: FastVideo "
                "multiplies them by it, ComfyUI takes them as they are. Leave the scale out"
            )

    def _components(self, module: ModuleChange) -> Sequence[str]:
        """The components that a change is for; none where it is for a text encoder that is not there."""
        there = tuple(self.target.shapes)
        wanted = self.config.component
        if module.component not in ("", SECOND):
            return self._text_encoder(module)
        beside = self._beside(module) if not module.component else None
        if beside is not None:
            return (beside,)
        if module.component == SECOND:
            chosen: tuple[str, ...] = (SECOND,)
        elif wanted == "both":
            chosen = ("transformer", "transformer_2")
        elif wanted != "auto":
            chosen = (wanted,)
        elif len(there) == 1 or any(each.component == SECOND for each in self.file.modules):
            chosen = ("transformer",)
        else:
            raise self._one_of_two()
        missing = [component for component in chosen if component not in there]
        if missing:
            raise ModelLoadError(
                f"{self.file.path}: this LoRA is for {' and '.join(missing)}, and the model has "
                f"{' and '.join(there)} alone: that would be left out. Use a LoRA that was made for this model, or "
                "leave the component out"
            )
        return chosen

    def _text_encoder(self, module: ModuleChange) -> Sequence[str]:
        """The one text encoder that has a module; what has none is kept for the message."""
        self.shapes |= self.target.beside()
        there = [name for name in self.shapes if name not in self.target.shapes]
        wanted = filter(is_text_encoder, there) if module.component == TEXT_ENCODER else [module.component]
        found = [component for component in wanted if component in there and self._rows(component, module)]
        if len(found) > 1:
            raise ModelLoadError(
                f"{self.file.path}: {shown_name(module.name)} may be for {' or '.join(found)}, and its key does not "
                f"say which; rename its keys to begin with {found[0]}. or {found[1]}."
            )
        if not found:
            self.unmatched_text += module.keys
        return found

    def _beside(self, module: ModuleChange) -> str | None:
        """Return the component besides the transformers that has a module which none of them has; None for others."""
        of_transformers = (self._rows(component, module) for component in self.target.shapes)
        if any(of_transformers) or self.target.names.find(module.name, flattened=module.flattened):
            return None
        self.shapes |= self.target.beside()
        others = [component for component in self.shapes if component not in self.target.shapes]
        found = [component for component in others if self._rows(component, module)]
        return found[0] if len(found) == 1 else None

    def _one_of_two(self) -> ModelLoadError:
        noise = _NOISE_OF_NAME.search(self.file.path.name)
        guess = ""
        if noise is not None:
            component = "transformer" if noise[1].lower() == "high" else "transformer_2"
            guess = f". Its name says {noise[0]!r}: {component}"
        return ModelLoadError(
            f"{self.file.path}: this model has two transformers, and the file does not say which it is for: give "
            "component transformer (high noise, the first steps), transformer_2 (low noise) or both, as in --lora "
            f"transformer_2=FILE{guess}"
        )

    def _place(self, component: str, module: ModuleChange) -> bool:
        """Place the changes of a module and return whether that was possible; what was wrong is kept for the
        message."""
        shapes = self.shapes[component]
        rows = self._rows(component, module)
        if any(_weight_name(each.module, shapes) is None for each in rows) or not rows:
            reasons = [self.target.names.reason_absent(each.module) for each in rows]
            if rows and reasons[0] is not None and None not in reasons:
                self.absent.setdefault(reasons[0], set()).update(module.keys)
            else:
                self.unmatched.append(shown_name(module.name))
            return False
        weights = [_weight_name(each.module, shapes) or "" for each in rows]
        other = self._other_inputs(module, rows, shapes[weights[0]])
        if other is not None:
            self.absent.setdefault(other, set()).update(module.keys)
            return False
        self._place_all(component, module, rows, weights, module.weight)
        if module.bias:
            biases = [f"{each.module}.bias" for each in rows]
            if not all(name in shapes for name in biases):
                raise ModelLoadError(
                    f"{self.file.path}: {shown_name(module.name)} has a bias, and the model's {', '.join(biases)} is "
                    "not there"
                )
            self._place_all(component, module, rows, biases, module.bias)
        return True

    def _other_inputs(self, module: ModuleChange, rows: Sequence[Rows], shape: tuple[int, ...]) -> str | None:
        """Return what a module is whose inputs alone differ in width from this model's, of that shape, where the family
        declares that its models differ there; None otherwise."""
        fits = all(adapter.rows == shape[0] and adapter.columns != _columns(shape) for adapter in module.weight)
        return self.target.names.reason_resized(rows[0].module) if module.weight and fits else None

    def _rows(self, component: str, module: ModuleChange) -> tuple[Rows, ...]:
        """The modules of the checkpoint that one of the file denotes."""
        name = module.name
        if is_text_encoder(component):
            name = text_module(name, flattened=module.flattened)
        names = self.target.names
        if component not in self.target.shapes:
            names = names.components.get(component, LoraNames(names.title))
        found = names.find(name, flattened=module.flattened)
        if found:
            return found
        if (component, module.flattened) not in self.own_names:
            owners = [name.removesuffix(".weight") for name in self.shapes[component]]
            self.own_names[component, module.flattened] = {
                owner.replace(".", "_") if module.flattened else owner: owner for owner in owners
            }
        # A module that no family lists, by the checkpoint's own name for it.
        owner = self.own_names[component, module.flattened].get(name)
        return () if owner is None else (Rows(owner),)

    def _place_all(
        self,
        component: str,
        module: ModuleChange,
        rows: Sequence[Rows],
        names: Sequence[str],
        adapters: Sequence[Adapter],
    ) -> None:
        if not adapters:
            return
        shapes = self.shapes[component]
        sizes = [shapes[name][0] // each.of for each, name in zip(rows, names, strict=True)]
        for adapter in adapters:
            columns = _columns(shapes[names[0]])
            if adapter.rows != sum(sizes) or adapter.columns != columns:
                parts = f" ({' + '.join(f'{name} {size}' for name, size in zip(names, sizes, strict=True))})"
                self.misfits.append(
                    f"{shown_name(module.name)} is {[sum(sizes), columns]}{parts if len(rows) > 1 else ''}, the LoRA's "
                    f"{[adapter.rows, adapter.columns]}"
                )
                return
            if isinstance(adapter, Decomposed) and not adapter.by_row and (len(rows) > 1 or rows[0].of > 1):
                raise ModelLoadError(
                    f"{self.file.path}: {shown_name(module.name)} has a DoRA magnitude per column over several "
                    "matrices; only one per row can be taken apart"
                )
        start = 0
        for each, name, size in zip(rows, names, sizes, strict=True):
            first = each.index * size
            owner = self.owners.setdefault((component, name, first), module.name)
            if owner != module.name:
                raise ModelLoadError(
                    f"{self.file.path}: {shown_name(owner)} and {shown_name(module.name)} are both for {name} of the "
                    f"{component}; leave one out"
                )
            placed = self.changes.setdefault(component, {}).setdefault(name, [])
            target = slice(first, first + size)
            placed += [Placed(adapter, slice(start, start + size), target) for adapter in adapters]
            start += size

    def _not_of_these_encoders(self) -> ModelLoadError:
        there = [name for name in self.shapes if name not in self.target.shapes]
        return ModelLoadError(
            f"{self.file.path}: {len(self.unmatched_text)} of its {self.file.num_keys} keys change a text encoder, and "
            f"none of this {self.target.names.title} model's ({' and '.join(there) or 'it has none'}) has such "
            f"modules: {listed(self.unmatched_text)}. Use a LoRA that was made for this model, or save the file "
            "without these keys"
        )

    def _not_of_this_model(self) -> ModelLoadError:
        file, title = self.file, self.target.names.title
        families = families_of(file.modules, self.target.known())
        others = [family for family in families if family != title]
        made_for = f"this LoRA is for {' or '.join(others)}, and the model is {title}"
        if not families:
            made_for = f"this LoRA is for another model than {title}, of no family that is known here"
        elif not others or title in families:
            made_for = f"this LoRA is for another {title} model"
        return ModelLoadError(
            f"{file.path}: {made_for}: {len(self.unmatched)} of its {len(file.modules)} modules are not in this "
            f"model's: {listed(self.unmatched) or 'all are for parts that it does not have'}. Use a LoRA that was made "
            f"for this {title} model"
        )


def _weight_name(module: str, shapes: Shapes) -> str | None:
    """The tensor that is a module's weight; a table of scales and shifts is a tensor itself."""
    return next((name for name in (f"{module}.weight", module) if name in shapes), None)


def _columns(shape: tuple[int, ...]) -> int:
    size = 1
    for number in shape[1:]:
        size *= number
    return size
