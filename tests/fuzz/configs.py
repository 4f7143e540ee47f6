"""Config files and attention configs: changed values, changed texts, in YAML, JSON and Python."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from fuzz.hostile_values import STRANGE_TEXTS, mutate_text, mutate_value, strange_value, to_json
from fuzz.runner import command

from diffusion_runtime.errors import DiffusionRuntimeError

CONFIG: dict[str, Any] = {
    "runtime": {
        "model_path": "shapes",
        "backend": "native",
        "device": "cpu",
        "dtype": "float32",
        "attention": {"default": "torch_sdpa"},
        "parallel": {"num_gpus": 1, "ulysses_degree": None, "order": "ulysses_inside_ring", "timeout": 40},
        "lora": [],
    },
    "request": {
        "prompt": ["a star", "a ring"],
        "seed": "1-3",
        "height": 128,
        "guidance_scale": 2.5,
        "sampler": "unipc",
    },
    "presets": {"tiny": {"height": 64, "num_frames": 1, "negative_prompt": "grey"}},
}
ATTENTION: dict[str, Any] = {
    "default": {"backend": "sliding_tile_attn,torch_sdpa", "extra": {"window": [3, 3, 5], "skip_time_steps": 3}},
    "per_role": {"cross": "torch_sdpa", "self": {"backend": "video_sparse_attn", "extra": {"sparsity": 0.5}}},
    "schedule": [{"role": "self", "steps": "0-3,-1", "layers": [0, "1-2"], "backend": "reference"}],
}
OPTIONS: dict[str, Any] = {
    "sliding_tile_attn": {"window": [3, 3, 5], "tile_size": [6, 8, 8], "sta_mode": "STA_inference", "min_tokens": 0},
    "video_sparse_attn": {"sparsity": 0.5},
    "vmoba_attn": {"moba_topk": 3},
    "sparse_video_gen_2_attn": {"top_p": 0.9},
}
PATH_OPTIONS = ("mask_strategy_file_path",)
DOTTED = ("per_role.self.extra.window", "default.backend", "per_role.ltx2.audio_to_video.backend", "default.extra.a")
# Nine aliases in each of nine levels.
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{inner}: &{inner} [{', '.join(['*' + outer] * 9)}]\n" for outer, inner in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML_PIECES = (
    BOMB,
    "request: &r {height: 64, nested: [*r]}\n", "request: {height: 2001-13-45}\n", "request: {height: 0b_}\n",
    "request: {seed: 1:99}\n", "<<: foo\n", "request: {<<: [{height: 64}, 3]}\n", "? 1.5\n: 2\n", "? true\n: 2\n",
    "? [1]\n: 2\n", "2001-12-14: 1\n", "request: {height: !!float foo}\n", "request: !!bool maybe\n",
    "request: !!timestamp x\n", "request: !!python/name:os.system x\n", "request: !!binary ====\n", 
    "request: {height: " + "9" * 20_000 + "}\n",
    "request: {prompt: " + "x" * 100_000 + "}\n",
    "presets: {draft: *unknown}\n", "--- {}\n--- {}\n", "\t", "%YAML 9.9\n---\n",
    "request:\n" + "  - a\n" * 50, "".join(f"k{n}: 1\n" for n in range(2000)), 
    "[" * 200_000, "{" * 3000, "- " * 2000, "? " * 2000,
    "request: {height: 64, height: 32}\n", "&a : *a\n", 
    "request: &a\n  <<: *a\n", "presets: {? {a: b} : 1}\n", "\ufeffrequest: {}\n",
)  # fmt: skip


@dataclass(frozen=True)
class ConfigCase:
    arguments: tuple[str, ...]
    content: bytes

    def __str__(self) -> str:
        return f"{list(self.arguments)!r} with {self.content[:400]!r}"

    def run(self) -> str | None:
        return command(self.arguments)


@dataclass(frozen=True)
class ParseCase:
    """A value as a script gives it."""

    value: Any

    def __str__(self) -> str:
        return f"AttentionConfig.parse({type(self.value)!s}) {repr_of(self.value)}"

    def run(self) -> str | None:
        from diffusion_runtime.attention.config import AttentionConfig

        try:
            hash(AttentionConfig.parse(self.value))
        except DiffusionRuntimeError as error:
            return None if len(str(error)) < 8000 else f"a message of {len(str(error))} characters"
        return None


def repr_of(value: Any) -> str:
    try:
        return repr(value)[:400]
    except (ValueError, RecursionError) as error:
        return f"({error})"


class Configs:
    """See fuzz.runner.Kind."""

    def __init__(self, folder: Path, *, is_quick: bool) -> None:
        pass

    def warm_up(self) -> None:
        for backend in ("native", "diffusers"):
            command(("generate", "--dry-run", "a ring", "--backend", backend, "--attention-backend", "measured"))
            command(("generate", "--dry-run", "a ring", "--attention-backend", "sliding_tile_attn"))

    def case(self, random: random.Random, folder: Path) -> ConfigCase | ParseCase:
        chance = random.random()
        if chance < 0.45:
            content = self._file(random, CONFIG)
            return self._with_file(random, folder / "mine.yaml", content, "--config")
        attention = {**ATTENTION, "default": self._default(random)}
        if chance < 0.65:
            name = random.choice(("attention.yaml", "attention.json", "attention.yml"))
            return self._with_file(random, folder / name, self._file(random, attention), "--attention-config")
        if chance < 0.8:
            text = self._file(random, attention).decode(errors="surrogateescape")[:100_000]
            return ConfigCase(
                ("generate", "--dry-run", "a ring", f"--attention-config={text}"), text.encode(errors="replace")
            )
        return ParseCase(self._python(random, attention))

    def _default(self, random: random.Random) -> Any:
        backend = random.choice(list(OPTIONS))
        return {"backend": backend, "extra": OPTIONS[backend]}

    def _file(self, random: random.Random, value: Any) -> bytes:
        for _ in range(random.choice((0, 1, 1, 2, 4))):
            value = mutate_value(random, value)
        if random.random() < 0.5:
            content = to_json(value)
        else:
            try:
                content = yaml.safe_dump(value).encode(errors="surrogateescape")
            except (yaml.YAMLError, UnicodeError, RecursionError):
                content = to_json(value)
        chance = random.random()
        if chance < 0.25:
            text = content.decode(errors="surrogateescape")
            content = mutate_text(random, text).encode(errors="surrogatepass")
        elif chance < 0.4:
            content = random.choice((b"", content)) + random.choice(YAML_PIECES).encode()
        elif chance < 0.45:
            content = random.choice(
                (b"\xff\xfe" + content, b"\0" * 100, content.decode(errors="replace").encode("utf-16"))
            )
        return content

    def _with_file(self, random: random.Random, path: Path, content: bytes, flag: str) -> ConfigCase:
        path.write_bytes(content)
        name = random.choice((path.name,) * 12 + ("/dev/zero", ".", "missing.yaml", "n" * 300 + ".yaml"))
        more = random.choice(((), (), ("--set", random.choice(STRANGE_TEXTS)), ("--preset", "tiny")))
        return ConfigCase(("generate", "--dry-run", "a ring", flag, name, *more), content)

    def _python(self, random: random.Random, value: Any) -> Any:
        chance = random.random()
        if chance < 0.2:
            text = random.choice(STRANGE_TEXTS)
            loop: list[Any] = [1]
            loop.append(loop)
            return random.choice(
                (
                    {"default": {"backend": "sliding_tile_attn", "extra": {"window": loop}}},
                    {"window": loop}, {"schedule": loop}, {"per_role": {"self": {"extra": {"a": loop}}}}, loop,
                    {"schedule": [{"steps": "9" * 5000, "backend": "fa"}]}, {"schedule": [{"steps": 10**5000}]},
                    {"schedule": [{"layers": loop}]}, {"default": 10**5000}, {10**5000: 1}, {b"a": 1}, b"fa", object(),
                    {"per_role": 3}, {"per_role.self.extra.a": 1, "per_role.self": 3},
                    {"default": 3, "default.extra.a": 1},
                    {"per_role": {("self",): "fa"}}, {"default": {"extra": 3}}, {"default": {"backend": ["fa"]}},
                    {"default": {"backend": "sliding_tile_attn", "extra": {random.choice(PATH_OPTIONS): text}}},
                )
            )  # fmt: skip
        if chance < 0.4:
            return {random.choice(DOTTED): strange_value(random), random.choice(DOTTED): strange_value(random)}
        if chance < 0.5:
            return random.choice(STRANGE_TEXTS)
        for _ in range(random.choice((1, 2, 4))):
            value = mutate_value(random, value)
        return value
