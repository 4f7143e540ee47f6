"""Attention config: the choices of a user by role, step and layer, and the one parser of every form."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self

from diffusion_runtime.attention.backends.registry import canonical_name, find_backend
from diffusion_runtime.attention.roles import CATEGORIES, TEXT_ENCODER, is_role, known_roles, role_category
from diffusion_runtime.attention.schedule import IndexRanges, Window, parse_chunks, parse_phase
from diffusion_runtime.core.options import (
    FrozenMapping,
    check_options,
    option_names,
    parse_pairs,
    removed_option,
    unknown_option,
)
from diffusion_runtime.errors import ConfigError, nearest, shown
from diffusion_runtime.untrusted.document import DocumentError, check_depth
from diffusion_runtime.untrusted.files import shown_path
from diffusion_runtime.untrusted.json_text import parse_json, read_json_file
from diffusion_runtime.untrusted.yaml_text import read_yaml_file

AUTO = "auto"
_SPEC_KEYS = ("backend", "name", "extra", "options")
_RULE_KEYS = ("role", "steps", "layers", "phase", "chunks", *_SPEC_KEYS)
_CONFIG_KEYS = ("default", "per_role", "schedule")
_FILE_ENDINGS = (".json", ".yaml", ".yml")
# More than the layers of a model times the steps of a schedule by hand; parsing takes 60 us per rule, and every layer
# looks through all of them.
MAX_RULES = 1000


@dataclass(frozen=True, init=False)
class AttentionSpec:
    """A backend and its options. `backend` and `extra`, vLLM-Omni's names, are taken for `name` and `options`.

    name: a backend, several in order of preference (`fa,torch_sdpa`), or `auto` for no choice. Any spelling that the
        registry knows; kept in its canonical form.
    options: explicitly set options, each checked against what the named backends declare. With `auto` they configure
        the backend that a lower level chooses and are checked there. Their combination is checked where the set
        is complete, when a layer makes its choice: another level may complete it.

    Raises ConfigError for an unknown name, an unknown option, a wrong type, or one value under two names.
    """

    name: str = AUTO
    options: Mapping[str, Any] = field(default_factory=dict)

    def __init__(
        self,
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        backend: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        for ours, theirs, both in (
            ("name", "backend", (name, backend)),
            ("options", "extra", (options, extra)),
        ):
            if None not in both:
                raise ConfigError(f"AttentionSpec: {ours} and {theirs} are two names of the same value; give one")
        object.__setattr__(self, "name", next((given for given in (name, backend) if given is not None), AUTO))
        object.__setattr__(self, "options", next((given for given in (options, extra) if given is not None), {}))
        self._check()

    @property
    def backend(self) -> str:
        """`name`, as vLLM-Omni calls it."""
        return self.name

    @property
    def extra(self) -> Mapping[str, Any]:
        """`options`, as vLLM-Omni calls them."""
        return self.options

    def _check(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ConfigError(f"attention backend: expected a name, got {shown(self.name)}")
        candidates = [part for part in self.name.split(",") if part.strip()]
        if not candidates:
            raise ConfigError(f"attention backend: expected a name, got {shown(self.name)}")
        if any(part.strip().lower() == AUTO for part in candidates):
            if len(candidates) > 1:
                raise ConfigError(f"attention backend: auto stands alone, got {shown(self.name)}")
            names = [AUTO]
        else:
            names = [canonical_name(part) for part in candidates]
        object.__setattr__(self, "name", ",".join(dict.fromkeys(names)))
        object.__setattr__(self, "options", FrozenMapping(self._checked_options()))

    @property
    def candidates(self) -> tuple[str, ...]:
        """Canonical backend names in order of preference; none for `auto`."""
        return () if self.name == AUTO else tuple(self.name.split(","))

    def options_for(self, backend_name: str) -> dict[str, Any]:
        """The options that the backend of this name declares, out of those that were set."""
        backend = find_backend(backend_name)
        if backend is None:
            return dict(self.options)
        known = option_names(backend.options_type)
        return {key: value for key, value in self.options.items() if key in known}

    def _checked_options(self) -> dict[str, Any]:
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"options of {self.name}: expected a mapping, got {shown(self.options)}")
        present = [backend for backend in map(find_backend, self.candidates) if backend is not None]
        checked, left = dict(self.options), dict(self.options)
        for backend in present:
            known = option_names(backend.options_type)
            mine = {key: left.pop(key) for key in self.options if key in left and key in known}
            checked.update(check_options(backend.options_type, mine, f"options of {backend.name}"))
        # What is left may belong to a backend that this version does not have.
        if left and present and len(present) == len(self.candidates):
            known = tuple(key for backend in present for key in option_names(backend.options_type))
            where, key = f"options of {self.name}", next(iter(left))
            types = [backend.options_type for backend in present]
            raise removed_option(where, key, types) or unknown_option(where, key, known)
        return checked

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Once: every call of `attention` looks its decision up by this value.
        return hash((self.name, json.dumps(dict(self.options), sort_keys=True, default=str)))

    def __getstate__(self) -> dict[str, Any]:
        # Without the cached hash: hashes of text differ from process to process.
        return {"name": self.name, "options": self.options}

    @classmethod
    def parse(cls, value: Any, where: str = "attention backend") -> Self:
        """A spec from a name, a mapping with `backend` and `extra`, or a spec. Raises ConfigError naming `where`."""
        if isinstance(value, cls):
            return value
        if value is None:
            return cls()
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a backend name or a mapping, got {shown(value)}")
        _check_keys(value, _SPEC_KEYS, where)
        for one, other in (("backend", "name"), ("extra", "options")):
            if one in value and other in value:
                raise ConfigError(f"{where}: {one} and {other} are two names of the same key; give one")
        return cls(value.get("backend", value.get("name", AUTO)), value.get("extra", value.get("options")) or {})

    def to_dict(self) -> dict[str, Any]:
        return {"backend": self.name, **({"extra": dict(self.options)} if self.options else {})}


@dataclass(frozen=True)
class ScheduleRule:
    """A spec for some steps, layers, phases and chunks. role: a role or category, None for every role the backend
    serves."""

    spec: AttentionSpec
    window: Window = field(default_factory=Window)
    role: str | None = None

    @classmethod
    def parse(cls, value: Any, where: str) -> Self:
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a mapping with steps, layers and backend, got {shown(value)}")
        _check_keys(value, _RULE_KEYS, where)
        role = value.get("role")
        if role is not None:
            _check_role(role, f"{where}.role")
        spec = AttentionSpec.parse({key: value[key] for key in value if key in _SPEC_KEYS}, where)
        window = Window(
            IndexRanges.parse(value.get("steps"), f"{where}.steps"),
            IndexRanges.parse(value.get("layers"), f"{where}.layers"),
            parse_phase(value.get("phase"), f"{where}.phase"),
            parse_chunks(value.get("chunks"), f"{where}.chunks"),
        )
        if window.phase == "commit" and not window.steps.is_every:
            raise ConfigError(
                f"{where}.steps: a commit comes after the steps of its chunk and is none of them; leave out steps, or "
                "phase"
            )
        return cls(spec, window, role)

    def applies_to(self, role: str) -> bool:
        return self.role in (None, role, role_category(role))

    def to_dict(self) -> dict[str, Any]:
        ranges = {name: str(getattr(self.window, name)) for name in ("steps", "layers", "chunks")}
        chosen = {name: text for name, text in ranges.items() if text != "all"}
        if self.window.phase is not None:
            chosen["phase"] = self.window.phase
        return {**({"role": self.role} if self.role else {}), **chosen, **self.spec.to_dict()}


class StatedChoice(NamedTuple):
    """One entry of an AttentionConfig that may decide for a role. by_name: it is made for the role, or for the role's
    category, by name; key: where it was given, for people."""

    spec: AttentionSpec
    by_name: bool
    key: str


@dataclass(frozen=True)
class AttentionConfig:
    """One level's choices. Values may be given as specs, names or mappings.

    default: for every role its backend serves; per_role: by role or role category, or for the text encoders
    (`text_encoder`); schedule: rules that come before both, the first that holds wins.

    Raises ConfigError for unknown roles, keys, names and options.
    """

    default: AttentionSpec | None = None
    per_role: Mapping[str, AttentionSpec] = field(default_factory=dict)
    schedule: tuple[ScheduleRule, ...] = ()

    def __post_init__(self) -> None:
        if self.default is not None:
            object.__setattr__(self, "default", AttentionSpec.parse(self.default, "default"))
        if not isinstance(self.per_role, Mapping):
            raise ConfigError(f"per_role: expected a mapping of roles, got {shown(self.per_role)}")
        specs = {}
        for role, value in self.per_role.items():
            where = f"per_role.{role[:80] if isinstance(role, str) else shown(role)}"
            if role != TEXT_ENCODER:
                _check_role(role, where)
            specs[role] = AttentionSpec.parse(value, where)
        object.__setattr__(self, "per_role", FrozenMapping(specs))
        if isinstance(self.schedule, str | Mapping) or not hasattr(self.schedule, "__iter__"):
            raise ConfigError(f"schedule: expected a list of rules, got {shown(self.schedule)}")
        # Before any is parsed; an iterator is taken no further than it may be long.
        given = tuple(itertools.islice(self.schedule, MAX_RULES + 1))
        if len(given) > MAX_RULES:
            count = f"{len(self.schedule)}" if isinstance(self.schedule, Sized) else "more"
            raise ConfigError(
                f"schedule: expected at most {MAX_RULES} rules, got {count}; one rule takes several ranges: steps: "
                "0-3,8-11"
            )
        rules = [ScheduleRule.parse(rule, f"schedule[{index}]") for index, rule in enumerate(given)]
        object.__setattr__(self, "schedule", tuple(rules))

    def __hash__(self) -> int:
        return hash((self.default, tuple(sorted(self.per_role.items(), key=str)), self.schedule))

    def choices(self, role: str, rules: tuple[int, ...] = ()) -> list[StatedChoice]:
        """The entries of this level that apply to `role`, most specific first.

        rules: indexes of the schedule rules that hold now. The first entry that names a backend which serves the role
        wins; one that holds options alone configures what a later one chooses.
        """
        choices: list[StatedChoice] = []
        for index in rules:
            rule = self.schedule[index]
            if rule.applies_to(role):
                choices.append(StatedChoice(rule.spec, rule.role is not None, f"schedule[{index}] ({rule.window})"))
        for key in dict.fromkeys((role, role_category(role))):
            if key in self.per_role:
                choices.append(StatedChoice(self.per_role[key], True, f"per_role.{key}"))
        return choices if self.default is None else [*choices, StatedChoice(self.default, False, "default")]

    def check_roles(self, roles: Sequence[str], model: str) -> None:
        """Raises ConfigError for a choice by a role that is neither a category nor one of `roles`, those that the
        `model` has: it would choose nothing."""
        named = [(f"per_role.{role}", role) for role in self.per_role]
        named += [(f"schedule[{index}].role", rule.role) for index, rule in enumerate(self.schedule) if rule.role]
        known = dict.fromkeys((*roles, *CATEGORIES))
        for key, role in named:
            if role not in known:
                raise ConfigError(
                    f"{key}: {model} models have no attention role {shown(role)}; theirs, and the categories: "
                    f"{', '.join(known)}"
                )

    def check_phases(self, model: str, *, has_prefix: bool = False) -> None:
        """Raises ConfigError for a rule by phase or chunk, for a `model` that makes its videos and images at once.
        has_prefix: whether it computes keys and values of a prefix once, which is a phase."""
        for index, rule in enumerate(self.schedule):
            if has_prefix and not rule.window.chunks.is_every:
                raise ConfigError(
                    f"schedule[{index}] ({rule.window}): {model} makes an image at once and not chunk by chunk; leave "
                    "out chunks"
                )
            if not has_prefix and (rule.window.phase is not None or not rule.window.chunks.is_every):
                raise ConfigError(
                    f"schedule[{index}] ({rule.window}): {model} has no key-value cache, and so neither phases nor "
                    "chunks: every pass denoises; leave out phase, chunks, --prefill-attention-backend and "
                    "--decode-attention-backend, and use --attention-backend"
                )

    @classmethod
    def parse(cls, value: Any) -> Self:
        """An AttentionConfig from any form a user can write it in.

        None (no choice); a config; a spec; a mapping with default, per_role and schedule, nested or with dotted keys
        (`per_role.cross.backend`), or with `backend` and `extra`; names (`fa,torch_sdpa`); a JSON text; the path of a
        JSON or YAML file; `key=value,...` with dotted keys, or with option keys alone, which then configure whatever
        backend a lower level chooses. Raises ConfigError, also for a value that one mapping gives twice, nested and
        with a dotted key.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, AttentionSpec):
            return cls(default=value)
        if isinstance(value, str):
            value = parse_text(value, "attention config")
            if isinstance(value, str):
                return cls(default=AttentionSpec(value))
        if not isinstance(value, Mapping):
            raise ConfigError(f"attention config: expected a mapping or a backend name, got {shown(value)}")
        try:
            check_depth(value)
        except DocumentError as error:
            raise ConfigError(f"attention config: {error}") from error
        _refuse_duplicates(value)
        # Shorter paths first: a spec that is a name, then the options next to it.
        return cls._of_mapping(dict(sorted(value.items(), key=lambda item: len(_split_path(item[0])))))

    def with_values(self, dotted: Mapping[str, Any]) -> Self:
        """This config with values at dotted paths (`per_role.cross.backend`) on top, each over those before it.

        Raises ConfigError.
        """
        return self._of_mapping({**self.to_dict(), **dotted}) if dotted else self

    @classmethod
    def _of_mapping(cls, value: Mapping[str, Any]) -> Self:
        nested = _expand_dotted(value)
        if nested and not set(nested) & set(_CONFIG_KEYS):
            if set(nested) & set(_SPEC_KEYS):
                return cls(default=AttentionSpec.parse(nested, "attention config"))
            _check_not_misspelt(nested)
            return cls(default=AttentionSpec(AUTO, nested))
        _check_keys(nested, _CONFIG_KEYS, "attention config")
        return cls(nested.get("default"), nested.get("per_role") or {}, nested.get("schedule") or ())

    def of_layers(self) -> Self:
        """The same without what is chosen for text encoders."""
        per_role = {role: spec for role, spec in self.per_role.items() if role != TEXT_ENCODER}
        return dataclasses.replace(self, per_role=per_role)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `parse` reads back."""
        plain: dict[str, Any] = {}
        if self.default is not None:
            plain["default"] = self.default.to_dict()
        if self.per_role:
            plain["per_role"] = {role: spec.to_dict() for role, spec in self.per_role.items()}
        if self.schedule:
            plain["schedule"] = [rule.to_dict() for rule in self.schedule]
        return plain


def parse_text(text: str, where: str) -> Any:
    """A JSON text, the path of a JSON or YAML file, or `key=value,...` as a mapping; other text unchanged.

    Raises ConfigError for a file that is missing or unreadable, and for JSON or YAML that does not parse.
    """
    stripped = text.strip()
    if stripped.startswith("{"):
        try:
            return parse_json(stripped)
        except DocumentError as error:
            raise ConfigError(f"{where}: not valid JSON: {error}") from error
    if stripped.lower().endswith(_FILE_ENDINGS) and "=" not in stripped:
        return _read_mapping(stripped, where)
    if "=" not in stripped and "/" in stripped:
        raise ConfigError(
            f"{where}: {shown_path(stripped)} looks like a path, and no file ends so: expected a backend's name, or a "
            f"file that ends in {', '.join(_FILE_ENDINGS)}"
        )
    return parse_pairs(stripped) if "=" in stripped else text


def _read_mapping(path: str, where: str) -> Mapping[str, Any]:
    content = read_json_file(path, where) if path.lower().endswith(".json") else read_yaml_file(path, where)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where}: {shown_path(path)} holds {type(content).__name__}, expected a mapping")
    return content


def _refuse_duplicates(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a value that a mapping gives twice: `default.backend` next to `default: {backend:
    ...}`."""
    given: set[tuple[str, ...]] = set()
    for key, value in values.items():
        if not isinstance(key, str):
            raise ConfigError(f"attention config: expected text keys, got {shown(key)}")
        for path in _leaf_paths(tuple(_split_path(key)), value):
            if path in given:
                raise ConfigError(
                    f"attention config: {'.'.join(path)[:80]} is given twice in one mapping; give it once"
                )
            given.add(path)


def _leaf_paths(path: tuple[str, ...], value: Any) -> Iterator[tuple[str, ...]]:
    """The path of every value below `path`; a spec that is a name stands for its `backend`."""
    is_spec = path == ("default",) or (len(path) == 2 and path[0] == "per_role")
    if isinstance(value, Mapping) and path[0] in ("default", "per_role"):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"attention config: {'.'.join(path)[:80]}: expected text keys, got {shown(key)}")
            yield from _leaf_paths((*path, key), inner)
    else:
        yield (*path, "backend") if is_spec and isinstance(value, str) else path


def _expand_dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """`per_role.ROLE.extra.KEY` and the like as nested mappings; a role may itself contain dots. Later values win."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        path = _split_path(key)
        target = nested
        for part in path[:-1]:
            inner = target.setdefault(part, {})
            if isinstance(inner, str):
                inner = target[part] = {"backend": inner}
            if not isinstance(inner, Mapping):
                raise ConfigError(f"attention config: {part[:80]}: expected a mapping, got {shown(inner)}")
            if not isinstance(inner, dict):
                inner = target[part] = dict(inner)
            target = inner
        if isinstance(value, Mapping) and isinstance(target.get(path[-1]), dict):
            _merge(target[path[-1]], value)
        else:
            target[path[-1]] = dict(value) if isinstance(value, Mapping) else value
    return nested


def _merge(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    """`values` over those of `target`, mappings within them alike."""
    for key, value in values.items():
        inner = target.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            target[key] = dict(inner)
            _merge(target[key], value)
        else:
            target[key] = value


def _split_path(key: str) -> list[str]:
    head, _, rest = key.partition(".")
    if head not in ("default", "per_role") or not rest:
        return [key]
    for word in ("extra", "options"):
        left, found, option = f"{head}.{rest}".partition(f".{word}.")
        if found:
            return [*_split_path(left), word, option] if left != head else [head, word, option]
    leaf = rest.rpartition(".")[2]
    if head == "default":
        return [head, rest]
    if leaf in _SPEC_KEYS and "." in rest:
        return [head, rest.rpartition(".")[0], leaf]
    return [head, rest]


def _check_keys(values: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {shown(key)}.{nearest(key, known)}")


def _check_not_misspelt(options: Mapping[str, Any]) -> None:
    """A mapping without any of our keys holds options; one that looks like a misspelt key is taken for that."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            raise ConfigError(
                f"attention config: unknown key {shown(key)}.{nearest(key, (*_CONFIG_KEYS, *_SPEC_KEYS))}"
            )


def _check_role(role: Any, where: str) -> None:
    if role == TEXT_ENCODER:
        raise ConfigError(f"{where}: text encoders have no steps and layers to choose by; use per_role.{TEXT_ENCODER}")
    if not is_role(role):
        known = (*known_roles(), TEXT_ENCODER)
        raise ConfigError(f"{where}: unknown attention role {shown(role)}.{nearest(role, known)}")
