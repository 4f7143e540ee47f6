"""Auxiliary losses: labels lie where the objects are, the forward is the model's own, the text can be learnt."""

from __future__ import annotations

from random import Random

import pytest
import torch
from diffusers import WanTransformer3DModel

from scripts.shapes import SceneSettings, sample_scenes, write_caption
from scripts.shapes.render import render_float, render_slots
from scripts.train_embedded.architecture import (
    MAX_PROMPT_TOKENS,
    build_text_encoder,
    build_tokenizer,
    build_transformer,
    embed_prompts,
)
from scripts.train_embedded.auxiliary import HIDDEN_BLOCK, AttributeHead, ScoreLog, fade, predict_with_hidden
from scripts.train_embedded.object_labels import (
    CELL_IGNORED,
    IGNORED,
    NOTHING_COLOUR,
    cell_labels,
    object_map,
    scene_labels,
    token_labels,
)
from scripts.train_embedded.world import CAPTION_TOKENS


def test_coverage_by_slot_is_the_coverage_of_all_objects_taken_apart() -> None:
    scenes = sample_scenes(6, torch.Generator().manual_seed(2), SceneSettings(two_object_fraction=0.5))
    frames, covered = render_float(scenes, 5, 64)
    same_frames, by_slot = render_slots(scenes, 5, 64)
    assert torch.equal(frames, same_frames)
    assert torch.equal(covered, by_slot.amax(dim=1))
    assert by_slot.shape == (6, 2, 5, 64, 64)
    shown = by_slot.flatten(2).amax(dim=2) > 0.5
    assert torch.equal(shown.sum(dim=1), scenes.num_objects)


def test_object_map_names_the_object_in_each_token() -> None:
    scenes = sample_scenes(8, torch.Generator().manual_seed(4), SceneSettings(two_object_fraction=0.7))
    _, covered = render_slots(scenes, 9, 128)
    cells = object_map(covered)
    assert cells.shape == (8, 3, 8, 8)
    for row in range(8):
        for group, frames in enumerate(([0], [1, 2, 3, 4], [5, 6, 7, 8])):
            for y in range(8):
                for x in range(8):
                    patch = covered[row, :, frames, 16 * y : 16 * y + 16, 16 * x : 16 * x + 16]
                    first, second = (patch > 0.02).flatten(1).any(dim=1).tolist()
                    expected = CELL_IGNORED if first and second else 1 if first else 2 if second else 0
                    assert int(cells[row, group, y, x]) == expected
    assert {0, 1, 2, CELL_IGNORED} == set(cells.unique().tolist())


def test_cell_labels_are_the_attributes_of_the_object_that_is_there() -> None:
    scenes = sample_scenes(2, torch.Generator().manual_seed(0), SceneSettings(two_object_fraction=1.0))
    cells = torch.tensor([[[[0, 1], [2, 255]]], [[[2, 2], [0, 1]]]], dtype=torch.uint8)
    labels = cell_labels(cells, scene_labels(scenes, image=False))
    nothing, ignored = [NOTHING_COLOUR, IGNORED, IGNORED], [IGNORED] * 3
    table = torch.stack([scenes.colour, scenes.shape, scenes.motion], dim=2).tolist()
    assert labels[0].tolist() == [nothing, table[0][0], table[0][1], ignored]
    assert labels[1].tolist() == [table[1][1], table[1][1], nothing, table[1][0]]
    still = cell_labels(cells, scene_labels(scenes, image=True))
    assert still[..., 2].unique().tolist() == [IGNORED]
    assert torch.equal(still[..., :2], labels[..., :2])


def test_the_forward_with_hidden_states_is_the_models_own() -> None:
    torch.manual_seed(0)
    transformer = build_transformer()
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.05)
    arguments = (torch.randn(2, 16, 3, 8, 12), torch.tensor([100.0, 900.0]), torch.randn(2, 20, 128))
    seen: list[torch.Tensor] = []
    transformer.blocks[HIDDEN_BLOCK].register_forward_hook(lambda module, inputs, output: seen.append(output))
    expected = transformer(*arguments, return_dict=False)[0]
    predicted, hidden = predict_with_hidden(transformer, *arguments)
    assert torch.equal(predicted, expected)
    assert torch.equal(hidden, seen[0])
    assert hidden.shape == (2, 3 * 4 * 6, 256)
    assert float(expected.detach().std()) > 0.1
    assert isinstance(transformer, WanTransformer3DModel)


def test_ignored_labels_change_nothing_and_no_labels_give_no_loss() -> None:
    torch.manual_seed(0)
    head, hidden = AttributeHead(16, nothing=True), torch.randn(2, 6, 16, requires_grad=True)
    none = head(hidden, torch.full((2, 6, 3), IGNORED))
    assert (float(none.loss.detach()), none.total.tolist()) == (0.0, [0, 0, 0])
    none.loss.backward()
    assert float(hidden.grad.abs().max()) == 0.0
    labels = torch.randint(0, 5, (2, 6, 3))
    labels[:, 3:] = IGNORED
    partly, whole = head(hidden, labels), head(hidden[:, :3], labels[:, :3])
    torch.testing.assert_close(partly.loss, whole.loss)
    colours, shapes, motions = head.linear(hidden[:, :3]).flatten(0, 1).split((9, 5, 5), dim=1)
    parts = zip((colours, shapes, motions), labels[:, :3].flatten(0, 1).unbind(1), strict=True)
    expected = sum(torch.nn.functional.cross_entropy(logits, wanted) for logits, wanted in parts) / 3
    torch.testing.assert_close(partly.loss, expected)


def test_accuracy_counts_places_with_an_object_alone() -> None:
    head = AttributeHead(4, nothing=True)
    with torch.no_grad():
        head.linear.weight.zero_()
        head.linear.bias.copy_(torch.nn.functional.one_hot(torch.tensor(NOTHING_COLOUR), 19).float())
    labels = torch.tensor([[[NOTHING_COLOUR, IGNORED, IGNORED], [3, 0, 1], [5, 0, IGNORED]]])
    log = ScoreLog()
    log.add({"cell": head(torch.zeros(1, 3, 4), labels)})
    values = log.take()
    assert values["cell_accuracy"] == {"colour": 0.0, "shape": 1.0, "motion": 0.0}
    assert log.take() == {}


@pytest.mark.parametrize(("progress", "expected"), [(0.0, 1.0), (0.6, 1.0), (0.725, 0.5), (0.85, 0.0), (1.0, 0.0)])
def test_the_auxiliary_losses_fade(progress: float, expected: float) -> None:
    assert fade(progress) == pytest.approx(expected)


@pytest.mark.slow
def test_the_text_encoder_learns_which_words_belong_together() -> None:
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    text_encoder, head = build_text_encoder(len(tokenizer)), AttributeHead(128, nothing=False)
    optimizer = torch.optim.AdamW([*text_encoder.parameters(), *head.parameters()], lr=3e-3)
    generator, random, accuracies = torch.Generator().manual_seed(0), Random(0), []
    for _ in range(40):
        scenes = sample_scenes(48, generator, SceneSettings(two_object_fraction=0.75)).attributes()
        captions = [write_caption(scene, random) for scene in scenes]
        encoded = tokenizer(
            [caption.text for caption in captions],
            padding="max_length",
            max_length=CAPTION_TOKENS,
            return_offsets_mapping=True,
        )
        text = embed_prompts(text_encoder, torch.tensor(encoded["input_ids"]), MAX_PROMPT_TOKENS)
        score = head(text[:, :CAPTION_TOKENS], token_labels(captions, encoded).long())
        optimizer.zero_grad()
        score.loss.backward()
        optimizer.step()
        accuracies.append(float(score.right.sum() / score.total.sum()))
    assert accuracies[0] < 0.4
    assert sum(accuracies[-5:]) / 5 > 0.6
