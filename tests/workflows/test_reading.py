"""Workflow files as they are: both formats, metadata of pictures and videos, subgraphs, bypassed and muted nodes."""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from tables import table
from workflows.comfy_graphs import api_format, node, with_subgraph, z_image

from diffusion_runtime.workflows import reading
from diffusion_runtime.workflows.arithmetic import evaluate
from diffusion_runtime.workflows.evaluation import Evaluation
from diffusion_runtime.workflows.graph import Link, WorkflowError
from diffusion_runtime.workflows.node_table import TABLE
from diffusion_runtime.workflows.reading import graph_of_document, read_workflow


def png(text: bytes, kind: bytes) -> bytes:
    packed = {
        b"tEXt": b"workflow\0" + text,
        b"zTXt": b"workflow\0\0" + zlib.compress(text),
        b"iTXt": b"workflow\0\1\0\0\0" + zlib.compress(text),
    }[kind]
    chunk = struct.pack(">I", len(packed)) + kind + packed + struct.pack(">I", zlib.crc32(kind + packed))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IEND" + b"\0" * 4


def containers() -> dict[str, bytes]:
    text = json.dumps(z_image()).encode()
    exif = b"II*\0....workflow:" + text + b"\0"
    return {
        "plain.json": text,
        "api.json": json.dumps(api_format(z_image())).encode(),
        "sent.json": json.dumps({"prompt": api_format(z_image())}).encode(),
        **{f"{kind.decode()}.png": png(text, kind) for kind in (b"tEXt", b"zTXt", b"iTXt")},
        "exif.webp": b"RIFF\0\0\0\0WEBPEXIF" + struct.pack("<I", len(exif)) + exif,
        "meta.mp4": b"\0\0\0\x18ftypisom" + b"\0" * 12 + b"udta workflow\0\0\0\1" + text + b"\0mdat",
    }


@table("name", containers())
def test_every_container_has_the_same_graph(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(containers()[name])
    assert read_workflow(str(path)) == graph_of_document(z_image())


def test_places_that_only_look_like_a_workflow_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A film in which the word stands over and over before brackets that never close, and a workflow behind it."""
    looked_at: list[int] = []
    real = reading._object_at

    def counted(content: bytes, start: int, most: int) -> tuple[bytes | None, int]:
        found = real(content, start, most)
        looked_at.append(found[1])
        return found

    monkeypatch.setattr(reading, "_object_at", counted)
    head = b"\0\0\0\x18ftypisom" + b"\0" * 12
    place = tmp_path / "film.mp4"
    own = b"workflow" + json.dumps(z_image()).encode()
    place.write_bytes(head + b"workflow{" * 3 + own)
    monkeypatch.setattr(reading, "_MAX_MARKS", 16_000)
    assert len(read_workflow(str(place)).nodes) == len(graph_of_document(z_image()).nodes)
    looked_at.clear()
    place.write_bytes(head + b"workflow{{" * 60 + b'x"y{' * 3000)
    with pytest.raises(WorkflowError, match="this file holds no workflow"):
        read_workflow(str(place))
    assert len(looked_at) <= 16
    assert sum(looked_at) <= 16_000


def test_other_texts_of_a_picture_are_not_inflated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inflated: list[int] = []
    real = reading._inflated
    monkeypatch.setattr(reading, "_inflated", lambda data: (inflated.append(len(data)), real(data))[1])

    def chunk(key: bytes, text: bytes) -> bytes:
        data = key + b"\0\0" + zlib.compress(text)
        return struct.pack(">I4s", len(data), b"zTXt") + data + b"\0" * 4

    text = json.dumps(z_image()).encode()
    place = tmp_path / "a.png"
    others = b"".join(chunk(b"k%d" % index, b" " * 1000) for index in range(9))
    place.write_bytes(b"\x89PNG\r\n\x1a\n" + others + chunk(b"workflow", text) + chunk(b"workflow", b"{}") * 9)
    assert read_workflow(str(place)).nodes
    assert len(inflated) == 1


def test_widgets_have_the_names_of_their_class() -> None:
    graph = graph_of_document(z_image())
    assert graph.nodes["8"].inputs["steps"] == 4
    assert graph.nodes["8"].inputs["latent_image"] == Link("6", 0)
    assert "30" not in graph.nodes


def output(document: dict[str, Any], link: Link) -> Any:
    return Evaluation(graph_of_document(document), TABLE).output_of(link)


@table(
    "values, instance, expected",
    [
        ([], {}, 10),
        # The subgraph's widget is the text, as the amount is linked.
        (["a * 3"], {}, 15),
        ({"text": "a + 1"}, {}, 6),
        ([], {"widgets_values_named": {"text": "a - 1"}}, 4),
        (["a * 4"], {"properties": {"proxyWidgets": [["10", "expression"]]}}, 20),
    ],
)
def test_a_subgraph_takes_the_values_of_its_instance(values: Any, instance: dict[str, Any], expected: int) -> None:
    assert output(with_subgraph(values, **instance), Link("50:10", 1)) == expected


def chain(*kinds: dict[str, Any]) -> dict[str, Any]:
    """A number through nodes of one input each, to node 99."""
    nodes = [node(1, "PrimitiveInt", [5, "fixed"]), *kinds, node(99, "PreviewAny", [], {"source": len(kinds) + 1})]
    identities = [1, *(each["id"] for each in kinds), 99]
    links = [
        [index + 1, origin, 0, target, 0, "INT"]
        for index, (origin, target) in enumerate(itertools.pairwise(identities))
    ]
    return {"nodes": nodes, "links": links}


@table(
    "between, expected",
    [
        ([node(2, "Reroute", [], {"": 1}), node(3, "Reroute", [], {"": 2})], 5),
        ([node(2, "Unheard", [9], {"a": 1}, mode=4, outputs=[{"type": "*"}])], 5),
        ([node(2, "Unheard", [9], {"a": 1}, mode=2)], None),
    ],
)
def test_reroutes_bypassed_and_muted_nodes(between: list[dict[str, Any]], expected: int | None) -> None:
    assert output(chain(*between), Link("99", 0)) == expected


def test_values_travel_by_name() -> None:
    """Set and get nodes, and a primitive of the editor."""
    document = {
        "nodes": [
            node(1, "PrimitiveNode", [8, "fixed"]),
            node(2, "SetNode", ["n"], {"INT": 1}),
            node(3, "GetNode", ["n"]),
            node(4, "PreviewAny", [], {"source": 2}),
        ],
        "links": [[1, 1, 0, 2, 0, "INT"], [2, 3, 0, 4, 0, "INT"]],
    }
    assert output(document, Link("4", 0)) == 8


LOOP = {"nodes": [node(1, "Reroute", [], {"": 1}), node(2, "PreviewAny", [], {"source": 1})],
        "links": [[1, 1, 0, 1, 0, "*"]]}  # fmt: skip
RECURSIVE = with_subgraph([])
RECURSIVE["definitions"]["subgraphs"][0]["nodes"].append(node(11, "sub"))


@table(
    "document, expected",
    [
        ([], "a workflow of ComfyUI"),
        ({"nodes": [{"type": "A"}]}, "an id"),
        ({"nodes": [node(1, "A"), node(1, "B")]}, "two of this id"),
        ({"nodes": [], "links": [[1, 2]]}, "links"),
        ({"nodes": [{"id": index, "type": "A"} for index in range(20_001)]}, "at most 20000"),
        (LOOP, "cycle"),
        (RECURSIVE, "a subgraph within itself"),
        ({"1": {"class_type": "A", "inputs": 3}}, "expected a mapping"),
    ],
)
def test_a_broken_graph_is_an_error_that_says_what_is_wrong(document: Any, expected: str) -> None:
    with pytest.raises(WorkflowError, match=expected):
        graph_of_document(document)


def test_a_cycle_of_nodes_is_an_error() -> None:
    graph = graph_of_document(
        {
            "1": {"class_type": "PreviewAny", "inputs": {"source": ["2", 0]}},
            "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}},
        }
    )
    with pytest.raises(WorkflowError, match="no cycles"):
        Evaluation(graph, TABLE).output_of(Link("1", 0))


@table(
    "expression, expected",
    [
        ("max(5, round(a * 24)) + (5 - (max(5, round(a * 24)) % 17)) % 17", 124),
        ("floor (a * b + 1)", 81),
        ("-2**2 + 7 // 2", -1),
        ("a > 4", True),
        ("1 < 2 < 3", True),
        ("3 > 2 > 2", False),
        ("2 ** 3 ** 2", 512),
        ("1e3 / .5", 2000),
        ("(a % 4 == 1) and not ((b - 1) % 4 == 0)", True),
        ("a - 5 or 1 + 4 & -2", 4),
    ],
)
def test_expressions_are_arithmetic(expression: str, expected: float) -> None:
    assert evaluate(expression, {"a": 5, "b": 16.0}) == expected


@table(
    "expression",
    ["__import__('os')", "a.b", "a[0]", "(lambda: 1)()", "[x for x in a]", "'a'", "open(a)", "9**9**9**9", "1/0", "c",
     "(" * 60 + "1", "1 +", "1e999", "max()", "int(", "a if a else b", "sqrt(-1)", "a := 2", "1" * 3000, "1.5 & 2",
     "a and", "not " * 60 + "1"],
)  # fmt: skip
def test_nothing_else_is_evaluated(expression: str) -> None:
    with pytest.raises(WorkflowError):
        evaluate(expression, {"a": 5})
