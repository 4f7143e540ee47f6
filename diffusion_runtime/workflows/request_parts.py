"""The request, files and LoRAs that a workflow asks for, while they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffusion_runtime.models.published import PublishedModel
from diffusion_runtime.workflows.evaluation import Evaluation, NotSupportedError, Verdict
from diffusion_runtime.workflows.graph import Node
from diffusion_runtime.workflows.input_files import found_input
from diffusion_runtime.workflows.known_models import KnownModel
from diffusion_runtime.workflows.values import (
    Lora,
    PictureValue,
    SoundValue,
    Weights,
)


@dataclass
class RequestParts:
    """A request while it is made: fields, files and LoRAs so far, and what was replaced (evaluation)."""

    evaluation: Evaluation
    model: KnownModel
    published: PublishedModel
    request: dict[str, Any]
    runtime: dict[str, Any]
    files: dict[str, Weights]
    loras: list[tuple[Lora, str]]
    inputs: list[tuple[Node, str]]

    def replaced(self, node: Node, remark: str) -> None:
        self.evaluation.note(node, Verdict.REPLACED, remark)

    def file(self, picture: PictureValue | SoundValue) -> str:
        """Return the path of an input file, or its name where it is not here, and note what changed the picture."""
        if picture.file is None:
            raise NotSupportedError(
                "an image that another part of the workflow makes: run that part first, and give its file by "
                "--set NODE.image=FILE",
                picture.node,
            )
        if isinstance(picture, PictureValue):
            for node in picture.changed_by:
                if node.kind == "LTXVPreprocess" and isinstance(node.inputs.get("img_compression"), int):
                    self.request["image_crf"] = node.inputs["img_compression"]
                else:
                    self.replaced(node, "the resizing of the model's own pipeline")
        path = found_input(picture.file, self.evaluation.places)
        self.inputs.append((picture.node, picture.file))
        return picture.file if path is None else str(path)

    def one_file(self, picture: PictureValue) -> str:
        if picture.parts:
            raise NotSupportedError(f"{len(picture.parts)} pictures where one is taken", picture.node)
        return self.file(picture)

    def picture_file(self, picture: PictureValue) -> str:
        """Return the path of one picture. Raises NotSupportedError for a video, and several."""
        if picture.is_film:
            raise NotSupportedError(
                "a video where one picture is taken: give a file of its frame (ffmpeg -i VIDEO -frames:v 1 FRAME.png) "
                "to a LoadImage",
                picture.node,
            )
        return self.one_file(picture)
