"""The keys of LoRA files: prefix, module, and what the tensor is; of every trainer, recognised by the key itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

# An untrusted key may have any length.
MAX_KEY_CHARACTERS = 300


class Role(Enum):
    """The role of a tensor of a file in its module."""

    DOWN = "down"  # A [rank, in]
    UP = "up"  # B [out, rank]
    UP_BIAS = "up bias"
    ALPHA = "alpha"
    RANK = "rank"  # one number, which the shape of A gives as well
    MAGNITUDE = "magnitude"  # of DoRA, [out]
    DIFF = "diff"  # added to the weight as it is
    DIFF_BIAS = "diff_b"  # added to the bias
    SET = "set_weight"  # the weight itself, in place of what is there
    SET_BIAS = "set_bias"
    W1 = "lokr_w1"
    W1_A = "lokr_w1_a"
    W1_B = "lokr_w1_b"
    W2 = "lokr_w2"
    W2_A = "lokr_w2_a"
    W2_B = "lokr_w2_b"
    W2_CORE = "lokr_t2"
    HADA_1_A = "hada_w1_a"
    HADA_1_B = "hada_w1_b"
    HADA_1_CORE = "hada_t1"
    HADA_2_A = "hada_w2_a"
    HADA_2_B = "hada_w2_b"
    HADA_2_CORE = "hada_t2"


LOKR = frozenset({Role.W1, Role.W1_A, Role.W1_B, Role.W2, Role.W2_A, Role.W2_B, Role.W2_CORE})
LOHA = frozenset({Role.HADA_1_A, Role.HADA_1_B, Role.HADA_1_CORE, Role.HADA_2_A, Role.HADA_2_B, Role.HADA_2_CORE})


class Names(Enum):
    """The naming scheme that a key follows."""

    DIFFUSERS = "diffusers / PEFT"
    ORIGINAL = "original names (ComfyUI)"
    KOHYA = "kohya / musubi-tuner"
    LYCORIS = "LyCORIS"
    PLAIN = "names without a prefix"


# A key ends in one of these. `.default` and the like is the name that PEFT gave the adapter, which has no dot in it.
_ADAPTER = r"(?:\.[A-Za-z][^.]*)?"
_SUFFIXES = tuple(
    (re.compile(rf"{pattern}$"), role)
    for pattern, role in (
        (rf"\.lora_(?:A|down){_ADAPTER}\.weight", Role.DOWN),
        (rf"\.lora_(?:B|up){_ADAPTER}\.weight", Role.UP),
        (rf"\.lora_(?:B|up){_ADAPTER}\.bias", Role.UP_BIAS),
        (r"\.lora\.down\.weight", Role.DOWN),
        (r"\.lora\.up\.weight", Role.UP),
        (r"\.lora_(?:linear_layer|embedding)\.down\.weight", Role.DOWN),
        (r"\.lora_(?:linear_layer|embedding)\.up\.weight", Role.UP),
        # XLabs: `processor.qkv_lora1.down.weight`, where `qkv_lora1` names the module.
        (r"(?<=_lora)\.down\.weight|(?<=_lora[12])\.down\.weight", Role.DOWN),
        (r"(?<=_lora)\.up\.weight|(?<=_lora[12])\.up\.weight", Role.UP),
        (r"\.(?:lora_)?alpha", Role.ALPHA),
        (r"\.(?:lora_)?rank", Role.RANK),
        (rf"\.(?:dora_scale|lora_magnitude_vector{_ADAPTER}(?:\.weight)?)", Role.MAGNITUDE),
        (r"\.diff", Role.DIFF),
        (r"\.diff_b", Role.DIFF_BIAS),
        (r"\.set_weight", Role.SET),
        (r"\.set_bias", Role.SET_BIAS),
        *((rf"\.{role.value}{_ADAPTER}", role) for role in Role if role in LOKR | LOHA),
    )
)
# Methods whose files change weights otherwise than by adding to them, or that no adapter here computes.
_OTHER_METHODS = tuple(
    (re.compile(pattern), method)
    for pattern, method in (
        (r"\.boft_(?:R|s|blocks)\b", "BOFT"),
        (r"\.oft_(?:R|r|diag|blocks)\b", "OFT"),
        (r"\.(?:ia3_l|on_input)\b", "IA3"),
        (r"\.vera_lambda_[bd]\b", "VeRA"),
        (r"\.(?:a1|a2|b1|b2|bm1|bm2)\.weight$", "GLoRA"),
    )
)
_DIFF_MODULATION = ".diff_m"
# What torch.compile puts into the names of a module, or of each of its blocks, dotted and flattened.
_COMPILED = re.compile(r"(?<![^._])_orig_mod[._]")
# What PEFT and data-parallel training hold a model by.
_WRAPPERS = ("base_model.model.", "module.")
# `unet.`, `dit.`, `model.`, `pipe.`: what trainers call the transformer that they hold.
_ORIGINAL_LEVELS = ("diffusion_model.", "unet.", "dit.", "model.", "pipe.", "pipeline.")
_FLATTENED_PREFIXES = {
    "lora_unet__": Names.KOHYA,
    "lora_unet_": Names.KOHYA,
    "lora_transformer_2_": Names.KOHYA,
    "lora_transformer_": Names.KOHYA,
    "lycoris_": Names.LYCORIS,
}
# Components of diffusers'; what other trainers and ComfyUI put in front of the modules of a text encoder, in dotted and
# in flattened names. Their numbers are no component's: T5 of FLUX.1 is kohya's third.
_TEXT_COMPONENT = re.compile(r"(text_encoder(?:_\d)?|connectors)\.")
_DOTTED_TEXT = re.compile(r"text_encoders\.\w+\.|cond_stage_model\.|conditioner\.(?:embedders\.\d\.)?")
_FLATTENED_TEXT = re.compile(r"(lora|lycoris)_te\d?_")
# A text encoder, where a key does not tell which of a model's.
TEXT_ENCODER = "a text encoder"
# Which of two transformers a key is for, where it tells.
SECOND = "transformer_2"
# Levels around a transformer's modules -> whose names they show.
_LEVELS = {
    **dict.fromkeys(_ORIGINAL_LEVELS, Names.ORIGINAL),
    **dict.fromkeys((*_WRAPPERS, "transformer.", f"{SECOND}."), Names.DIFFUSERS),
}


@dataclass(frozen=True)
class LoraKey:
    """One key, read. component: that it says it is for: `transformer_2`, `text_encoder_2` and the like, TEXT_ENCODER
    for any of these, empty for a transformer or where it names none. module: the name without prefix and suffix;
    flattened: its dots are underscores."""

    key: str
    module: str
    role: Role
    names: Names
    component: str = ""

    @property
    def flattened(self) -> bool:
        return self.names in (Names.KOHYA, Names.LYCORIS)


def parse_key(key: str) -> LoraKey | None:
    """None for a key that no format known here has."""
    if len(key) > MAX_KEY_CHARACTERS:
        return None
    names, component, rest = split_prefix(key)
    if rest.endswith(_DIFF_MODULATION):
        # LightX2V: what is added to the table of scales and shifts next to the layers of a block.
        return LoraKey(key, f"{rest.removesuffix(_DIFF_MODULATION)}.modulation", Role.DIFF, names, component)
    for pattern, role in _SUFFIXES:
        found = pattern.search(rest)
        if found is not None:
            module = rest[: found.start()]
            if names in _FLATTENED_PREFIXES.values():
                # Some write the dots inside a block: `lora_unet_blocks_22.self_attn.k`.
                module = module.replace(".", "_")
            return LoraKey(key, module, role, names, component) if module else None
    return None


def other_method(key: str) -> str | None:
    """The method of a key that no adapter here computes, such as OFT; None for any other key."""
    return next((method for pattern, method in _OTHER_METHODS if pattern.search(key[:MAX_KEY_CHARACTERS])), None)


def split_prefix(key: str) -> tuple[Names, str, str]:
    """(whose names, LoraKey.component, the rest). Levels that trainers and libraries put around a model are taken off,
    in whatever order they are there."""
    rest, names, component = _COMPILED.sub("", key), Names.PLAIN, ""
    while True:
        if found := _TEXT_COMPONENT.match(rest):
            return Names.DIFFUSERS, found[1], _without_wrappers(rest[found.end() :])
        if found := _DOTTED_TEXT.match(rest):
            return Names.ORIGINAL, TEXT_ENCODER, _without_wrappers(rest[found.end() :])
        if found := _FLATTENED_TEXT.match(rest):
            return Names.LYCORIS if found[1] == "lycoris" else Names.KOHYA, TEXT_ENCODER, rest[found.end() :]
        for prefix, flattened in _FLATTENED_PREFIXES.items():
            if rest.startswith(prefix):
                component = SECOND if prefix == f"lora_{SECOND}_" else component
                return flattened, component, rest.removeprefix(prefix)
        level = next((each for each in _LEVELS if rest.startswith(each)), None)
        if level is None:
            return names, component, rest
        rest = rest.removeprefix(level)
        component = SECOND if level == f"{SECOND}." else component
        names = Names.ORIGINAL if names is Names.ORIGINAL else _LEVELS[level]


def _without_wrappers(rest: str) -> str:
    while (level := next((each for each in _WRAPPERS if rest.startswith(each)), None)) is not None:
        rest = rest.removeprefix(level)
    return rest
