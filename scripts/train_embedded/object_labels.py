"""Which object each word and each place belongs to: the targets of the two auxiliary losses.

Labels are int64 or int16 with `IGNORED` where nothing is to be predicted; attributes are in the order of ATTRIBUTES.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BatchEncoding

from diffusion_runtime.quality.shapes.attributes import COLOUR_NAMES, MOTION_NAMES, SHAPE_NAMES
from scripts.train_embedded.world_parts import Captioned, Scenes

Vocabulary = dict[str, tuple[str, ...]]
"""The names of every attribute of an object, by the attribute; a cell of nothing is a further class of the first."""
SHAPES_VOCABULARY: Vocabulary = {"colour": COLOUR_NAMES, "shape": SHAPE_NAMES, "motion": MOTION_NAMES}
ATTRIBUTES = tuple(SHAPES_VOCABULARY)
NUM_CLASSES = tuple(map(len, SHAPES_VOCABULARY.values()))
IGNORED = -100
NOTHING_COLOUR = len(COLOUR_NAMES)
"""The class of a cell without an object in `shapes`, in place of a colour."""
CELL_NOTHING, CELL_IGNORED = 0, 255
TOUCHED = 0.02
"""Coverage from which on an object is in a cell."""


def token_labels(
    captions: Sequence[Captioned], encoded: BatchEncoding, vocabulary: Vocabulary = SHAPES_VOCABULARY
) -> Tensor:
    """[captions, tokens, attributes] int16: the attributes of the object in whose words a token stands.

    `encoded` needs offset_mapping. Attributes that a caption leaves out, and tokens of no object, are IGNORED.
    """
    offsets = np.asarray(encoded["offset_mapping"])
    begin, end = offsets[..., 0], offsets[..., 1]
    numbers = {attribute: {name: index for index, name in enumerate(names)} for attribute, names in vocabulary.items()}
    labels = np.full((*begin.shape, len(vocabulary)), IGNORED, dtype=np.int16)
    for row, caption in enumerate(captions):
        for one, (first, past) in zip(caption.attributes.objects, caption.spans, strict=True):
            inside = (begin[row] >= first) & (end[row] <= past) & (end[row] > begin[row])
            labels[row, inside] = [known.get(getattr(one, attribute), IGNORED) for attribute, known in numbers.items()]
    return torch.from_numpy(labels)


def latent_frames(covered: Tensor) -> Tensor:
    """The greatest coverage of the frames of each latent frame: [B, T, ...] to [B, t, ...], frame 0 alone."""
    first, rest = covered[:, :1], covered[:, 1:]
    if rest.shape[1]:
        first = torch.cat([first, rest.unflatten(1, (-1, 4)).amax(dim=2)], dim=1)
    return first


def object_map(covered: Tensor) -> Tensor:
    """Each object's coverage [B, 2, T, H, W] to one cell a token, [B, t, H / 16, W / 16] uint8.

    CELL_NOTHING, 1 or 2 for the object of slot 0 or 1, CELL_IGNORED where both are. A token is 2x2 latents of 8x8.
    """
    first, second = (latent_frames(F.max_pool2d(covered[:, slot], 16)) > TOUCHED for slot in (0, 1))
    cells = first.to(torch.uint8) + 2 * second.to(torch.uint8)
    return cells.masked_fill(first & second, CELL_IGNORED)


def scene_labels(scenes: Scenes, *, image: bool, attributes: Sequence[str] = ATTRIBUTES) -> Tensor:
    """[B, 2, attributes] int16: the attributes of each slot; an image shows no motion."""
    labels = [getattr(scenes, attribute) for attribute in attributes]
    if image:
        labels[attributes.index("motion")] = torch.full_like(labels[0], IGNORED)
    return torch.stack(labels, dim=2).to(torch.int16)


def cell_labels(cells: Tensor, slots: Tensor, nothing: int = NOTHING_COLOUR) -> Tensor:
    """`object_map` [B, t, h, w] and `scene_labels` [B, 2, n] to one label a token: [B, t * h * w, n] int64.

    nothing: the class of a cell without an object, in place of the first attribute.
    """
    count, num_attributes = cells.shape[0], slots.shape[2]
    table = torch.full((count, 4, num_attributes), IGNORED, dtype=torch.int64, device=cells.device)
    table[:, CELL_NOTHING, 0] = nothing
    table[:, 1:3] = slots
    rows = cells.flatten(1).long().clamp(max=3)
    return table.gather(1, rows[..., None].expand(-1, -1, num_attributes))
