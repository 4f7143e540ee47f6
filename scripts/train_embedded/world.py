"""The worlds that embedded models are trained on, side by side: what differs between them, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from diffusion_runtime.quality.emoji import attributes as emoji_attributes
from diffusion_runtime.quality.emoji import captions as emoji_captions
from diffusion_runtime.quality.emoji import scene as emoji_scene
from diffusion_runtime.quality.emoji.things import THING_NAMES
from diffusion_runtime.quality.shapes import captions as shapes_captions
from diffusion_runtime.quality.shapes import scene as shapes_scene
from scripts.emoji import render as emoji_render
from scripts.shapes.render import render_slots as render_shapes
from scripts.train_embedded.architecture import EMOJI_SIZES, SHAPES_SIZES, Sizes
from scripts.train_embedded.buckets import BUCKETS, EMOJI_BUCKETS, Bucket
from scripts.train_embedded.object_labels import SHAPES_VOCABULARY, Vocabulary
from scripts.train_embedded.vae_buckets import EMOJI_VAE, SHAPES_VAE, VaeRecipe
from scripts.train_embedded.world_parts import Captioned, Renderer, Sample

CAPTION_TOKENS = 40
"""Every caption fits; embeddings are zero-padded to the model's own length later."""


@dataclass(frozen=True)
class World:
    """Everything that the training of one embedded model takes of its subject."""

    name: str
    vocabulary: Vocabulary
    """The attributes of objects that captions name, and the names of each."""
    sizes: Sizes
    hidden_block: int
    """Index of the block whose output must tell the objects: blocks are left to act on it."""
    buckets: tuple[Bucket, ...]
    vae: VaeRecipe
    two_object_fraction: float
    sample: Sample
    write_caption: Callable[[Any, Random, bool], Captioned]
    """(what a scene shows, random, whether it is an image) -> a caption."""
    words: Callable[[], Sequence[str]]
    """The vocabulary of the tokenizer."""
    renderer: Callable[[bool], Renderer]
    """The renderer, compiled or not."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Request fields that an exported folder starts from."""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def _shapes_sample(count: int, generator: torch.Generator, two: float) -> shapes_scene.SceneBatch:
    return shapes_scene.sample_scenes(count, generator, shapes_scene.SceneSettings(two_object_fraction=two))


def _shapes_renderer(compiled: bool) -> Renderer:
    return torch.compile(render_shapes, dynamic=True) if compiled else render_shapes


def _emoji_sample(count: int, generator: torch.Generator, two: float) -> emoji_scene.SceneBatch:
    return emoji_scene.sample_scenes(count, generator, emoji_scene.SceneSettings(two_object_fraction=two))


def _emoji_renderer(compiled: bool) -> Renderer:  # noqa: ARG001
    # Eager: compiled, pictures over pictures become one kernel that computes the lower ones again for every tap. On an
    # H200 it did not compile in 150 s; on a CPU it compiles in 26 s and takes 2.5 times as long.
    return emoji_render.render_slots


SHAPES = World(
    name="shapes",
    vocabulary=SHAPES_VOCABULARY,
    sizes=SHAPES_SIZES,
    hidden_block=3,
    buckets=BUCKETS,
    vae=SHAPES_VAE,
    two_object_fraction=0.75,
    sample=_shapes_sample,
    write_caption=lambda scene, random, image: shapes_captions.write_caption(scene, random, image=image),
    words=shapes_captions.all_words,
    renderer=_shapes_renderer,
)
EMOJI = World(
    name="emoji",
    vocabulary={
        "thing": THING_NAMES,
        "motion": emoji_attributes.MOTION_NAMES,
        "size": emoji_attributes.SIZE_NAMES,
        "place": emoji_attributes.PLACE_NAMES,
    },
    sizes=EMOJI_SIZES,
    hidden_block=2,
    buckets=EMOJI_BUCKETS,
    vae=EMOJI_VAE,
    two_object_fraction=0.6,
    sample=_emoji_sample,
    write_caption=lambda scene, random, image: emoji_captions.write_caption(scene, random, image=image),
    words=emoji_captions.all_words,
    renderer=_emoji_renderer,
    defaults={
        "negative_prompt": "",
        "height": 256,
        "width": 256,
        "num_frames": 29,
        "fps": 12,
        "num_inference_steps": 10,
        "guidance_scale": 2.0,
    },
    presets={"draft": {"height": 128, "width": 128, "num_inference_steps": 8}, "default": {}},
)
WORLDS = {world.name: world for world in (SHAPES, EMOJI)}
