"""Evaluation of a workflow: each node that an output needs, once, after the nodes that it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from diffusion_runtime.errors import shown
from diffusion_runtime.workflows.graph import Graph, Link, Node, WorkflowError
from diffusion_runtime.workflows.values import Missing, Unknown

Kind = TypeVar("Kind")
_MAX_REASON = 1000


class Verdict(Enum):
    """Verdict on a node."""

    TAKEN = "taken"
    REPLACED = "replaced by"
    WITHOUT_EFFECT = "without effect"
    NOT_SUPPORTED = "not supported"


@dataclass(frozen=True)
class Finding:
    """Verdict on one node. remark: by what it is replaced, why it is without effect or not supported."""

    node: Node
    verdict: Verdict
    remark: str = ""


class NotSupportedError(Exception):
    """A node that changes the result and that no request stands for. reason: it may quote the workflow, and is cut."""

    def __init__(self, reason: str, node: Node | None = None) -> None:
        printable = (each if each.isprintable() else ascii(each)[1:-1] for each in reason[:_MAX_REASON])
        super().__init__("".join(printable) + ("..." if len(reason) > _MAX_REASON else ""))
        self.node = node


class _DependsOnMissing(Exception):
    """Raised where a node takes an output of one that is not supported."""


# What a node outputs, in the order of its outputs.
Run = Callable[["Call"], tuple[Any, ...]]


@dataclass(frozen=True)
class NodeClass:
    """A class of nodes in the table. wanted: the inputs that decide which others count, and which those are: a switch
    looks at one side alone."""

    run: Run
    wanted: Callable[[Node, Mapping[str, Any]], Iterable[str]] | None = None


@dataclass
class Call:
    """One node with the values of its inputs. places: folders in which files of LoadImage are looked for."""

    node: Node
    values: Mapping[str, Any]
    places: tuple[Path, ...]
    verdict: Verdict = Verdict.TAKEN
    remarks: list[str] = field(default_factory=list)

    def replaced(self, remark: str) -> None:
        self.verdict = Verdict.REPLACED
        self.remarks.append(remark)

    def without_effect(self, remark: str) -> None:
        if self.verdict is Verdict.TAKEN:
            self.verdict = Verdict.WITHOUT_EFFECT
        self.remarks.append(remark)

    def refuse(self, reason: str) -> NoReturn:
        raise NotSupportedError(reason)

    def raw(self, name: str, default: Any = None) -> Any:
        """Return the value of an input. Raises where it is of a node that is not supported."""
        value = self.values.get(name, default)
        if isinstance(value, Missing):
            raise _DependsOnMissing
        return default if value is None else value

    def maybe(self, name: str, kind: type[Kind]) -> Kind | None:
        """Return an input of a kind, None where nothing is linked. Raises NotSupportedError for one of another kind."""
        value = self.raw(name)
        if value is not None and not isinstance(value, kind):
            self.refuse(f"{name}: expected {_named(kind)}, got {_described(value)}")
        return value

    def of(self, name: str, kind: type[Kind]) -> Kind:
        value = self.maybe(name, kind)
        if value is None:
            self.refuse(f"{name}: nothing is linked; expected {_named(kind)}")
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self.raw(name, default)
        if not isinstance(value, str):
            self.refuse(f"{name}: expected a text, got {_described(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw(name, default)
        if isinstance(value, Unknown):
            self.refuse(f"{name}: {value.reason}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(f"{name}: expected a number, got {_described(value)}")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        return int(self.number(name, default))

    def size(self, name: str, default: int | None = None) -> int | Unknown:
        """Return a whole number, or one that a file decides that is not here."""
        value = self.raw(name, default)
        return value if isinstance(value, Unknown) else self.whole(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw(name, default)
        if not isinstance(value, bool | int):
            self.refuse(f"{name}: expected true or false, got {_described(value)}")
        return bool(value)

    def named_like(self, prefix: str, kind: type[Kind]) -> list[Kind]:
        """Return the linked inputs whose names begin so (`images.image_1`, ...), in the order of their numbers."""
        names = sorted((name for name in self.values if name.startswith(prefix)), key=_numbered)
        return [value for name in names if (value := self.maybe(name, kind)) is not None]


def _numbered(name: str) -> tuple[int, str]:
    digits = "".join(each if each.isdigit() else " " for each in name).split()
    return (int(digits[-1][:9]) if digits else 0, name)


def _named(kind: type) -> str:
    return kind.__name__.removesuffix("Value").lower()


def _described(value: object) -> str:
    if isinstance(value, Unknown):
        return value.reason
    return shown(value) if isinstance(value, str | int | float | bool | list | dict | None) else _named(type(value))


@dataclass
class Evaluation:
    """The outputs of a graph's nodes, and what becomes of each node that was needed for them. table: node classes by
    name."""

    graph: Graph
    table: Mapping[str, NodeClass]
    places: tuple[Path, ...] = ()
    findings: dict[str, Finding] = field(default_factory=dict)
    _outputs: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def output_of(self, link: Link) -> Any:
        """Return the value of an output; a Missing where a node behind it is not supported. Raises WorkflowError for
        cycles."""
        self._evaluate(link.node)
        return self._value(link)

    def refuse(self, node: Node, reason: str) -> None:
        """Note that a node is not supported, for a reason that only the whole shows."""
        self.findings[node.id] = Finding(node, Verdict.NOT_SUPPORTED, reason)

    def note(self, node: Node, verdict: Verdict, remark: str) -> None:
        """Note what becomes of a node, unless it is not supported."""
        known = self.findings.get(node.id)
        if known is None or known.verdict is not Verdict.NOT_SUPPORTED:
            both = f"{known.remark}; {remark}" if known is not None and known.remark not in ("", remark) else remark
            self.findings[node.id] = Finding(node, verdict, both)

    @property
    def refused(self) -> list[Finding]:
        return [each for each in self.findings.values() if each.verdict is Verdict.NOT_SUPPORTED]

    def _evaluate(self, identity: str) -> None:
        stack, open_nodes = [identity], set[str]()
        while stack:
            current = stack[-1]
            node = self.graph.nodes.get(current)
            if node is None or current in self._outputs:
                stack.pop()
                continue
            waiting = [link.node for link in self._links(node) if self._is_waiting(link)]
            if not waiting:
                self._outputs[current] = self._run(node)
                open_nodes.discard(current)
                stack.pop()
                continue
            open_nodes.add(current)
            for each in waiting:
                if each in open_nodes:
                    raise WorkflowError(
                        f"{self.graph.nodes[each]}: its inputs lead back to it; a workflow has no cycles"
                    )
            # A switch looks at its value before it says which side counts.
            stack += waiting if self.table[node.kind].wanted is None else waiting[:1]

    def _check_links(self, node: Node) -> None:
        """Raises NotSupportedError for a link to nothing, which would be read as an input that is not linked."""
        for link in self._links(node):
            other, outputs = self.graph.nodes.get(link.node), self._outputs.get(link.node)
            if other is None:
                raise NotSupportedError(f"an input is linked to node {shown(link.node)}, and there is none")
            if outputs and not 0 <= link.output < len(outputs):
                raise NotSupportedError(
                    f"an input is linked to output {link.output} of {other}, which is not read here"
                )

    def _is_waiting(self, link: Link) -> bool:
        return link.node in self.graph.nodes and link.node not in self._outputs

    def _links(self, node: Node) -> list[Link]:
        known = self.table.get(node.kind)
        if known is None:
            return []
        names = node.inputs if known.wanted is None else known.wanted(node, self._values(node))
        return [value for name in names if isinstance(value := node.inputs.get(name), Link)]

    def _value(self, link: Link) -> Any:
        outputs = self._outputs.get(link.node)
        if outputs is None:
            return None
        return outputs[link.output] if 0 <= link.output < len(outputs) else Missing() if not outputs else None

    def _values(self, node: Node) -> dict[str, Any]:
        return {name: self._value(value) if isinstance(value, Link) else value for name, value in node.inputs.items()}

    def _run(self, node: Node) -> tuple[Any, ...]:
        known = self.table.get(node.kind)
        if known is None:
            self.findings[node.id] = Finding(node, Verdict.NOT_SUPPORTED, "no request stands for nodes of this class")
            return ()
        call = Call(node, self._values(node), self.places)
        try:
            self._check_links(node)
            outputs = known.run(call)
        except NotSupportedError as error:
            at = error.node or node
            self.findings[at.id] = Finding(at, Verdict.NOT_SUPPORTED, str(error))
            return ()
        except _DependsOnMissing:
            return ()
        except (WorkflowError, OverflowError, ValueError) as error:
            self.findings[node.id] = Finding(node, Verdict.NOT_SUPPORTED, str(error))
            return ()
        self.note(node, call.verdict, "; ".join(call.remarks))
        return outputs
