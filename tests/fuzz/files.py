"""Files that a command line names: media files and sidecars for `info` and `--from`, images, LoRAs, strategies, text
encoders."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fuzz.hostile_values import LONG_NAME, mutate_bytes, mutate_text, mutate_value, to_json
from fuzz.model_folders import LFS_POINTER
from fuzz.runner import command

FORMATS = ("mp4", "gif", "webp", "png", "npy", "wav")
STRATEGY: dict[str, Any] = {
    f"{step}_{layer}_{head}": [3, 3, 5] for step in range(2) for layer in range(2) for head in range(4)
}


@dataclass(frozen=True)
class FileCase:
    arguments: tuple[str, ...]
    change: str

    def __str__(self) -> str:
        return f"{list(self.arguments)!r}: {self.change}"

    def run(self) -> str | None:
        return command(self.arguments)


class Files:
    """See fuzz.runner.Kind."""

    def __init__(self, folder: Path, *, is_quick: bool) -> None:
        import numpy
        import torch
        from PIL import Image
        from safetensors.torch import save
        from sample_media import make_media
        from tiny_models import write_tiny_wan

        from diffusion_runtime import GenerationRequest, RuntimeConfig
        from diffusion_runtime.loading import inspect_pipeline

        self._wan = write_tiny_wan(folder / "tiny-wan", boundary_ratio=None, takes_image=True)
        self._vace = write_tiny_wan(folder / "tiny-vace", condition="control")
        config = RuntimeConfig(model_path=str(self._wan), device="cpu")
        request = GenerationRequest("a ring", height=32, width=32, num_frames=5, num_inference_steps=2)
        recipe = {**inspect_pipeline(config).to_dict(), "request": request.to_dict()}
        self._media: dict[str, bytes] = {}
        for name in FORMATS[:-1]:
            one_frame = {"num_frames": 1} if name == "png" else {"num_frames": 3}
            path = make_media(height=32, width=32, recipe=recipe, **one_frame).save(folder / "media" / f"x.{name}")
            self._media[name] = path.read_bytes()
        self._sidecar = json.loads((folder / "media" / "x.json").read_bytes())
        # Without samples: the header alone.
        self._media["wav"] = b"RIFF$\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x80\xbb\0\0\0w\x01\0\x02\0\x10\0data\0\0\0\0"
        for kind in ("png", "jpeg", "webp"):
            Image.fromarray(numpy.full((32, 32, 3), 99, numpy.uint8)).save(folder / f"image.{kind}")
            self._media[f"image.{kind}"] = (folder / f"image.{kind}").read_bytes()
        tensors = {
            f"transformer.blocks.0.attn1.to_q.lora_{side}.weight": torch.ones(shape)
            for side, shape in (("A", (4, 64)), ("B", (64, 4)))
        }
        settings = {
            "lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 8, "transformer.alpha_pattern": {"a": 2}})
        }
        self._lora = save(tensors, settings)
        self._encoders = self._text_encoders(folder)

    def warm_up(self) -> None:
        command(("generate", "a ring", "--dry-run", "--model-path", str(self._wan), "--image-path", "missing.png"))

    def case(self, random: random.Random, folder: Path) -> FileCase:
        chance = random.random()
        if chance < 0.42:
            return self._media_case(random, folder)
        if chance < 0.5:
            return self._encoder_case(random, folder)
        common = ("generate", "a ring", "--dry-run", "--model-path", str(self._wan))
        if chance < 0.65:
            kind = random.choice(("png", "jpeg", "webp"))
            path = self._path(random, folder, f"image.{kind}")
            change = self._write(random, path, self._media[f"image.{kind}"])
            return FileCase((*common, "--height", "32", "--width", "32", "--image-path", str(path)), change)
        if chance < 0.75:
            name = random.choice(("mp4", "gif", "webp", "npy"))
            path = self._path(random, folder, f"x.{name}")
            change = self._write(random, path, self._media[name], 0.4)
            sizes = ("--height", "32", "--width", "32", "--num-frames", "1")
            return FileCase((*common[:4], str(self._vace), *sizes, "--video-path", str(path)), change)
        if chance < 0.85:
            path = self._path(random, folder, "lora.safetensors")
            content, change = self._changed_lora(random)
            return FileCase((*common, "--lora-path", str(path)), f"{change}, {self._write(random, path, content, 0.5)}")
        if chance < 0.97:
            path = self._path(random, folder, "strategy.json")
            content = to_json(mutate_value(random, STRATEGY))
            options = json.dumps({"mask_strategy_file_path": str(path)})
            given = (
                "--attention-config.per_role.self.backend=sliding_tile_attn",
                f"--attention-config.per_role.self.extra={options}",
            )
            return FileCase((*common, *given), self._write(random, path, content, 0.5))
        path = self._path(random, folder, "prompts.txt")
        return FileCase(
            (*common[:1], *common[2:], "--prompt-file", str(path)), self._write(random, path, b"a ring\n# no\n\ntwo\n")
        )

    def _media_case(self, random: random.Random, folder: Path) -> FileCase:
        name = random.choice(FORMATS)
        path = self._path(random, folder, f"x.{name}")
        change = self._write(random, path, self._media[name], 0.4)
        if random.random() < 0.7:
            sidecar = {**self._sidecar, "file": {**self._sidecar["file"], "format": name}}
            for _ in range(random.choice((0, 1, 1, 3))):
                sidecar = mutate_value(random, sidecar)
            if random.random() < 0.5 and isinstance(sidecar, dict):
                # Only what passes for a sidecar is read further.
                sidecar["schema"] = self._sidecar["schema"]
                if isinstance(sidecar.get("recipe"), dict):
                    sidecar["recipe"]["schema"] = self._sidecar["recipe"]["schema"]
            content = to_json(sidecar)
            if random.random() < 0.02:
                content = content[:-1] + b', "more": "' + b"x" * 10_000_000 + b'"}'
            if path.parent == folder and len(path.stem) < 250:
                side = path.with_suffix(".json")
                change += f"; sidecar {self._write(random, side, content, 0.85)} of {content[:300]!r}"
                if random.random() < 0.2:
                    path = side
        if random.random() < 0.5:
            return FileCase(("info", str(path), *random.choice(((), ("--json",)))), change)
        more = random.choice(((), ("--json",), ("a ring",), ("--preset", "draft")))
        return FileCase(("generate", "--dry-run", "--from", str(path), *more), change)

    def _text_encoders(self, folder: Path) -> dict[str, bytes]:
        """The UMT5 of the folder in GGUF, with a vocabulary, and in int8 with the marks and tensors of ComfyUI."""
        import torch
        from comfy_files import WRITERS, quantised
        from gguf import MODEL_ARCH
        from gguf_encoders import language_tensors, write_encoder
        from safetensors.torch import load_file, save
        from spiece_files import model_bytes

        self._wordless = shutil.copytree(self._wan, folder / "tiny-wan-without-tokenizer")
        (self._wordless / "tokenizer" / "tokenizer.json").unlink()
        tensors = load_file(self._wan / "text_encoder" / "model.safetensors")
        config = SimpleNamespace(**json.loads((self._wan / "text_encoder" / "config.json").read_text()))
        tokens = ["<pad>", "</s>", "<unk>", *"abcdefgh"]

        def vocabulary(writer: Any) -> None:
            writer.add_tokenizer_model("t5")
            writer.add_token_list(tokens)
            writer.add_token_scores([-1.0] * len(tokens))
            writer.add_token_types([3, 3, 2, *[1] * (len(tokens) - 3)])

        path = folder / "umt5.gguf"
        named = language_tensors(MODEL_ARCH.T5ENCODER, tensors, config)
        write_encoder(path, "t5encoder", named, config, lambda _: "Q8_0", vocabulary)
        stored, _ = quantised(tensors, WRITERS["int8 ConvRot 16"], lambda name: "DenseReluDense.wi" in name)
        pieces = torch.tensor(list(model_bytes([(token, -1.0) for token in tokens])), dtype=torch.uint8)
        return {"gguf": path.read_bytes(), "safetensors": save({**stored, "spiece_model": pieces})}

    def _encoder_case(self, random: random.Random, folder: Path) -> FileCase:
        """A text encoder's file, changed anywhere or in its head, with and without a tokenizer of the model's own."""
        kind = random.choice(("gguf", "safetensors"))
        path, content = self._path(random, folder, f"umt5.{kind}"), self._encoders[kind]
        size = 2000 if kind == "gguf" else 8 + int.from_bytes(content[:8], "little")
        if random.random() < 0.7:
            content = mutate_bytes(random, content[:size]) + content[size:]
        change = self._write(random, path, content, 0.8)
        if random.random() < 0.3:
            return FileCase(("info", str(path)), change)
        model = random.choice((self._wan, self._wordless))
        return FileCase(
            ("generate", "a ring", "--dry-run", "--model-path", str(model), "--text-encoder-path", str(path)), change
        )

    def _path(self, random: random.Random, folder: Path, name: str) -> Path:
        stem, _, suffix = name.rpartition(".")
        chance = random.random()
        if chance < 0.03:
            return folder / f"{LONG_NAME}.{suffix}"
        if chance < 0.06:
            return folder / f"{'n' * (254 - len(suffix))}.{suffix}"
        if chance < 0.1:
            return Path(f"{folder}/{stem}\udcff.{suffix}")
        return Path("/dev/zero") if chance < 0.12 else folder / name

    def _write(self, random: random.Random, path: Path, content: bytes, kept: float = 0.1) -> str:
        """Write `content`, changed or not, or something else than a file. kept: how often it is what it is."""
        if path == Path("/dev/zero") or len(os.fsencode(path.name)) > 255:
            return "no such name"
        chance = random.random()
        if chance < kept:
            path.write_bytes(content)
            return "as it is"
        if chance < kept + 0.02:
            os.mkfifo(path)
            return "a FIFO"
        if chance < kept + 0.04:
            path.mkdir()
            return "a folder"
        if chance < kept + 0.06:
            path.write_bytes(LFS_POINTER)
            return "an LFS pointer"
        if chance < kept + 0.08:
            return "missing"
        if chance < kept + 0.1:
            path.symlink_to(random.choice(("/dev/zero", "/dev/full", path.name)))
            return "a link to a device, or to itself"
        if path.suffix == ".json" and chance < kept + 0.2:
            text = mutate_text(random, content.decode(errors="surrogateescape"))
            path.write_bytes(text.encode(errors="surrogatepass"))
            return f"text {text[:200]!r}"
        changed = mutate_bytes(random, content)
        path.write_bytes(changed)
        return f"bytes {changed[:200]!r}"

    def _changed_lora(self, random: random.Random) -> tuple[bytes, str]:
        """The head of a safetensors file changed as JSON, with a length that fits."""
        size = int.from_bytes(self._lora[:8], "little")
        head = json.loads(self._lora[8 : 8 + size])
        chance = random.random()
        if chance < 0.2:
            return self._lora, "as it is"
        if chance < 0.6:
            settings = mutate_value(random, json.loads(head["__metadata__"]["lora_adapter_metadata"]))
            head["__metadata__"]["lora_adapter_metadata"] = json.dumps(settings)
        elif chance < 0.65:
            head["__metadata__"]["lora_adapter_metadata"] = mutate_text(
                random, head["__metadata__"]["lora_adapter_metadata"]
            )
        else:
            head = mutate_value(random, head)
        text = to_json(head)
        return len(text).to_bytes(8, "little") + text + self._lora[8 + size :], f"head {text[:300]!r}"
