"""Every Python block of README, CONTRIBUTING and docs/ runs, page by page; every YAML block is a config."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fenced_blocks import ROOT, Block, blocks

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.attention.backends import registry
from diffusion_runtime.attention.backends.registry import num_changes, unregister_backend
from diffusion_runtime.cli.config_file import read_config
from diffusion_runtime.models import model_sources

# What diffusers says of packages that are not here.
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2}
# Run by ranks of their own in tests/session/test_following.py.
SEVERAL_PROCESSES = "follow(pipeline, world)"
# Run against a server in tests/serving/test_server.py.
SERVER = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def small_shapes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The embedded models, whose own size is small here: blocks that say none take a second and not ten."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("shapes", "emoji"):
            whole, folder = model_sources.EMBEDDED_FOLDERS[name], tmp_path_factory.mktemp("models") / name
            folder.mkdir()
            for part in whole.iterdir():
                (folder / part.name).symlink_to(part)
            (folder / "generation.json").unlink()
            settings = json.loads((whole / "generation.json").read_text())
            settings["defaults"] |= SMALL
            (folder / "generation.json").write_text(json.dumps(settings))
            patch.setitem(model_sources.EMBEDDED_FOLDERS, name, folder)
            assert model_sources.resolve_model_folder(name) == folder
        yield


class Reader(dict[str, Any]):
    """The names that a page takes for granted, made when its code first asks for one of them."""

    def __init__(self, tiny_wan: Path) -> None:
        super().__init__()
        self.tiny_wan = tiny_wan

    def provide(self, code: str) -> None:
        asked = set(compile(code, "block", "exec").co_names) - set(self)
        if "pipe" in asked:
            self["pipe"] = small_diffusers_pipeline(self.tiny_wan)
        if "prompt" in asked:
            self["prompt"] = "a red circle moving left"
        if "pipeline" in asked:
            self["pipeline"] = load_pipeline("shapes", device="cpu")
        if "request" in asked:
            self["request"] = GenerationRequest("a red circle moving left", seed=0)


def small_diffusers_pipeline(folder: Path) -> Any:
    """diffusers' own pipeline of the tiny model. At its default size it would take minutes."""
    from diffusers import WanPipeline

    class SmallPipeline(WanPipeline):
        def __call__(self, *arguments: Any, **named: Any) -> Any:
            sizes = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2}
            return super().__call__(*arguments, **{**sizes, **named})

    pipe = SmallPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pages() -> dict[Path, list[Block]]:
    return {page: list(found) for page, found in itertools.groupby(blocks("python"), lambda block: block.document)}


def run_page(found: list[Block], tiny_wan: Path) -> None:
    """One after the other in one module, as a reader would paste them."""
    module = ModuleType("documented")
    # Dataclasses look their module up.
    sys.modules["documented"] = module
    names = Reader(tiny_wan)
    for block in found:
        if SEVERAL_PROCESSES in block.text or SERVER in block.text or not block.is_run:
            continue
        # Line numbers are those of the page.
        code = compile("\n" * (block.line - 1) + block.text, str(block.document), "exec")
        names.provide(block.text)
        vars(module).update(names)
        exec(code, vars(module))
        names.update(vars(module))


def test_python_blocks_run(
    small_shapes: None, tiny_wan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before, changes = set(registry._backends), num_changes()
    failures = []
    try:
        for page, found in pages().items():
            try:
                run_page(found, tiny_wan_folder)
            except Exception as error:  # collected: one run names every page that is wrong
                failures.append(f"{page.relative_to(ROOT)}: {type(error).__name__}: {error}")
    finally:
        sys.modules.pop("documented", None)
        added = {name for name in set(registry._backends) - before if name not in registry._OWN_MODULES}
        for name in added:
            unregister_backend(name)
    assert not failures, "\n".join(failures)
    # Blocks ran, and not only compiled: those of own_backend.md register theirs.
    assert {"softcap_attn", "near_attn"} <= added
    assert num_changes() > changes


def test_a_backend_of_your_own_is_short() -> None:
    first = next(block for block in blocks("python") if block.document.stem == "own_backend")
    assert "@register_backend" in first.text
    assert len(first.text.splitlines()) < 40


def test_yaml_blocks_are_configs(tmp_path: Path) -> None:
    found = blocks("yaml")
    assert len(found) > 1
    for block in found:
        path = tmp_path / "block.yaml"
        path.write_text(block.text)
        config = read_config(str(path))
        assert config.runtime or config.request or config.presets, block.place
