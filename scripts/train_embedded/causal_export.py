"""Write the averaged weights of a causal training as a model folder: for clips at once, or chunk by chunk.

python -m scripts.train_embedded.causal_export CHECKPOINT FOLDER --causal
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from scripts.train_embedded.causal_train import SHAPES
from scripts.train_embedded.causal_training import averaged_models
from scripts.train_embedded.export import build_scheduler, export_folder, load_vae

CAUSAL = {
    "_class_name": "CausalWanTransformer3DModel",
    "num_frames_per_block": 2,
    "independent_first_frame": False,
    "sliding_window_num_frames": 21,
    "local_attn_size": 6,
    "sink_size": 2,
    "rope_cache_policy": "absolute",
}
"""What the transformer's config says of a model that makes videos chunk by chunk, in latent frames."""


def export_streams(checkpoint: Path, folder: Path, vae: Path = SHAPES, *, causal: bool = False) -> int:
    """The bytes of the folder that was written: transformer and text encoder of a checkpoint, the VAE of `vae`.

    causal: it makes videos chunk by chunk, and otherwise clips at once; the weights are the same.
    """
    transformer, text_encoder = averaged_models(checkpoint)
    settings = json.loads((vae / "scheduler" / "scheduler_config.json").read_text())
    scheduler = build_scheduler("unipc", settings["flow_shift"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "generation.json").write_text((vae / "generation.json").read_text())
    size = export_folder(folder, load_vae(vae), transformer, text_encoder, scheduler, streams=True)
    if causal:
        _update(folder / "transformer" / "config.json", CAUSAL)
        _update(folder / "model_index.json", {"transformer": ["diffusers", CAUSAL["_class_name"]]})
    return size


def _update(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}, indent=2) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vae", type=Path, default=SHAPES, help="exported folder whose VAE and defaults it gets")
    parser.add_argument("--causal", action="store_true", help="a folder that makes videos chunk by chunk")
    arguments = parser.parse_args()
    size = export_streams(arguments.checkpoint, arguments.folder, arguments.vae, causal=arguments.causal)
    print(f"{arguments.folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
