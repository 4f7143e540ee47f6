"""Write the averaged weights of a causal training as a model folder.

python -m scripts.train_shapes.causal_export CHECKPOINT FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from scripts.train_shapes.causal_train import SHAPES
from scripts.train_shapes.causal_training import averaged_models
from scripts.train_shapes.export import build_scheduler, export_folder, load_vae


def export_streams(checkpoint: Path, folder: Path, vae: Path = SHAPES) -> int:
    """The bytes of the folder that was written: transformer and text encoder of a checkpoint, the VAE of `vae`."""
    transformer, text_encoder = averaged_models(checkpoint)
    settings = json.loads((vae / "scheduler" / "scheduler_config.json").read_text())
    scheduler = build_scheduler("unipc", settings["flow_shift"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "generation.json").write_text((vae / "generation.json").read_text())
    return export_folder(folder, load_vae(vae), transformer, text_encoder, scheduler, streams=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vae", type=Path, default=SHAPES, help="exported folder whose VAE and defaults it gets")
    arguments = parser.parse_args()
    size = export_streams(arguments.checkpoint, arguments.folder, arguments.vae)
    print(f"{arguments.folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
