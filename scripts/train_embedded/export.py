"""Write the trained parts as a standard diffusers folder: bfloat16 safetensors, loadable by diffusers' WanPipeline."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from scripts.train_embedded.architecture import (
    MAX_PROMPT_TOKENS,
    build_text_encoder,
    build_tokenizer,
    build_transformer,
    build_vae,
)
from scripts.train_embedded.eight_bits import WEIGHTS, load_eight_bits, load_parts
from scripts.train_embedded.world import SHAPES, WORLDS, World

Part = TypeVar("Part", AutoencoderKLWan, WanTransformer3DModel, UMT5EncoderModel)
COMPONENTS: dict[type, str] = {
    AutoencoderKLWan: "vae",
    WanTransformer3DModel: "transformer",
    UMT5EncoderModel: "text_encoder",
}
SamplerScheduler = FlowMatchEulerDiscreteScheduler | UniPCMultistepScheduler


def build_scheduler(name: str, shift: float) -> SamplerScheduler:
    """The sampler whose settings go into the folder: `euler` or `unipc`, with the timestep shift."""
    if name == "euler":
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=shift)
    if name == "unipc":
        return UniPCMultistepScheduler(
            num_train_timesteps=1000,
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=shift,
            solver_order=2,
            final_sigmas_type="zero",
        )
    raise ValueError(f"scheduler must be 'euler' or 'unipc', got {name!r}")


def export_folder(
    folder: Path,
    vae: AutoencoderKLWan,
    transformer: WanTransformer3DModel,
    text_encoder: UMT5EncoderModel,
    scheduler: SamplerScheduler,
    world: World = SHAPES,
    *,
    streams: bool = False,
    defaults: Mapping[str, Any] | None = None,
) -> int:
    """Write every part and model_index.json; returns the size of the folder in bytes. The modules become bfloat16.

    streams: with the tokenizer of streams, whose words are more. defaults: request fields in place of the world's own.
    """
    for name in ("vae", "transformer", "text_encoder", "tokenizer", "scheduler"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    for part in (vae, transformer, text_encoder):
        torch.nn.Module.to(part, device="cpu", dtype=torch.bfloat16)
    vae.save_pretrained(folder / "vae")
    transformer.save_pretrained(folder / "transformer")
    text_encoder.save_pretrained(folder / "text_encoder")
    _write_tokenizer(folder / "tokenizer", world, streams=streams)
    scheduler.save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "WanPipeline",
        "_diffusers_version": "0.42.1",
        "boundary_ratio": None,
        "expand_timesteps": False,
        "scheduler": ["diffusers", type(scheduler).__name__],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    generation = folder / "generation.json"
    if not generation.exists():
        # Published models of the architecture read 512 tokens of text with their padding, this one as many as it has.
        values: dict[str, Any] = {"max_text_tokens": MAX_PROMPT_TOKENS}
        if world.defaults:
            values |= {"defaults": {**world.defaults, **(defaults or {})}, "presets": world.presets}
        generation.write_text(json.dumps(values, indent=2) + "\n")
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        path.chmod(0o644)
    return sum(path.stat().st_size for path in files)


def _write_tokenizer(folder: Path, world: World, *, streams: bool) -> None:
    """The tokenizer under the class name that transformers 4 and 5 both know."""
    build_tokenizer(world.words(), streams=streams).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")


def load_component(folder: Path, of: type[Part]) -> Part:
    """A component of an exported folder, in 8 bits or not, as the class of its library in float32 and eval mode."""
    component = COMPONENTS[of]
    place = folder / component
    if issubclass(of, UMT5EncoderModel):
        module: Part = of(UMT5Config.from_pretrained(place))
    else:
        settings = dict(of.load_config(place))
        settings.pop("quantization_config", None)
        module = of.from_config(settings)
    missing, unknown = module.load_state_dict(load_eight_bits(place / WEIGHTS[component])[0], strict=False)
    # The embedding of tokens is stored once, under its first name.
    if unknown or set(missing) - {"encoder.embed_tokens.weight"}:
        raise ValueError(f"{place}: does not fit {of.__name__}: {unknown} unknown, {missing} missing")
    return module.float().eval()


def load_trained(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The states of transformer and text encoder, of a transformer.pt or an 8-bit file."""
    if path.suffix == ".safetensors":
        return load_parts(path)
    trained: dict[str, dict[str, torch.Tensor]] = torch.load(path, map_location="cpu", weights_only=True)
    return trained


def load_vae(path: Path, world: World = SHAPES) -> AutoencoderKLWan:
    """A trained VAE, of a vae.pt, of an 8-bit file or of an exported folder."""
    if path.is_dir():
        return load_component(path, AutoencoderKLWan)
    if path.suffix == ".safetensors":
        state, statistics = load_eight_bits(path)
    else:
        statistics = torch.load(path, map_location="cpu")
        state = statistics["state"]
    vae = build_vae(statistics["latents_mean"], statistics["latents_std"], world.sizes)
    vae.load_state_dict(state)
    return vae


def main() -> None:
    """Export trained states, or with --random the untrained architecture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--world", choices=tuple(WORLDS), default="shapes")
    parser.add_argument("--vae", type=Path, help="vae.pt (state and latent statistics) or exported folder")
    parser.add_argument(
        "--transformer", type=Path, help="transformer.pt (EMA states of transformer and text encoder) or its 8-bit file"
    )
    parser.add_argument("--scheduler", choices=("euler", "unipc"), default="euler")
    parser.add_argument("--shift", type=float, default=3.0)
    parser.add_argument("--defaults", type=json.loads, default={}, help="request fields of the folder, JSON")
    parser.add_argument("--random", action="store_true", help="untrained weights, for tests of loading")
    arguments = parser.parse_args()
    if not arguments.random and (arguments.vae is None or arguments.transformer is None):
        parser.error("--vae and --transformer are needed unless --random is given")
    torch.manual_seed(0)
    world = WORLDS[arguments.world]
    text_encoder = build_text_encoder(len(build_tokenizer(world.words())), world.sizes)
    transformer, vae = build_transformer(world.sizes), build_vae(sizes=world.sizes)
    if arguments.random:
        torch.nn.init.normal_(transformer.proj_out.weight, std=0.02)
    else:
        vae = load_vae(arguments.vae, world)
        trained = load_trained(arguments.transformer)
        transformer.load_state_dict(trained["transformer"])
        text_encoder.load_state_dict(trained["text_encoder"])
    scheduler = build_scheduler(arguments.scheduler, arguments.shift)
    size = export_folder(
        arguments.folder,
        vae,
        transformer,
        text_encoder,
        scheduler,
        world,
        defaults=arguments.defaults,
    )
    print(f"{arguments.folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
