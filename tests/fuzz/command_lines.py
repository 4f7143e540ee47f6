"""Command lines: real flags with strange values, misspelt, with paths in them, given twice; nothing is loaded."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from fuzz.hostile_values import STRANGE_NUMBERS, STRANGE_TEXTS, mutate_text
from fuzz.runner import command

# Each with values that are right, from which wrong ones are made.
FLAGS = {
    "--prompt": ("a ring", "two circles"),
    "--prompt-file": ("prompts.txt", "-"),
    "--negative-prompt": ("grey",),
    "--image-path": ("image.png",),
    "--last-image-path": ("image.png",),
    "--video-path": ("out.mp4",),
    "--mask-path": ("image.png",),
    "--conditioning-scale": ("0.8", "1,0.5"),
    "--seed": ("7", "1,2", "1-4"),
    "--model-path": ("shapes", ".", "owner/name"),
    "--lora": ("lora.safetensors", "transformer_2=lora.safetensors@0.5"),
    "--lora-path": ("lora.safetensors",),
    "--lora-scale": ("0.5",),
    "--from": ("out.mp4", "out.json"),
    "--config": ("mine.yaml",),
    "--set": ("request.height=128", "runtime.dtype=float32", "runtime.attention.default.backend=torch_sdpa"),
    "--preset": ("draft",),
    "--height": ("128",),
    "--width": ("128",),
    "--num-frames": ("5",),
    "--fps": ("8",),
    "--num-inference-steps": ("4",),
    "--guidance-scale": ("2.5",),
    "--true-cfg-scale": ("1",),
    "--guidance-scale-2": ("2",),
    "--flow-shift": ("3",),
    "--sampler": ("unipc", "flow_match_euler"),
    "--guidance-mode": ("batched",),
    "--attention-backend": ("torch_sdpa", "reference,torch_sdpa", "sliding_tile_attn", "measured"),
    "--attention-backend-config": ("window=[1,3,3]", '{"sparsity": 0.5}', "options.yaml"),
    "--attention-config": ('{"default": "torch_sdpa"}', "attention.json"),
    "--attention-config.default.backend": ("torch_sdpa",),
    "--attention-config.per_role.self.backend": ("reference",),
    "--attention-config.per_role.self.extra.window": ("[3,3,5]",),
    "--attention-config.schedule": ('[{"steps": "0-3", "backend": "reference"}]',),
    "--request.height": ("128",),
    "--runtime.parallel.num_gpus": ("1",),
    "--device": ("cpu", "auto"),
    "--dtype": ("float32", "bfloat16"),
    "--backend": ("native", "auto", "diffusers"),
    "--num-gpus": ("1", "2"),
    "--ulysses-degree": ("1", "2"),
    "--ring-degree": ("1",),
    "--output-path": ("out.mp4", "here/"),
    "-o": ("x.gif",),
    "--format": ("mp4", "png"),
}
SWITCHES = ("--json", "--quiet", "-q", "--verbose", "--resume", "--cfg-parallel", "--no-cfg-parallel", "--help")
OTHER_VERBS = (
    ("info",),
    ("models",),
    ("doctr",),
    ("bench",),
    ("backends", "--attention-backend"),
    ("bench", "atention"),
)


@dataclass(frozen=True)
class CommandLine:
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return repr(list(self.arguments))

    def run(self) -> str | None:
        return command(self.arguments)


class CommandLines:
    """See fuzz.runner.Kind."""

    def __init__(self, folder: Path, *, is_quick: bool) -> None:
        pass

    def warm_up(self) -> None:
        for backend in ("native", "diffusers"):
            command(("generate", "--dry-run", "a ring", "--backend", backend, "--attention-backend", "measured"))
            command(("generate", "--dry-run", "a ring", "--attention-backend", "sliding_tile_attn"))

    def case(self, random: random.Random, folder: Path) -> CommandLine:
        if random.random() < 0.05:
            return CommandLine((*random.choice(OTHER_VERBS), random.choice(STRANGE_TEXTS)))
        if random.random() < 0.3:
            (folder / "prompts.txt").write_bytes(random.choice((b"a ring\n", b"\xff\xfe", b"\0", b"#\n", b"a" * 10**6)))
            (folder / "out.json").mkdir()
        arguments = ["generate", "--dry-run"]
        if random.random() < 0.8:
            arguments.append(random.choice(("a ring", "a ring", *STRANGE_TEXTS)))
        for _ in range(random.choice((1, 1, 2, 3, 6))):
            arguments += self._flag(random)
        return CommandLine(tuple(arguments))

    def _flag(self, random: random.Random) -> list[str]:
        if random.random() < 0.08:
            return [random.choice(SWITCHES)]
        name = random.choice(list(FLAGS))
        value = random.choice(FLAGS[name])
        chance = random.random()
        if chance < 0.35:
            value = random.choice(STRANGE_TEXTS)
        elif chance < 0.45:
            value = str(random.choice(STRANGE_NUMBERS))
        elif chance < 0.65:
            value = mutate_text(random, value)[:120_000]
        if random.random() < 0.08:
            name = mutate_text(random, name)[:2000]
        return [f"{name}={value}"] if name.startswith("--") and random.random() < 0.4 else [name, value]
