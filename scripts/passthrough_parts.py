"""Tiny components of diffusers' pipelines with random weights, by the types that a pipeline's constructor names."""

from __future__ import annotations

import functools
import inspect
import json
import sys
import tempfile
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from tiny_encoders import HIDDEN, tiny_clip, tiny_qwen2_5_vl, tiny_qwen3, tiny_t5  # noqa: E402
from tiny_families import WRITERS  # noqa: E402
from tiny_models import tiny_tokenizer  # noqa: E402
from tiny_qwen_image_21 import tiny_qwen3_vl  # noqa: E402

from diffusion_runtime.untrusted.yaml_text import read_yaml_file  # noqa: E402

PARTS = read_yaml_file(Path(__file__).with_suffix(".yaml"))
# Pipelines that run on the components of a native family's tiny folder, by how their names begin; the longest counts.
_FAMILIES = {
    "Wan": ("wan", {}),
    "WanImageToVideo": ("wan", {"condition": "clip and tokens"}),
    "Flux": ("flux1", {}),
    "FluxKontext": ("flux1", {"pipeline_class": "FluxKontextPipeline"}),
    "FluxFill": ("flux1", {"pipeline_class": "FluxFillPipeline", "condition_channels": 8}),
    "FluxControl": ("flux1", {"pipeline_class": "FluxControlPipeline", "condition_channels": 4}),
    "FluxControlNet": ("flux1", {}),
    "Flux2": ("flux2", {}),
    "QwenImage": ("qwen_image", {}),
    "QwenImageEdit": ("qwen_image", {"edits": "QwenImageEditPipeline"}),
    "QwenImageEditPlus": ("qwen_image", {"edits": "QwenImageEditPlusPipeline"}),
    "QwenImage21": ("qwen_image_21", {}),
    "HunyuanVideo": ("hunyuan_video", {}),
    "HunyuanVideoImageToVideo": ("hunyuan_video", {"image_condition": "latent_concat", "picture_size": 336}),
    "HunyuanVideo15": ("hunyuan_video_15", {}),
    "HunyuanVideo15ImageToVideo": ("hunyuan_video_15", {"starts_from_image": True}),
    "HunyuanSkyreels": ("hunyuan_video", {}),
    "LTX2": ("ltx2", {}),
    "ZImage": ("z_image", {}),
}
_MAX_TOKENS = 64


class NotBuiltError(Exception):
    """What of a pipeline there is no tiny component for."""


def build_pipeline(pipeline_class: Any) -> Any:
    """A pipeline of tiny components with random weights. Raises NotBuiltError, and what diffusers' classes raise."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        components = _components(pipeline_class)
    pipeline = pipeline_class(**components)
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval()
    return pipeline


def _components(pipeline_class: Any) -> dict[str, Any]:
    name = pipeline_class.__name__.removesuffix("Pipeline")
    known, changes = _family_components(name), _changes(name)
    hints = typing.get_type_hints(pipeline_class.__init__)
    optional = set(getattr(pipeline_class, "_optional_components", ()))
    made: dict[str, Any] = {}
    for argument, parameter in inspect.signature(pipeline_class.__init__).parameters.items():
        if argument == "self" or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if argument in known and argument not in changes:
            made[argument] = known[argument]
        elif argument == "requires_safety_checker":
            made[argument] = False
        elif argument in ("safety_checker", "feature_extractor", "image_encoder", "watermarker") and (
            argument in optional or "safety_checker" in argument
        ):
            made[argument] = None
        elif (
            parameter.default is inspect.Parameter.empty
            or argument in changes
            or argument.startswith(("text_encoder", "tokenizer"))
        ):
            made[argument] = _component(argument, hints.get(argument), changes.get(argument))
    return made


def _changes(name: str) -> Mapping[str, Any]:
    """The arguments of components that differ for a pipeline of this name."""
    entries = PARTS["pipelines"]
    named = [each for each in entries if name == each or name.startswith(each)]
    return entries[max(named, key=len)] if named else {}


def _family_components(name: str) -> Mapping[str, Any]:
    prefix = max((each for each in _FAMILIES if name.startswith(each)), key=len, default="")
    if not prefix:
        return {}
    return family_components(prefix)


def family_components(prefix: str) -> Mapping[str, Any]:
    """The components of the tiny folder of an entry of _FAMILIES, by argument; without the processor of pictures, which
    transformers makes of torchvision alone."""
    from diffusers import DiffusionPipeline

    family, options = _FAMILIES[prefix]
    write: Any = WRITERS[family]
    with tempfile.TemporaryDirectory() as temporary:
        folder = write(Path(temporary) / "model", **options)
        index = json.loads((folder / "model_index.json").read_text())
        stub = {"processor": _tokenizer_alone()} if "processor" in index else {}
        components = dict(DiffusionPipeline.from_pretrained(folder, **stub).components)
        return {name: each for name, each in components.items() if name != "processor"}


def _tokenizer_alone() -> Any:
    """A processor of pictures that makes none: for constructors that ask its tokenizer for the token of a picture."""
    from transformers import ProcessorMixin

    class TokenizerAlone(ProcessorMixin):
        def __init__(self) -> None:
            self.tokenizer = tiny_qwen2_5_vl(sees=True)[1]

        def apply_chat_template(self, *_: Any, **__: Any) -> list[list[int]]:
            return [[]]

    return TokenizerAlone()


def _component(argument: str, hint: Any, changed: Mapping[str, Any] | None) -> Any:
    """The first of the types of an argument that can be made."""
    if changed is not None and "_class" in changed:
        kind = _diffusers_class(changed["_class"])
        if kind is None:
            return ENCODERS[changed["_class"]](argument)
        return _model(kind, {key: value for key, value in changed.items() if key != "_class"})
    candidates = [each for each in (typing.get_args(hint) or (hint,)) if each is not type(None)]
    names = [getattr(each, "__name__", str(each)) for each in candidates]
    for name in names:
        kind = _diffusers_class(name)
        if kind is not None:
            return _model(kind, changed)
    for name in names:
        if name in ENCODERS:
            return ENCODERS[name](argument)
    raise NotBuiltError(f"no tiny {argument} of type {' or '.join(names)}")


def _diffusers_class(name: str) -> Any:
    import diffusers

    if name == "KarrasDiffusionSchedulers":
        return diffusers.DDIMScheduler
    found = getattr(diffusers, name, None)
    return found if inspect.isclass(found) and hasattr(found, "from_config") else None


def _model(kind: Any, changed: Mapping[str, Any] | None) -> Any:
    if kind.__name__.endswith("Scheduler"):
        return kind(**(changed or PARTS["components"].get(kind.__name__, {})))
    settings = PARTS["components"].get(kind.__name__) if changed is None else changed
    if settings is None:
        raise NotBuiltError(f"no tiny settings of {kind.__name__}")
    # A class that stands for several has more settings than the one that is built.
    return kind(**settings)


def _clip(_: str, *, projects: bool = False) -> Any:
    from transformers import CLIPTextModelWithProjection

    encoder, _ = tiny_clip()
    if not projects:
        return encoder
    config = encoder.config
    config.projection_dim = HIDDEN
    return CLIPTextModelWithProjection(config)


def _umt5(_: str) -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(vocab_size=len(tiny_tokenizer()), d_model=HIDDEN, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )


def _gemma2(_: str) -> Any:
    from transformers import Gemma2Config, Gemma2Model

    return Gemma2Model(Gemma2Config(**_decoder(), head_dim=8))


def _glm(_: str) -> Any:
    from transformers import GlmConfig, GlmModel

    return GlmModel(GlmConfig(**_decoder(), head_dim=8, pad_token_id=0))


def _bert(_: str) -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=len(tiny_tokenizer()), hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=512,
        )
    )  # fmt: skip


def _byt5(_: str) -> Any:
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def _llama(_: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder()))


def _smol(_: str) -> Any:
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    return SmolLM3ForCausalLM(SmolLM3Config(**_decoder(), pad_token_id=0))


def _decoder() -> dict[str, int]:
    return {
        "vocab_size": len(tiny_tokenizer()),
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _vision(_: str) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=HIDDEN, projection_dim=HIDDEN, num_hidden_layers=2, num_attention_heads=2, image_size=32,
        intermediate_size=48, patch_size=8,
    )  # fmt: skip
    return CLIPVisionModelWithProjection(config)


def _image_processor(_: str) -> Any:
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(crop_size=32, size=32)


def _siglip(_: str) -> Any:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=32,
            patch_size=8,
        )
    )  # fmt: skip


def _siglip2(_: str) -> Any:
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    return Siglip2VisionModel(
        Siglip2VisionConfig(
            hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_patches=16,
            patch_size=8,
        )
    )  # fmt: skip


def _siglip_processor(_: str) -> Any:
    from transformers import SiglipImageProcessor

    return SiglipImageProcessor(size={"height": 32, "width": 32})


def _siglip2_processor(_: str) -> Any:
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    return Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16)


def _qwen_processor(argument: str) -> Any:
    """Its tokenizer alone, for the pipelines that call it their tokenizer."""
    if argument != "tokenizer":
        raise NotBuiltError(f"its {argument} of pictures is made by torchvision, which this environment lacks")
    return _qwen_tokenizer(argument)


def _qwen_tokenizer(_: str) -> Any:
    """Its vocabulary is a part of that of every tiny Qwen."""
    tokenizer = tiny_qwen2_5_vl()[1]
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return tokenizer


ENCODERS: Mapping[str, Any] = {
    "CLIPTextModel": _clip,
    "CLIPTextModelWithProjection": functools.partial(_clip, projects=True),
    "CLIPTokenizer": lambda _: tiny_clip()[1],
    "T5EncoderModel": lambda _: tiny_t5(_MAX_TOKENS)[0],
    "T5Tokenizer": lambda _: tiny_t5(_MAX_TOKENS)[1],
    "T5TokenizerFast": lambda _: tiny_t5(_MAX_TOKENS)[1],
    "UMT5EncoderModel": _umt5,
    "AutoTokenizer": lambda _: tiny_tokenizer(),
    "PreTrainedTokenizerBase": lambda _: tiny_tokenizer(),
    "TokenizersBackend": lambda _: tiny_tokenizer(),
    "GemmaTokenizer": lambda _: tiny_tokenizer(),
    "GemmaTokenizerFast": lambda _: tiny_tokenizer(),
    "LlamaTokenizer": lambda _: tiny_tokenizer(),
    "Gemma2PreTrainedModel": _gemma2,
    "GemmaPreTrainedModel": _gemma2,
    "GlmModel": _glm,
    "Qwen2VLProcessor": _qwen_processor,
    "Qwen3VLProcessor": _qwen_processor,
    "Qwen3VLForConditionalGeneration": lambda _: tiny_qwen3_vl()[0],
    "Qwen3VLModel": lambda _: tiny_qwen3_vl()[0].model,
    "Siglip2VisionModel": _siglip2,
    "SiglipVisionModel": _siglip,
    "SiglipImageProcessor": _siglip_processor,
    "SiglipImageProcessorPil": _siglip_processor,
    "Siglip2ImageProcessorPil": _siglip2_processor,
    "BertModel": _bert,
    "BertTokenizer": lambda _: tiny_tokenizer(),
    "ByT5Tokenizer": _byt5,
    "CLIPProcessor": _image_processor,
    "LlamaModel": _llama,
    "LlamaForCausalLM": _llama,
    "SmolLM3ForCausalLM": _smol,
    "Qwen2Tokenizer": _qwen_tokenizer,
    "Qwen2_5_VLForConditionalGeneration": lambda _: tiny_qwen2_5_vl()[0],
    "Qwen3Model": lambda _: tiny_qwen3()[0],
    "Qwen3ForCausalLM": lambda _: tiny_qwen3()[0],
    "CLIPVisionModelWithProjection": _vision,
    "CLIPVisionModel": _vision,
    "CLIPImageProcessorPil": _image_processor,
    "CLIPImageProcessor": _image_processor,
}


def absent_classes() -> dict[str, tuple[str, ...]]:
    """The pipeline classes of the installed diffusers in whose place it has an error, by name: the packages that are
    missing here. Modular pipelines are no classes of this kind: they are put together by their blocks."""
    import diffusers

    found: dict[str, tuple[str, ...]] = {}
    for name in sorted(dir(diffusers)):
        kind = getattr(diffusers, name)
        wanted = getattr(kind, "_backends", None)
        if name.endswith("Pipeline") and inspect.isclass(kind) and isinstance(wanted, list):
            found[name] = tuple(each for each in wanted if not getattr(diffusers.utils, f"is_{each}_available")())
    return found


def prompt_taking_classes() -> dict[str, Any]:
    """Every pipeline class of the installed diffusers whose call takes a prompt, by name."""
    import diffusers

    from diffusion_runtime.diffusers_bridge.pipeline_interface import PipelineInterface

    found: dict[str, Any] = {}
    for name in sorted(dir(diffusers)):
        kind = getattr(diffusers, name)
        is_pipeline = inspect.isclass(kind) and issubclass(kind, diffusers.DiffusionPipeline)
        # The base class has no call of its own.
        has_call = is_pipeline and isinstance(inspect.unwrap(kind.__call__), types.FunctionType)
        if has_call and PipelineInterface.of(kind).parameter("prompt") is not None:
            found[name] = kind
    return found
