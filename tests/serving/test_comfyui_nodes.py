"""Nodes of ComfyUI with stand-ins of its classes: videos and images of a real server, attached attention, workflows."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from comfy_stand_in import FOLDER, Interrupted, Recorded, load
from running_server import RunningServer
from tables import table

VALUES = {
    "prompt": "a red circle moving left",
    "negative_prompt": "",
    "width": 64,
    "height": 64,
    "steps": 2,
    "guidance": -1.0,
    "seed": 7,
    "preset": "",
    "more": '{"flow_shift": 5.0}',
}


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def nodes(recorded: Recorded) -> dict[str, Any]:
    """Our nodes by their identifiers, as ComfyUI finds them."""
    extension = asyncio.run(load(recorded).comfy_entrypoint())
    return {node.define_schema().node_id: node for node in asyncio.run(extension.get_node_list())}


def run(nodes: dict[str, Any], name: str, **values: Any) -> Any:
    return nodes[name].execute(**values)


def test_a_workflow_of_ours_makes_a_video_with_its_report(
    nodes: dict[str, Any], recorded: Recorded, server: RunningServer
) -> None:
    workflow = json.loads((FOLDER / "workflow_video.json").read_text())
    made: dict[str, Any] = {}
    for key, step in workflow.items():
        if step["class_type"] not in nodes:
            continue
        values = {name: made[v[0]][v[1]] if isinstance(v, list) else v for name, v in step["inputs"].items()}
        if "url" in values:
            values["url"] = server.address
        made[key] = run(nodes, step["class_type"], **values)
    video, frames, _sound, report = made["3"]
    assert video.content[4:8] == b"ftyp"
    assert tuple(frames.shape) == (5, 64, 64, 3)
    assert "self: torch_sdpa" in report
    assert "seed 7" in report
    percents = [value for value, _ in recorded.progress]
    assert percents[-1] == 100
    assert percents == sorted(percents)


def test_images_come_in_their_order_and_an_interrupt_stops_the_server(
    nodes: dict[str, Any], recorded: Recorded, server: RunningServer
) -> None:
    (address,) = run(nodes, "DiffusionRuntimeServer", url=server.address)
    images, report = run(nodes, "DiffusionRuntimeImage", server=address, count=2, **VALUES)
    assert tuple(images.shape) == (2, 64, 64, 3)
    assert "torch_sdpa" in report
    (single, _) = run(nodes, "DiffusionRuntimeImage", server=address, **{**VALUES, "seed": 8})
    # Image i has the seed + i.
    assert torch.equal(images[1], single[0])
    stop = threading.Timer(1.0, lambda: setattr(recorded, "is_interrupted", True))
    stop.start()
    with pytest.raises(Interrupted):
        run(nodes, "DiffusionRuntimeVideo", server=address, frames=5, **{**VALUES, "steps": 200})
    with server.client() as http:
        video = http.get("/v1/videos?limit=1").json()["data"][0]
        assert (video["status"], video["error"]["code"]) == ("failed", "cancelled")
    recorded.is_interrupted = False
    with pytest.raises(Exception, match="this model takes no images"):
        run(nodes, "DiffusionRuntimeVideo", server=address, image=torch.rand(1, 64, 64, 3), **VALUES)
    (gone,) = run(nodes, "DiffusionRuntimeServer", url="http://127.0.0.1:9")
    with pytest.raises(Exception, match="cannot be reached"):
        run(nodes, "DiffusionRuntimeImage", server=gone, **VALUES)


@table(
    "url",
    [
        "http://192.0.2.7:8000",
        "http://127.0.0.1@192.0.2.7",
        "http://localhost.example.org",
        "https://server.example.org.evil.example",
        "file:///etc/hostname",
        "http://",
    ],
)
def test_a_workflow_reaches_no_server_that_the_owner_did_not_choose(nodes: dict[str, Any], url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIFFUSION_RUNTIME_URL", "https://server.example.org/")
        patch.setenv("DIFFUSION_RUNTIME_API_KEY", "secret")
        with pytest.raises(ValueError, match="url: "):
            run(nodes, "DiffusionRuntimeServer", url=url)
        for allowed in ("https://server.example.org", "http://localhost:8000"):
            (address,) = run(nodes, "DiffusionRuntimeServer", url=allowed)
            assert (address.url, address.key) == (allowed, "secret")


def test_a_key_does_not_follow_a_redirect(nodes: dict[str, Any]) -> None:
    asked: list[str] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (address,) = run(nodes, "DiffusionRuntimeServer", url=f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(Exception, match="the server answered 302"):
            address.call("GET", "v1/models")
        server.shutdown()
    assert asked == ["/v1/models"]


def choice(nodes: dict[str, Any], **values: str) -> dict[str, Any]:
    empty = dict.fromkeys(("every_role", "self_attention", "self_options", "cross_attention", "schedule"), "")
    (found,) = run(nodes, "DiffusionRuntimeAttention", **{**empty, **values})
    return found


class Patcher:
    """A stand-in of ComfyUI's ModelPatcher: what is inside of its options is shared by clones."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.model_options = options

    def clone(self) -> Patcher:
        return Patcher(dict(self.model_options))


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **shaped: Any) -> torch.Tensor:
    """ComfyUI's attention function, by torch."""

    def split(each: torch.Tensor) -> torch.Tensor:
        return each if shaped["skip_reshape"] else each.unflatten(-1, (-1, q.shape[-1] // heads)).transpose(1, 2)

    mask = shaped.get("mask")
    out = torch.nn.functional.scaled_dot_product_attention(
        *(split(each) for each in (q, k, v)), attn_mask=mask if mask is None or mask.ndim > 2 else mask[None, None]
    )
    return out if shaped["skip_output_reshape"] else out.transpose(1, 2).flatten(2)


@table(
    ("split", "joined", "num_keys", "has_mask"),
    [(False, False, 12, False), (True, False, 12, False), (True, True, 12, False), (False, False, 5, True)],
)
def test_attached_calls_compute_what_comfyui_computes(
    nodes: dict[str, Any], split: bool, joined: bool, num_keys: int, has_mask: bool
) -> None:
    original = Patcher({"transformer_options": {"own": 1}})
    attention = choice(nodes, every_role="reference")
    model, attached = run(nodes, "DiffusionRuntimeAttach", model=original, attention=attention)
    override = model.model_options["transformer_options"]["optimized_attention_override"]
    assert original.model_options == {"transformer_options": {"own": 1}}
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 16) for n in (12, num_keys, num_keys))
    if not split:
        q, k, v = (each.transpose(1, 2).flatten(2) for each in (q, k, v))
    mask = torch.rand(12, num_keys) > 0.3 if has_mask else None
    shaped = {"mask": mask, "skip_reshape": split, "skip_output_reshape": joined}
    expected = plain(q, k, v, 4, **shaped)
    found = override(plain, q, k, v, 4, **shaped, transformer_options={})
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    kept = override(plain, q, k, v, 4, **shaped, low_precision_attention=False) if not has_mask else None
    _, report = run(nodes, "DiffusionRuntimeReport", attached=attached, latent={"samples": 0})
    role = "self" if num_keys == 12 else "cross"
    assert report.splitlines()[-1] == f"{role}: reference, 1 calls"
    assert (kept is None) != ("ComfyUI's own, 1 calls" in report)


def test_what_cannot_run_is_refused_before_a_sampler_runs(nodes: dict[str, Any]) -> None:
    model = Patcher({})
    with pytest.raises(Exception, match="unknown"):
        run(nodes, "DiffusionRuntimeAttach", model=model, attention=choice(nodes, every_role="no_such_backend"))
    rules = choice(nodes, schedule='[{"steps": "0", "backend": "torch_sdpa"}]')
    with pytest.raises(ValueError, match="schedule"):
        run(nodes, "DiffusionRuntimeAttach", model=model, attention=rules)
    with pytest.raises(ValueError, match="self_options: expected JSON"):
        choice(nodes, self_attention="torch_sdpa", self_options="{")
    with pytest.raises(ValueError, match=r"self_options: expected \{\.\.\.\}, got"):
        choice(nodes, self_attention="torch_sdpa", self_options="[1]")
    sparse = choice(nodes, self_attention="torch_sdpa,video_sparse_attn")
    with pytest.raises(ValueError, match="video_sparse_attn needs the grid"):
        run(nodes, "DiffusionRuntimeAttach", model=model, attention=sparse)
    # Of several backends the report names the one that ran.
    several = choice(nodes, every_role="fa3, reference")
    attached, counted = run(nodes, "DiffusionRuntimeAttach", model=model, attention=several)
    override = attached.model_options["transformer_options"]["optimized_attention_override"]
    q = torch.randn(1, 12, 64)
    for _ in range(2):
        override(plain, q, q, q, 4)
    for expected in ("self: reference, 2 calls", "no attention call came"):
        (_, report) = run(nodes, "DiffusionRuntimeReport", attached=counted, latent={"samples": 0})
        assert report.startswith(expected)
    attached, _ = run(nodes, "DiffusionRuntimeAttach", model=model, attention=choice(nodes, every_role="fa2,fa3"))
    override = attached.model_options["transformer_options"]["optimized_attention_override"]
    with pytest.raises(Exception, match=r"fa2: .*\n.*fa3: ") as caught:
        override(plain, q, q, q, 4)
    assert "fa3: runs on cuda, not on cpu" in str(caught.value)
    with pytest.raises(ValueError, match="another node"):
        run(nodes, "DiffusionRuntimeAttach", model=attached, attention=choice(nodes, every_role="torch_sdpa"))


def test_workflows_give_every_input_that_a_schema_has(nodes: dict[str, Any]) -> None:
    """Of our own nodes: every required input, no other, links to outputs of the type that is expected."""
    for name in ("workflow_video.json", "workflow_attach.json"):
        workflow = json.loads((FOLDER / name).read_text())
        seen = 0
        for step in workflow.values():
            if (node := nodes.get(step["class_type"])) is None:
                continue
            seen += 1
            sockets = {each.name: each for each in node.define_schema().inputs}
            given = step["inputs"]
            assert set(given) <= set(sockets)
            assert {each for each, socket in sockets.items() if not socket.optional} <= set(given)
            for key, value in given.items():
                source = workflow[value[0]]["class_type"] if isinstance(value, list) else None
                if source in nodes:
                    assert nodes[source].define_schema().outputs[value[1]].io_type == sockets[key].io_type
        assert seen >= 3
