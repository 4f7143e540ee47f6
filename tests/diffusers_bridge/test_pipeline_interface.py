"""What is said of every pipeline class of the installed diffusers, against its own signature and source."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

import pytest
from tables import table

from diffusion_runtime.diffusers_bridge.frames import PICTURE_FIELDS
from diffusion_runtime.diffusers_bridge.pipeline_interface import ALSO_NEEDED, PipelineInterface
from diffusion_runtime.diffusers_bridge.request_rules import PassthroughRules, signature_defaults
from diffusion_runtime.diffusers_bridge.size_rules import SizeRules
from diffusion_runtime.errors import RequestError
from diffusion_runtime.request.generation_request import INPUT_FIELDS, GenerationRequest

# What transformers and diffusers say when everything of theirs is imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
    pytest.mark.filterwarnings("ignore:.*requires torchvision"),
]


@functools.cache
def every_pipeline() -> Mapping[str, Any]:
    """Classes by name, those that are there only to say which package is missing left out."""
    import diffusers

    found = {name: getattr(diffusers, name) for name in dir(diffusers) if "Pipeline" in name}
    base = diffusers.DiffusionPipeline
    return {name: kind for name, kind in found.items() if inspect.isclass(kind) and issubclass(kind, base)}


def returned_fields(pipeline_class: Any) -> set[str]:
    """The keywords of the `SomethingOutput(...)` that the source of a call returns; empty where it returns none."""
    call = inspect.unwrap(pipeline_class.__call__)
    if not inspect.isfunction(call):
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(call)))
    made = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and isinstance(node.value, ast.Call)]
    named = [node for node in made if ast.unparse(node.func).endswith("Output")]
    return {keyword.arg for node in named for keyword in node.keywords if keyword.arg is not None}


def test_every_class_is_read_as_it_is_written() -> None:
    wrong = []
    assert len(every_pipeline()) > 200
    for name, pipeline_class in every_pipeline().items():
        interface = PipelineInterface.of(pipeline_class)
        signature = inspect.signature(pipeline_class.__call__).parameters
        plain = [each for each in signature.values() if not each.kind.name.startswith("VAR") and each.name != "self"]
        if [*interface.parameters.items()] != [(each.name, each.default) for each in plain]:
            wrong.append(f"{name}: parameters")
        if not {each.name for each in plain if each.default is inspect.Parameter.empty} <= {*interface.needed}:
            wrong.append(f"{name}: misses a required argument")
        if not {*interface.needed} <= {*interface.parameters}:
            wrong.append(f"{name}: needs what it does not take")
        if not returned_fields(pipeline_class) <= {*(interface.output or ())}:
            wrong.append(f"{name}: returns {returned_fields(pipeline_class)}, said {interface.output}")
        returns_picture = bool(returned_fields(pipeline_class) & {*PICTURE_FIELDS})
        if returned_fields(pipeline_class) and returns_picture == any(
            "returns" in each for each in interface.refusals()
        ):
            wrong.append(f"{name}: picture {returns_picture}, {interface.refusals()}")
    assert wrong == []


def test_every_class_that_can_run_takes_a_plain_request() -> None:
    """Nothing but a RequestError that names the missing image comes of a prompt, for any class that is not refused."""
    wrong = []
    for name, pipeline_class in every_pipeline().items():
        interface = PipelineInterface.of(pipeline_class)
        if interface.refusals():
            continue
        rules = PassthroughRules(interface, SizeRules(interface), signature_defaults(interface), {}, lambda _: None)
        try:
            resolved = rules.resolve(GenerationRequest(prompt="a"))
        except RequestError as error:
            if not any(interface.needs(field) and field in str(error) for field in INPUT_FIELDS):
                wrong.append(f"{name}: {error}")
            continue
        # Every argument that has no default is given.
        given = {*rules.arguments(resolved), "generator", "output_type"}
        wrong += [f"{name}: {each} is missing" for each in interface.needed if each not in given]
    assert wrong == []


@table(
    ("name", "told"),
    [
        ("WanVideoToVideoPipeline", ""),
        ("WanVACEPipeline", ""),
        ("WanAnimatePipeline", "it needs pose_video and face_video"),
        ("CogVideoXFunControlPipeline", ""),
        ("AnimateDiffControlNetPipeline", ""),
        ("EasyAnimateControlPipeline", ""),
        ("AnimateDiffVideoToVideoControlNetPipeline", "it needs conditioning_frames"),
        ("Cosmos2_5_TransferPipeline", "it needs controls"),
        ("KandinskyV22Pipeline", "it needs image_embeds and negative_image_embeds"),
        ("StableDiffusionControlNetInpaintPipeline", "it needs control_image"),
        ("AceStepPipeline", "it returns audios, and only pictures and videos"),
        ("LongCatAudioDiTPipeline", "it returns audios"),
        ("StableCascadePriorPipeline", "it returns image_embeddings"),
        ("MarigoldDepthPipeline", "it returns prediction"),
        ("StableVideoDiffusionPipeline", "it takes no prompt"),
        ("Kandinsky5T2IPipeline", ""),
        ("Kandinsky5I2IPipeline", ""),
        ("TextToVideoZeroPipeline", ""),
        ("KandinskyCombinedPipeline", ""),
        ("StableDiffusionInpaintPipeline", ""),
        ("QwenImageControlNetPipeline", ""),
        ("LTXConditionPipeline", ""),
        ("WanPipeline", ""),
    ],
)
def test_what_is_said_of_single_classes(name: str, told: str) -> None:
    reasons = PipelineInterface.of(every_pipeline()[name]).refusals()
    assert told in "; ".join(reasons)
    assert bool(reasons) == bool(told)


def test_what_a_pipeline_makes_and_starts_from() -> None:
    def of(name: str) -> PipelineInterface:
        return PipelineInterface.of(every_pipeline()[name])

    videos = ("WanVideoToVideoPipeline", "WanAnimatePipeline", "SanaVideoPipeline", "TextToVideoZeroPipeline")
    assert [of(name).makes_video for name in videos] == [True] * 4
    assert not of("Kandinsky5T2IPipeline").makes_video
    assert of("SanaVideoPipeline").parameter("num_frames") == "frames"
    starts = ("WanImageToVideoPipeline", "StableDiffusionImg2ImgPipeline", "QwenImageEditPipeline", "FluxFillPipeline")
    assert [of(name).needs("image_path") for name in starts] == [True] * 4
    assert not of("FluxKontextPipeline").needs("image_path")
    assert not of("LTXConditionPipeline").needs("image_path")
    assert of("FluxFillPipeline").needs("mask_path")
    for name, parameter in (
        ("WanVACEPipeline", "video"),
        ("CogVideoXFunControlPipeline", "control_video"),
        ("AnimateDiffControlNetPipeline", "conditioning_frames"),
    ):
        assert of(name).parameter("video_path") == parameter
        assert of(name).takes_frames("video_path")
    assert of("EasyAnimateControlPipeline").tensors == ("control_video",)
    assert of("CogVideoXFunControlPipeline").tensors == ()
    assert (of("FluxControlPipeline").parameter("image_path"), of("FluxControlPipeline").needs("image_path")) == (
        "control_image",
        True,
    )


def test_the_table_of_inputs_says_nothing_that_a_class_says_itself() -> None:
    """An entry that the installed diffusers makes needless, or whose class or parameter is gone, is to be taken out."""
    stale = []
    for name, inputs in ALSO_NEEDED.items():
        kind = every_pipeline().get(name)
        bare = None if kind is None else PipelineInterface.of(type(f"{name}Itself", (kind,), {}))
        for each in inputs:
            if bare is None or each not in bare.parameters or each in bare.needed:
                stale.append((name, each))
    assert stale == []


def test_what_a_controlnet_computes_from_is_needed() -> None:
    named = ("AnimateDiffControlNetPipeline", "QwenImageControlNetPipeline", "StableDiffusionXLControlNetUnionPipeline")
    needed = [PipelineInterface.of(every_pipeline()[name]).needed for name in named]
    assert ["conditioning_frames" in needed[0], "control_image" in needed[1], "control_image" in needed[2]] == [
        True
    ] * 3
    found = {"control_image", "conditioning_frames"}
    assert not {name for name, inputs in ALSO_NEEDED.items() if "ControlNet" in name and found & {*inputs}}


def test_a_class_that_says_nothing_of_its_result_is_left_to_run() -> None:
    class Unknown:
        def __call__(self, prompt: str) -> Any:
            return dataclasses.make_dataclass("Anything", ["frames"])(prompt)

    interface = PipelineInterface.of(Unknown)
    assert interface.output is None
    assert interface.refusals() == []
