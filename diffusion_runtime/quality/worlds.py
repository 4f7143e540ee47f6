"""Worlds of the embedded models: seeded prompts, and checks of whether a clip shows what its prompt names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from diffusion_runtime.quality.emoji import judge as emoji_judge
from diffusion_runtime.quality.emoji import prompt_reading as emoji_reading
from diffusion_runtime.quality.emoji import prompts as emoji_prompts
from diffusion_runtime.quality.emoji.detector import Detector, load_detector
from diffusion_runtime.quality.shapes import checker, prompt_reading, prompts
from diffusion_runtime.quality.shapes.prompts import PROMPT_KINDS, PromptKind
from diffusion_runtime.quality.shapes.scoring import Proportion, wilson

# The network of the judge of `emoji`, int8.
EMOJI_DETECTOR = Path(__file__).parents[1] / "assets" / "emoji_judge" / "detector.safetensors"


class Verdict(Protocol):
    """Parts of a prompt that a clip gets right: a dataclass of booleans."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def joint(self) -> bool:
        """Return whether the clip counts as right."""


class EvaluationPrompt(Protocol):
    """A prompt, the attributes of a right clip, and the seed of its noise."""

    @property
    def text(self) -> str: ...

    @property
    def attributes(self) -> Any: ...

    @property
    def seed(self) -> int: ...


class EvaluationPrompts(Protocol):
    """Returns the first `count` prompts of a kind (PROMPT_KINDS); image: of single frames, which show no motion."""

    def __call__(
        self, kind: PromptKind, count: int, *, seed: int = ..., image: bool = ...
    ) -> Sequence[EvaluationPrompt]: ...


@dataclass(frozen=True)
class World:
    """A world by its model's name. read_prompt: text -> attributes, None for other words than the model knows; judge:
    (attributes, frames [frames, height, width, 3] uint8, on any device) -> verdict. lacks: why clips cannot be judged
    in this installation, None where they can. has_network: whether `judge` runs a network, which a GPU speeds up."""

    name: str
    read_prompt: Callable[[str], Any]
    judge: Callable[[Any, Tensor], Verdict]
    evaluation_prompts: EvaluationPrompts
    lacks: Callable[[], str | None] = lambda: None
    has_network: bool = False

    def judge_on(self, device: torch.device, attributes: Any, frames: Tensor) -> Verdict:
        """Judge a clip on `device` where a network does it, else where its frames are."""
        return self.judge(attributes, frames.to(device) if self.has_network else frames)

    def prompt_set(self, count: int, seed: int) -> list[EvaluationPrompt]:
        """Return `count` prompts, of one object, two objects and combinations held out of training by turns; a shorter
        set is the start of a longer one."""
        each = -(-count // len(PROMPT_KINDS))
        kinds = [self.evaluation_prompts(kind, each, seed=seed) for kind in PROMPT_KINDS]
        return [prompt for together in zip(*kinds, strict=True) for prompt in together][:count]


@dataclass(frozen=True)
class Wanted:
    """Requirements of a clip: attributes that it must show."""

    world: World
    attributes: Any

    def judge(self, frames: Tensor) -> Verdict:
        """Compare a clip, uint8 [frames, height, width, 3], with it."""
        return self.world.judge(self.attributes, frames)


def wanted_of(model: str, prompt: str) -> Wanted | None:
    """Return what a prompt's clip must show; None for a prompt that names anything else than the model was trained on,
    and for models without a world, or without its judge here."""
    world = WORLDS.get(model)
    attributes = None if world is None or world.lacks() is not None else world.read_prompt(prompt)
    return None if world is None or attributes is None else Wanted(world, attributes)


def proportions(verdicts: Sequence[Verdict]) -> dict[str, Proportion]:
    """Return the share that is right, with its 95 % interval, by part and `joint`."""
    total = len(verdicts)
    parts = {name: sum(asdict(each)[name] for each in verdicts) for name in verdicts[0].__dataclass_fields__}
    return {name: wilson(right, total) for name, right in (*parts.items(), ("joint", sum(v.joint for v in verdicts)))}


@functools.cache
def _detector(device: str) -> Detector:
    return load_detector(EMOJI_DETECTOR, device)


def _judge_emoji(attributes: Any, frames: Tensor) -> Verdict:
    return emoji_judge.judge(attributes, emoji_judge.read_clips(_detector(str(frames.device)), frames[None])[0])


def _lacks_detector() -> str | None:
    if EMOJI_DETECTOR.is_file():
        return None
    return f"the network of its judge, which comes with its model, is missing: expected {EMOJI_DETECTOR}"


WORLDS = {
    world.name: world
    for world in (
        World("shapes", prompt_reading.read_prompt, checker.check_clip, prompts.evaluation_prompts),
        World(
            "emoji",
            emoji_reading.read_prompt,
            _judge_emoji,
            emoji_prompts.evaluation_prompts,
            _lacks_detector,
            has_network=True,
        ),
    )
}
