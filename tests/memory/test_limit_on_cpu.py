"""`--memory-limit` on a CPU: what a process has in memory at most, against one that loads everything."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from cli_support import process_environment

from diffusion_runtime.models.random_weights import draw_weight
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.text_encoders.umt5_model import UMT5Encoder, sizes_of
from diffusion_runtime.weights.tensor_files import write_tensors

SCRIPT = Path(__file__).with_name("peak_script.py")


def write_wide_wan(tiny: Path, folder: Path) -> int:
    """A Wan folder whose transformer has ten blocks of 17 MB in float32, and its text encoder ten of 15 MB; returns the
    bytes of their weights."""
    shutil.copytree(tiny, folder)
    path = folder / "transformer" / "config.json"
    wide = {"num_attention_heads": 8, "attention_head_dim": 64, "ffn_dim": 2048, "num_layers": 10}
    path.write_text(json.dumps({**json.loads(path.read_text()), **wide}))
    pieces = family_for_folder(folder).describe(folder).weights.pieces("transformer").values()
    path = folder / "text_encoder" / "config.json"
    config = {**json.loads(path.read_text()), "d_ff": 40_000, "num_layers": 10}
    path.write_text(json.dumps(config))
    sizes = sizes_of(config)
    assert sizes is not None
    with torch.device("meta"):
        encoder = UMT5Encoder(sizes).state_dict()
    return write_drawn(folder / "transformer", {each.name: each.shape for several in pieces for each in several}) + (
        write_drawn(folder / "text_encoder", {name: tensor.shape for name, tensor in encoder.items()})
    )


def write_drawn(folder: Path, shapes: Mapping[str, Sequence[int]]) -> int:
    tensors = {name: torch.empty(*shape) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        draw_weight(name, tensor)
    (file,) = folder.glob("*.safetensors")
    write_tensors(file, tensors)
    return sum(tensor.nbytes for tensor in tensors.values())


def peaks(folder: Path, limit: str) -> tuple[int, str, int]:
    """(bytes that loading and generating added to the peak, offloading, a sum of the frames)."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), limit], env=process_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    before, after, offload, frames = json.loads(done.stdout)
    return after - before, offload, frames


def test_a_limit_keeps_most_weights_out_of_memory_and_makes_the_same_frames(
    tiny_wan_folder: Path, tmp_path: Path
) -> None:
    weights = write_wide_wan(tiny_wan_folder, tmp_path / "wide")
    whole, limited = peaks(tmp_path / "wide", ""), peaks(tmp_path / "wide", "70MB")
    assert (whole[1], limited[1]) == ("none", "layers")
    assert whole[2] == limited[2]
    # Read once, in place: the files are not in the process's memory as well.
    assert weights < whole[0] < 1.4 * weights
    assert limited[0] < 0.3 * whole[0]
