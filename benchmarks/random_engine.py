"""An engine of the server whose model has random weights, for `replicas_gpu.py`: `python -m benchmarks.random_engine
FOLDER`. `config.json` has `changes` of the published folder's json beside what every engine is given."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from diffusion_runtime.serving.engine import CONFIG_FILE, main
from diffusion_runtime.untrusted.json_text import read_json_file


def random_model(config: Any, *others: Any) -> Any:
    """Return a ServedModel that reads no weights. Arguments are ServedModel's."""
    from diffusion_runtime.benchmark.random_pipeline import random_pipeline
    from diffusion_runtime.benchmark.step_model import published_files
    from diffusion_runtime.models.published_folders import write_folder
    from diffusion_runtime.serving.previews import Previews
    from diffusion_runtime.serving.served_model import Choice, ServedModel

    folder = Path(sys.argv[1])
    changes = read_json_file(folder / CONFIG_FILE).get("changes") or {}
    files = {path: {**values, **changes.get(path, {})} for path, values in published_files(config.model_path).items()}

    class RandomModel(ServedModel):
        def load(self, on_stage: Any = None) -> None:
            self._previews = Previews("off", self.prepared(Choice()))
            self._pipeline = random_pipeline(config.model_path, config, on_stage or (lambda _: None), changes)
            # Without the folder of this engine, files of one seed have the same bytes on all.
            self._recipe = {"model": {"path": config.model_path}}

    # Requests are checked by the folder's json; the channel removes the folder with the engine.
    (folder / "model").mkdir()
    written = write_folder(folder / "model", files)
    return RandomModel(dataclasses.replace(config, model_path=str(written)), *others)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], random_model))
