"""The `shapes` data set: seeded procedural clips with captions, evaluation prompts, and the checker.

Captions name colour, shape, motion and background; the checker reads the same four off a clip and never sees the
prompt.
"""

from diffusion_runtime.quality.shapes.attributes import (
    BACKGROUND_NAMES,
    COLOUR_NAMES,
    COLOURS,
    HELD_OUT_COMBINATIONS,
    MOTION_NAMES,
    SHAPE_NAMES,
    ObjectAttributes,
    SceneAttributes,
    is_held_out,
)
from diffusion_runtime.quality.shapes.captions import Caption, CaptionSettings, write_caption
from diffusion_runtime.quality.shapes.checker import Reading, Verdict, check_clip, judge, read_clip
from diffusion_runtime.quality.shapes.prompts import PROMPT_KINDS, EvaluationPrompt, PromptKind, evaluation_prompts
from diffusion_runtime.quality.shapes.scene import SceneBatch, SceneSettings, sample_scenes
from diffusion_runtime.quality.shapes.scoring import Accuracy, Proportion, evaluate, summarise, wilson
from scripts.shapes.render import render

__all__ = [
    "BACKGROUND_NAMES",
    "COLOURS",
    "COLOUR_NAMES",
    "HELD_OUT_COMBINATIONS",
    "MOTION_NAMES",
    "PROMPT_KINDS",
    "SHAPE_NAMES",
    "Accuracy",
    "Caption",
    "CaptionSettings",
    "EvaluationPrompt",
    "ObjectAttributes",
    "PromptKind",
    "Proportion",
    "Reading",
    "SceneAttributes",
    "SceneBatch",
    "SceneSettings",
    "Verdict",
    "check_clip",
    "evaluate",
    "evaluation_prompts",
    "is_held_out",
    "judge",
    "read_clip",
    "render",
    "sample_scenes",
    "summarise",
    "wilson",
    "write_caption",
]
