"""Every command line of README, CONTRIBUTING and docs/: read by the real parser, and resolved as far as a CPU can."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import typer
from cli_support import Command
from fenced_blocks import NOT_RUN, ROOT, Block, blocks
from PIL import Image
from sample_media import make_media

from diffusion_runtime.benchmark.step_model import published_files
from diffusion_runtime.cli.flag_syntax import rewrite_dotted_flags
from diffusion_runtime.cli.verbs import program
from diffusion_runtime.comparison import compare, setting
from diffusion_runtime.media.audio import Audio, write_wav
from diffusion_runtime.memory.plan import MemoryDemand, PartSize
from diffusion_runtime.models.model_sources import find_configs
from diffusion_runtime.models.published import published_models

pytestmark = pytest.mark.filterwarnings("ignore")

SHELL = blocks("sh", "bash")
OURS = ("diffusion-runtime", ".venv/bin/diffusion-runtime")
# Verbs that end at once, and those whose work is the measurement itself: these are parsed.
QUICK, PARSED = (
    ("models", "backends", "explain"),
    ("batch", "bench", "calibrate", "doctor", "info", "serve", "tune", "verify"),
)
# Of `models`, what needs the network or the reader's files.
PARSED_OF_MODELS = ("download", "convert")
# Other programs of the blocks: setting up, and building what is only there as source.
OTHER_PROGRAMS = {
    *("python3", "pip", "git", "cd", ".", "source", "scripts/check", "scripts/check_distribution"),
    *("scripts/check_resolution", "export", "unset"),
    *("apt-get", "curl", "torchrun", "docker", "ffplay", "..."),
}
# Blocks that no CPU can run, not even as a dry run.
NUM_NOT_RUN = 8
# What only the reader has: weights, a placeholder in capitals, what an earlier command of the page would have written,
# several GPUs, a real run to profile.
OF_THE_READER = re.compile(
    r"(.*\.(safetensors|gguf|pt)(@.*)?|.*\b[A-Z][A-Z_0-9]{3,}\b.*|.*file=wan\.json|--num-gpus|--ring-degree|--profile|--attention-plot)$",
    re.DOTALL,
)


def commands() -> Iterator[tuple[Block, dict[str, str], list[str]]]:
    """(block, environment, words) of every command of a block that is run."""
    for block in SHELL:
        for words in block.command_lines() if block.is_run else ():
            environment = {}
            while words and (found := re.fullmatch(r"([A-Z_]+)=(.*)", words[0])):
                environment[found[1]] = found[2]
                words = words[1:]
            if ">" in words:
                words = words[: words.index(">")]
            if words:
                yield block, environment, words


def our_arguments(words: list[str]) -> list[str] | None:
    """What follows the name of our command, in whichever way it is started; None for another program."""
    if words[0] in OURS:
        return words[1:]
    if "diffusion_runtime" in words and words[words.index("diffusion_runtime") - 1] == "-m":
        return words[words.index("diffusion_runtime") + 1 :]
    return None


@functools.cache
def parser() -> Any:
    return typer.main.get_command(program())


def parse(arguments: list[str]) -> None:
    """Read by the parser, down to the last verb, without running it. Raises what the parser raises."""
    found: Any = parser()
    context, rest = None, rewrite_dotted_flags(arguments)
    while True:
        if hasattr(found, "commands"):
            context = found.make_context(
                "diffusion-runtime", rest[:1] if context is None else [rest[0]], parent=context
            )
            found, rest = found.commands[rest[0]], rest[1:]
        else:
            found.make_context("", list(rest), parent=context)
            return


def is_of_the_reader(arguments: list[str]) -> bool:
    """Whether it needs what is not here: files of the reader's, or a model that is not in the package."""
    if any(OF_THE_READER.match(word) for word in arguments):
        return True
    if "--model-path" not in arguments:
        return False
    name = arguments[arguments.index("--model-path") + 1]
    try:
        find_configs(name)
    except Exception:  # which one says why it is not here, and that is all this asks
        return "/" in name
    return False


@pytest.fixture
def resolved(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`command`, whose plans of memory count nothing: that is counted elsewhere, at a second per model."""
    nothing = MemoryDemand(PartSize("text", 1), (PartSize("transformer", 1),), PartSize("vae", 1), 1, 1, 1)
    monkeypatch.setattr("diffusion_runtime.loading.memory_planning.memory_demand", lambda *_, **__: nothing)
    return command


def write_inputs(block: Block, arguments: list[str]) -> None:
    """What a command names: pictures and a clip of the model's own size, prompts, the page's YAML, a ControlNet."""
    sizes = {model.name: model.request for model in published_models()}
    request = next((sizes[word] for word in arguments if word in sizes), {})
    width, height = request.get("width", 512), request.get("height", 512)
    yaml = iter(each.text for each in blocks("yaml") if each.document == block.document)
    if "--controlnet-path" in arguments:
        # The config of the published one: five blocks like those of the transformer.
        folder = Path(arguments[arguments.index("--controlnet-path") + 1])
        folder.mkdir(exist_ok=True)
        config = published_files(arguments[arguments.index("--model-path") + 1])["transformer/config.json"]
        config = {**config, "_class_name": "QwenImageControlNetModel", "num_layers": 5}
        (folder / "config.json").write_text(json.dumps(config))
    if "--video-path" in arguments:
        # A mask has the size of its video.
        width, height = width // 16 * 2, height // 16 * 2
    # Without the frame and the strength of --condition-at.
    words = [re.sub(r"^\d+:|@[\d.]+$", "", word) for word in arguments]
    # A file that is named twice is one file.
    named = dict.fromkeys(word for word in words if re.fullmatch(r"[\w-]+\.(png|mp4|txt|yaml|jsonl|csv|wav)", word))
    for name in named:
        if name.endswith(".png"):
            Image.new("RGB", (width, height), "white").save(name)
        elif name.endswith(".mp4") and {"--video-path", "--init-path"} & set(arguments):
            make_media(request.get("num_frames", 5), height, width).save(name)
        elif name.endswith(".mp4") and "--reference" in arguments:
            make_media(24, 64, 96).save(name)
        elif name.endswith(".txt"):
            Path(name).write_text("a red circle\na blue star\n")
        elif name.endswith(".jsonl"):
            Path(name).write_text('{"prompt": "a red circle"}\n')
        elif name.endswith(".csv"):
            Path(name).write_text("prompt,seed\na red circle,1\n")
        elif name.endswith(".wav"):
            write_wav(Audio(numpy.zeros((1, 20 * 16_000), dtype=numpy.float32), 16_000), Path(name))
        elif name.endswith(".yaml"):
            Path(name).write_text(next(yaml))


def test_commands_resolve(resolved: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` as a dry run, quick verbs as they stand, `compare` up to its first clip; the rest is parsed."""
    reached: list[int] = []

    def opened(settings: Any, *_: object) -> None:
        reached.append(len(setting.open_settings(settings)))
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "compare", opened)
    failures: list[str] = []
    done: Counter[str] = Counter()
    known: set[tuple[str, ...]] = set()
    for block, environment, words in commands():
        arguments = our_arguments(words)
        if arguments is None:
            continue
        verb = arguments[0]
        is_parsed = verb in PARSED or (verb == "models" and arguments[1:2] in [[each] for each in PARSED_OF_MODELS])
        if is_parsed or is_of_the_reader(arguments):
            done["parsed"] += 1
            try:
                parse(arguments)
            except Exception as error:  # collected: one run names every line that is wrong
                failures.append(f"{block.place}: {' '.join(words)}\n    {error}")
            continue
        key = (*environment, *arguments)
        if key in known:
            continue
        known.add(key)
        write_inputs(block, arguments)
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            dry = ["--dry-run"] if verb == "generate" and "--dry-run" not in arguments else []
            result = resolved(*arguments, *dry)
        done[verb] += 1
        if result.code != (130 if verb == "compare" else 0):
            failures.append(f"{block.place}: {' '.join(words)}\n    exit code {result.code}: {result.said[-300:]}")
    assert not failures, "\n".join(failures)
    assert done["generate"] > 40
    assert done["compare"] == len(reached) > 2
    assert done["explain"] > 0


def test_examples_of_help_are_read() -> None:
    """What every `--help` ends with: read by the parser, and the models by their names."""
    found = 0
    for module in sorted((ROOT / "diffusion_runtime" / "cli").glob("*.py")):
        for line in module.read_text(encoding="utf-8").splitlines():
            # `models` alone, and with a flag, is a group without a verb.
            if not line.startswith("diffusion-runtime ") or re.fullmatch(r"diffusion-runtime models( -.*)?", line):
                continue
            arguments = shlex.split(line)[1:]
            parse(arguments[: arguments.index(">")] if ">" in arguments else arguments)
            if "--model-path" in arguments:
                assert find_configs(arguments[arguments.index("--model-path") + 1]).path.is_dir(), line
            found += 1
    assert found > 30


def test_blocks_that_are_not_run_say_why() -> None:
    marked = [block.place for block in blocks("sh", "bash", "python", "yaml") if not block.is_run]
    assert len(marked) == NUM_NOT_RUN, marked
    for block in blocks("sh", "bash", "python", "yaml"):
        # The mark is the first line, or none: a mark further down would mark nothing.
        assert block.text.count(NOT_RUN) == (not block.is_run), block.place


def test_other_programs_are_known() -> None:
    """Modules that are started exist, extras that are installed are declared, and nothing else is typed."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for block, _, words in commands():
        if our_arguments(words) is not None:
            continue
        if words[0] == "python" and words[1] == "-m":
            assert importlib.util.find_spec(words[2]) is not None, f"{block.place}: {words[2]}"
        elif words[0] == "python" and words[1] not in ("-c", "setup.py"):
            assert (ROOT / words[1]).is_file(), f"{block.place}: {words[1]}"
        else:
            assert words[0] in OTHER_PROGRAMS or words[0].endswith("/pip") or words[0] == "python", (block.place, words)
        for extra in re.findall(r"diffusion-runtime\[([\w,]+)\]", " ".join(words)):
            assert set(extra.split(",")) <= set(extras), f"{block.place}: {extra}"
