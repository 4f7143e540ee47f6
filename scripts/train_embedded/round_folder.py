"""Write a model folder, or that of a LoRA, in 8 bits (eight_bits.py).

python -m scripts.train_embedded.round_folder FOLDER OUT --world emoji     # a folder of export, or of --world shapes
python -m scripts.train_embedded.round_folder FOLDER OUT --streams         # a folder of causal_export
python -m scripts.train_embedded.round_folder FOLDER OUT --lora            # the folder of a LoRA

The model makes a few clips first, whose prompts no evaluation uses, so that it is known what its weights are multiplied
with. OUT is another folder than FOLDER: weights that are rounded already would be rounded again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from transformers import AutoTokenizer, UMT5EncoderModel

from diffusion_runtime.quality.shapes.prompts import PROMPT_KINDS
from diffusion_runtime.quality.worlds import WORLDS
from scripts.train_embedded.architecture import MAX_PROMPT_TOKENS, build_tokenizer
from scripts.train_embedded.causal_evaluate import tasks_of
from scripts.train_embedded.causal_sampling import StreamSampler, StreamSampling
from scripts.train_embedded.eight_bits import watched_inputs, write_folder, write_lora
from scripts.train_embedded.export import build_scheduler, load_component
from scripts.train_embedded.sampling import Sampler, SamplerSettings

SEED = 77
"""The first seed of prompts and streams; evaluations begin at others."""
SECONDS, TWO_OBJECTS, SWITCHES = 3.0, 0.5, 0.3
"""Length of a stream, and the shares of streams with two objects and with new prompts."""


@torch.no_grad()
def moments_of(
    folder: Path, world: str, count: int, size: int, device: str, *, streams: bool
) -> dict[str, dict[str, Tensor]]:
    """Moments of the inputs of linear layers, by component and layer, over `count` clips or streams.

    Clips are made with the sampler and the defaults of the folder; size: pixels a side.
    """
    transformer = load_component(folder, WanTransformer3DModel).to(device)
    text_encoder = load_component(folder, UMT5EncoderModel).to(device)
    with watched_inputs(transformer) as of_transformer, watched_inputs(text_encoder) as of_text:
        if streams:
            tasks = tasks_of(count, SECONDS, StreamSampling.chunk, TWO_OBJECTS, SWITCHES, first_seed=SEED)
            sampler = StreamSampler(transformer, text_encoder, build_tokenizer(streams=True), device)
            texts, seeds = [task.texts for task in tasks], [task.seed for task in tasks]
            sampler.sample(texts, seeds, StreamSampling(size=size), lambda: False)
        else:
            make_clips(Sampler(transformer, text_encoder, AutoTokenizer.from_pretrained(folder / "tokenizer"), device),
                       folder, world, count, size)  # fmt: skip
    return {"transformer": of_transformer, "text_encoder": of_text}


def make_clips(sampler: Sampler, folder: Path, world: str, count: int, size: int) -> None:
    """Make clips of every kind of prompt, as many of each."""
    defaults = json.loads((folder / "generation.json").read_text())["defaults"]
    shift = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())["flow_shift"]
    settings = SamplerSettings(
        defaults["num_inference_steps"], defaults["guidance_scale"], defaults["num_frames"], size, MAX_PROMPT_TOKENS
    )
    for kind in PROMPT_KINDS:
        prompts = WORLDS[world].evaluation_prompts(kind, -(-count // len(PROMPT_KINDS)), seed=SEED)
        texts, seeds = [prompt.text for prompt in prompts], [prompt.seed for prompt in prompts]
        sampler.sample(texts, seeds, build_scheduler("unipc", shift), settings)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--world", choices=tuple(WORLDS), default="shapes")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--streams", action="store_true")
    kinds.add_argument("--lora", action="store_true")
    parser.add_argument("--rotate", action="store_true", help="rows of linear layers, in groups (convrot)")
    parser.add_argument("--share", type=float, default=1.0, help="of a LoRA's numbers that are kept, 0 to 1")
    parser.add_argument("--clips", type=int, default=24, help="0: every weight to the nearest")
    parser.add_argument("--size", type=int, default=128, help="pixels a side of the clips")
    arguments = parser.parse_args()
    if arguments.target.resolve() == arguments.source.resolve():
        parser.error("OUT: expected another folder than FOLDER")
    if arguments.lora:
        write_lora(arguments.source, arguments.target, arguments.share)
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        moments = None
        if arguments.clips > 0:
            moments = moments_of(
                arguments.source, arguments.world, arguments.clips, arguments.size, device, streams=arguments.streams
            )
        write_folder(arguments.source, arguments.target, moments, rotates=arguments.rotate)
    size = sum(path.stat().st_size for path in arguments.target.rglob("*") if path.is_file())
    print(f"{arguments.target}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
