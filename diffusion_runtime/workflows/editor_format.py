"""Reader of the format that ComfyUI's editor saves: `nodes`, `links`, `definitions.subgraphs`.

The graph that runs is what ComfyUI's frontend sends to its server: nodes of subgraphs under ids such as `105:10`,
nothing of muted nodes, links around bypassed ones, through reroutes, and through nodes that set and get a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from diffusion_runtime.errors import shown
from diffusion_runtime.workflows.graph import MAX_NODES, Graph, Link, Node, WorkflowError
from diffusion_runtime.workflows.node_widgets import EDITOR_KINDS, widget_names

_MAX_DEPTH = 16
_ALWAYS, _NEVER, _BYPASS = 0, 2, 4
# The nodes of a subgraph that stand for its inputs and its outputs.
_INPUT_NODE, _OUTPUT_NODE = "-10", "-20"
# A subgraph's input that is neither linked nor set: the node inside has the value.
_UNSET = object()
_SETTERS, _GETTERS = ("SetNode",), ("GetNode",)


def read_editor_format(document: Mapping[str, Any]) -> Graph:
    """Return the graph that runs. Raises WorkflowError for a document of another form, subgraphs within themselves,
    cycles of links through nodes that compute nothing, and more than MAX_NODES nodes."""
    definitions = document.get("definitions") or {}
    subgraphs = _listed(definitions.get("subgraphs") if isinstance(definitions, Mapping) else None, "subgraphs")
    known = {_text(each.get("id")): each for each in subgraphs}
    top = _Scope("", document, None)
    scopes, count = [top], len(top.nodes)
    # Breadth first: each instance of a subgraph adds a scope.
    for scope in scopes:
        for node in scope.nodes.values():
            if node.kind not in known or node.mode == _NEVER:
                continue
            if scope.depth >= _MAX_DEPTH or node.kind in scope.kinds:
                raise WorkflowError(
                    f"node {node.id}: a subgraph within itself, or more than {_MAX_DEPTH} levels of subgraphs"
                )
            inner = _Scope(f"{scope.prefix}{node.id}:", known[node.kind], (scope, node))
            count += len(inner.nodes)
            if count > MAX_NODES:
                raise WorkflowError(f"expected at most {MAX_NODES} nodes, those of subgraphs included")
            scope.inner[node.id] = inner
            scopes.append(inner)
    overrides = {key: value for scope in scopes for key, value in scope.promoted()}
    nodes = {}
    for scope in scopes:
        if scope.is_left_out():
            continue
        for node in scope.nodes.values():
            if node.mode not in (_ALWAYS, 1, 3) or node.id in scope.inner or node.kind in EDITOR_KINDS:
                continue
            own_id = f"{scope.prefix}{node.id}"
            nodes[own_id] = Node(own_id, node.kind, node.title, _inputs_of(scope, node, overrides.get(own_id, {})))
    return Graph(nodes)


def _inputs_of(scope: _Scope, node: _EditorNode, overrides: Mapping[str, Any]) -> dict[str, Any]:
    values = {**node.widgets(), **overrides}
    for entry in node.inputs:
        if entry.link is None:
            continue
        found = scope.source(entry.link)
        if found is _UNSET:
            continue
        if found is None and entry.is_widget:
            # Its source is muted: the node's own value counts, as in the editor.
            continue
        if found is None:
            values.pop(entry.name, None)
        else:
            values[entry.name] = found
    return values


@dataclass(frozen=True)
class _Entry:
    """An input of a node in the editor. is_widget: whether it has a value of its own where nothing is linked."""

    name: str
    kind: str
    link: str | None
    is_widget: bool


@dataclass(frozen=True)
class _EditorNode:
    id: str
    kind: str
    title: str
    mode: int
    inputs: tuple[_Entry, ...]
    output_kinds: tuple[str, ...]
    values: Any
    named: Mapping[str, Any]
    promoted: tuple[tuple[str, str], ...]

    def widgets(self) -> dict[str, Any]:
        """Return the values of the node's widgets by name."""
        if self.named:
            return dict(self.named)
        if isinstance(self.values, Mapping):
            return dict(self.values)
        values = list(self.values) if isinstance(self.values, list) else []
        names = widget_names(self.kind, [each.name for each in self.inputs if each.is_widget], values)
        return dict(zip(names, values, strict=False))


@dataclass(frozen=True)
class _EditorLink:
    origin: str
    slot: int


@dataclass
class _Scope:
    """The workflow itself, or one instance of a subgraph. parent: the scope and the node that it stands in."""

    prefix: str
    content: Mapping[str, Any]
    parent: tuple[_Scope, _EditorNode] | None
    nodes: dict[str, _EditorNode] = field(init=False)
    links: dict[str, _EditorLink] = field(init=False)
    inner: dict[str, _Scope] = field(init=False, default_factory=dict)
    outputs: list[str | None] = field(init=False)
    # What is behind a link that was followed.
    resolved: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes, self.links, ends = {}, {}, {}
        for raw in _listed(self.content.get("nodes"), "nodes"):
            node = _editor_node(raw)
            if node.id in self.nodes:
                raise WorkflowError(f"node {self.prefix}{node.id}: there are two of this id")
            self.nodes[node.id] = node
        if len(self.nodes) > MAX_NODES:
            raise WorkflowError(f"expected at most {MAX_NODES} nodes, got {len(self.nodes)}")
        for key, link, target, target_slot in _links(self.content.get("links")):
            self.links[key] = link
            if target == _OUTPUT_NODE:
                ends[target_slot] = key
        self.outputs = [ends.get(index) for index in range(max(ends, default=-1) + 1)]

    @property
    def depth(self) -> int:
        return self.prefix.count(":")

    @property
    def kinds(self) -> frozenset[str]:
        """The subgraphs that this scope is within."""
        return frozenset() if self.parent is None else self.parent[0].kinds | {self.parent[1].kind}

    def is_left_out(self) -> bool:
        """Return whether the instance that this scope is of, or one around it, is muted or bypassed."""
        scope: _Scope = self
        while scope.parent is not None:
            scope, node = scope.parent
            if node.mode in (_NEVER, _BYPASS):
                return True
        return False

    @cached_property
    def input_names(self) -> list[tuple[str, bool]]:
        """Name and whether it is a widget, of every input of the subgraph."""
        links = {entry.link for node in self.nodes.values() for entry in node.inputs if entry.is_widget}
        return [
            (_text(raw.get("name")), not links.isdisjoint(ends))
            for raw, ends in zip(_listed(self.content.get("inputs"), "inputs"), self._input_links, strict=True)
        ]

    @cached_property
    def _input_links(self) -> list[list[str]]:
        """The links from every input of the subgraph to nodes within, in their order."""
        found = (raw.get("linkIds") for raw in _listed(self.content.get("inputs"), "inputs"))
        return [[_text(each) for each in ends] if isinstance(ends, list) else [] for ends in found]

    @cached_property
    def instance_values(self) -> dict[str, Any]:
        """Return values of the subgraph's inputs that its instance sets, by name."""
        assert self.parent is not None
        _, node = self.parent
        if node.named or isinstance(node.values, Mapping):
            return dict(node.named or node.values)
        if node.promoted or not isinstance(node.values, list):
            return {}
        names = [name for name, is_widget in self.input_names if is_widget]
        return dict(zip(names, node.values, strict=False))

    def promoted(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the id of each node inside with the values that the instance shows and sets, where it holds them."""
        if self.parent is None:
            return
        _, node = self.parent
        if not node.promoted or not isinstance(node.values, list):
            return
        found: dict[str, dict[str, Any]] = {}
        for (inner, name), value in zip(node.promoted, node.values, strict=False):
            if inner in self.nodes:
                found.setdefault(f"{self.prefix}{inner}", {})[name] = value
        yield from found.items()

    def source(self, link: str) -> Any:
        """Return the Link or the value behind a link; None for nothing, _UNSET for a value that the node itself has.

        Raises WorkflowError for a cycle.
        """
        scope, seen = self, dict[tuple[str, str], _Scope]()
        while True:
            if link in scope.resolved:
                value = scope.resolved[link]
                break
            place = (scope.prefix, link)
            if place in seen:
                raise WorkflowError(f"link {link}: a cycle of links through nodes that compute nothing")
            seen[place] = scope
            found = scope.links.get(link)
            step = None if found is None else scope._step(found)
            if not isinstance(step, tuple) or isinstance(step, Link):
                value = step
                break
            scope, link = step
        # A long chain is walked once, however many nodes are behind it.
        for (_, passed), each in seen.items():
            each.resolved[passed] = value
        return value

    def _step(self, link: _EditorLink) -> Any:
        """Return a scope and a link in it to follow, or what ends the search."""
        if link.origin == _INPUT_NODE:
            return self._from_outside(link.slot)
        node = self.nodes.get(link.origin)
        if node is None or node.mode == _NEVER:
            return None
        if node.mode == _BYPASS:
            passed = _passed_through(node, link.slot)
            return None if passed is None else (self, passed)
        if node.id in self.inner:
            inner = self.inner[node.id]
            end = inner.outputs[link.slot] if link.slot < len(inner.outputs) else None
            return None if end is None else (inner, end)
        if node.kind == "Reroute":
            first = next((entry.link for entry in node.inputs), None)
            return None if first is None else (self, first)
        if node.kind == "PrimitiveNode":
            values = node.values if isinstance(node.values, list) else []
            return values[0] if values else _UNSET
        if node.kind in _GETTERS:
            return self._set_under(node)
        return Link(f"{self.prefix}{node.id}", link.slot)

    def _from_outside(self, slot: int) -> Any:
        if self.parent is None:
            return None
        outer, node = self.parent
        names = self.input_names
        if slot >= len(names):
            return None
        name, is_widget = names[slot]
        entry = next((each for each in node.inputs if each.name == name), None)
        if entry is not None and entry.link is not None:
            return (outer, entry.link)
        return self.instance_values.get(name, self._values_within[slot]) if is_widget else None

    @cached_property
    def _values_within(self) -> list[Any]:
        """The value that each input of the subgraph shows: that of the first widget within which it is linked to, and
        every other input that it is linked to has. _UNSET where there is none."""
        shown_here = dict(self.promoted())
        values: dict[str | None, Any] = {}
        for node in self.nodes.values():
            own = {**node.widgets(), **shown_here.get(f"{self.prefix}{node.id}", {})}
            values |= {entry.link: own[entry.name] for entry in node.inputs if entry.name in own}
        return [next((values[each] for each in ends if each in values), _UNSET) for ends in self._input_links]

    @cached_property
    def _setters(self) -> dict[Any, str | None]:
        """The link that each name stands for, of the first node that sets it."""
        found: dict[Any, str | None] = {}
        for node in self.nodes.values():
            if node.kind in _SETTERS and node.mode == _ALWAYS:
                found.setdefault(_first_value(node), next((entry.link for entry in node.inputs), None))
        return found

    def _set_under(self, getter: _EditorNode) -> Any:
        name = _first_value(getter)
        scope: _Scope | None = self
        while scope is not None:
            if name in scope._setters:
                link = scope._setters[name]
                return None if link is None else (scope, link)
            scope = None if scope.parent is None else scope.parent[0]
        return None


def _passed_through(node: _EditorNode, slot: int) -> str | None:
    """Return the link that a bypassed node passes to an output: of the input at its place where the kinds agree, else
    of the first input of its kind."""
    kind = node.output_kinds[slot] if slot < len(node.output_kinds) else ""
    of_kind = [entry for entry in node.inputs if entry.kind == kind or "*" in (entry.kind, kind)]
    at_place = node.inputs[slot] if slot < len(node.inputs) else None
    chosen = at_place if at_place in of_kind else next((each for each in of_kind if each.link is not None), None)
    return None if chosen is None else chosen.link


def _first_value(node: _EditorNode) -> str | None:
    """Return the name that a node sets or gets."""
    value = node.values[0] if isinstance(node.values, list) and node.values else None
    return value if isinstance(value, str) else None


def _editor_node(raw: Mapping[str, Any]) -> _EditorNode:
    identity, kind = _text(raw.get("id")), raw.get("type")
    if not isinstance(kind, str):
        raise WorkflowError(f"node {identity}: type: expected the name of a class, got {shown(kind)}")
    mode = raw.get("mode", _ALWAYS)
    if type(mode) is not int:
        raise WorkflowError(f"node {identity}: mode: expected a whole number, got {shown(mode)}")
    properties = raw.get("properties")
    promoted = properties.get("proxyWidgets") if isinstance(properties, Mapping) else None
    pairs = (
        [each for each in promoted if isinstance(each, list) and len(each) >= 2] if isinstance(promoted, list) else []
    )
    named = raw.get("widgets_values_named")
    title = raw.get("title")
    return _EditorNode(
        id=identity,
        kind=kind,
        title=title if isinstance(title, str) else "",
        mode=mode,
        inputs=tuple(_entry(each) for each in _listed(raw.get("inputs"), f"node {identity}: inputs")),
        output_kinds=tuple(str(each.get("type")) for each in _listed(raw.get("outputs"), f"node {identity}: outputs")),
        values=raw.get("widgets_values"),
        named=named if isinstance(named, Mapping) else {},
        promoted=tuple((_text(each[0]), str(each[1])) for each in pairs),
    )


def _entry(raw: Mapping[str, Any]) -> _Entry:
    link = raw.get("link")
    return _Entry(
        str(raw.get("name", "")), str(raw.get("type", "")), None if link is None else _text(link), "widget" in raw
    )


def _links(raw: Any) -> Iterator[tuple[str, _EditorLink, str, int]]:
    """Yield id, origin, target node and target slot of links, which are lists of six, or mappings in subgraphs."""
    if raw is None:
        return
    if not isinstance(raw, list):
        raise WorkflowError(f"links: expected a list, got {shown(raw)}")
    for each in raw:
        if isinstance(each, Mapping):
            values = [each.get(name) for name in ("id", "origin_id", "origin_slot", "target_id", "target_slot")]
        elif isinstance(each, list) and len(each) >= 5:
            values = each[:5]
        else:
            raise WorkflowError(f"links: expected [id, from, output, to, input, type], got {shown(each)}")
        identity, origin, slot, target, target_slot = values
        if type(slot) is not int or type(target_slot) is not int or min(slot, target_slot) < 0:
            raise WorkflowError(f"links: {shown(identity)}: expected whole numbers of slots, got {shown(each)}")
        # A slot is the place of an output, of which no node has many.
        if max(slot, target_slot) > MAX_NODES:
            raise WorkflowError(f"links: {shown(identity)}: expected slots up to {MAX_NODES}, got {shown(each)}")
        yield _text(identity), _EditorLink(_text(origin), slot), _text(target), target_slot


def _listed(raw: Any, what: str) -> list[Mapping[str, Any]]:
    if raw is None:
        return []
    if not isinstance(raw, list) or not all(isinstance(each, Mapping) for each in raw):
        raise WorkflowError(f"{what}: expected a list of mappings, got {shown(raw)}")
    return raw


def _text(value: Any) -> str:
    if isinstance(value, str) or type(value) is int:
        return str(value)
    raise WorkflowError(f"expected an id, a text or a whole number, got {shown(value)}")
