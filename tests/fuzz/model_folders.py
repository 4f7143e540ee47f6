"""Model folders: one or two files of a tiny folder changed, for every family; most are looked at, some are loaded."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from fuzz.hostile_values import STRANGE_TEXTS, mutate_bytes, mutate_text, mutate_value, to_json
from fuzz.runner import command

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
# Loading takes a second, a look at the json files a hundredth.
SHARE_LOADED = 0.04


@dataclass(frozen=True)
class FolderCase:
    folder: Path
    family: str
    changes: tuple[str, ...]
    backend: str
    is_loaded: bool

    def __str__(self) -> str:
        how = "loaded" if self.is_loaded else "dry run"
        return f"{self.family}, {how}, backend {self.backend}: {'; '.join(self.changes)}"

    def run(self) -> str | None:
        sizes = (
            "--height",
            "64",
            "--width",
            "64",
            "--num-inference-steps",
            "1",
            "--num-frames",
            "1",
            "--format",
            "png",
        )
        model = ("--model-path", str(self.folder), "--backend", self.backend, "--device", "cpu")
        how = ("-o", f"{self.folder.name}-out.png") if self.is_loaded else ("--dry-run",)
        return command(("generate", "a red circle", *model, *sizes, *how))


class ModelFolders:
    """See fuzz.runner.Kind."""

    def __init__(self, folder: Path, *, is_quick: bool) -> None:
        from tiny_families import WRITERS
        from tiny_pipelines import write_tiny_image_pipeline

        chosen = ("wan", "z_image") if is_quick else tuple(WRITERS)
        self._folders = {name: WRITERS[name](folder / f"tiny-{name}") for name in chosen}
        if not is_quick:
            self._folders["sd3"] = write_tiny_image_pipeline(folder / "tiny-sd3")

    def warm_up(self) -> None:
        for name, folder in self._folders.items():
            for backend in ("auto", "diffusers"):
                FolderCase(folder, name, (), backend, is_loaded=False).run()

    def case(self, random: random.Random, folder: Path) -> FolderCase:
        family = random.choice(list(self._folders))
        copy = folder / "model"
        shutil.copytree(self._folders[family], copy, copy_function=os.link)
        changes = [self._change(random, copy) for _ in range(random.choice((1, 1, 1, 2, 3)))]
        # A passthrough reads its components with diffusers; only what is known before that is ours.
        backend = random.choice(("auto", "auto", "native", "diffusers"))
        return FolderCase(copy, family, tuple(changes), backend, random.random() < SHARE_LOADED)

    def _change(self, random: random.Random, folder: Path) -> str:
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        configs = [path for path in files if path.suffix == ".json" and path.stat().st_size < 20_000]
        decisive = [
            path
            for path in configs
            if path.name in ("model_index.json", "scheduler_config.json") or path.parent.name in ("transformer", "vae")
        ]
        path = random.choice(random.choice((decisive, decisive, configs, files)) or files)
        name = path.relative_to(folder).as_posix()
        chance = random.random()
        if chance < 0.12:
            return f"{name} {self._replace(random, path)}"
        content = path.read_bytes()
        # A hard link's file is shared: it is replaced, never written to.
        path.unlink()
        if path.suffix == ".json" and chance < 0.85:
            try:
                changed = mutate_value(random, json.loads(content))
            except ValueError:
                changed = {}
            path.write_bytes(to_json(changed))
        elif path.suffix == ".json":
            text = content.decode(errors="surrogateescape")
            path.write_bytes(mutate_text(random, text).encode(errors="surrogatepass"))
        else:
            path.write_bytes(mutate_bytes(random, content))
        written = path.read_bytes()
        place = next((at for at, (old, new) in enumerate(zip(content, written, strict=False)) if old != new), 0)
        return f"{name} from byte {place}: {written[max(0, place - 40) : place + 100]!r}"

    def _replace(self, random: random.Random, path: Path) -> str:
        """Something else than the file."""
        path.unlink()
        action = random.randrange(10)
        if action == 0:
            os.mkfifo(path)
            return "is a FIFO"
        if action == 1:
            path.mkdir()
            return "is a folder"
        if action == 2:
            path.write_bytes(LFS_POINTER)
            return "is an LFS pointer"
        if action == 3:
            target = random.choice(("/dev/zero", "/dev/full", path.name, "missing", "/", ".."))
            path.symlink_to(target)
            return f"is a link to {target}"
        if action == 4:
            with socket.socket(socket.AF_UNIX) as server:
                if len(str(path)) < 100:
                    server.bind(str(path))
            return "is a socket"
        if action == 5:
            path.write_bytes(b"[" * 100_000)
            return "nests deep"
        if action == 6:
            index = path.with_name(f"{path.stem}.safetensors.index.json")
            value = random.choice(({"weight_map": {"a": ["b"]}}, {"weight_map": {"a": "../b"}}, {"weight_map": 3}, []))
            index.write_bytes(to_json(value))
            return f"is gone, and {index.name} says {value}"
        if action == 7:
            header = random.choice(
                (b"[" * 100_000 + b"]" * 100_000, b"{}", b'{"a": 3}', b"[1]", b"\xff", b'{"a": {"dtype": []}}')
            )
            path.write_bytes(len(header).to_bytes(8, "little") + header)
            return f"has the header {header[:40]!r}"
        if action == 8:
            path.write_bytes(random.choice(STRANGE_TEXTS).encode(errors="surrogatepass"))
            return "is a strange text"
        return "is gone"
