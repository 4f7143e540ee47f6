"""Write docs/openapi.json from the routes of the server: python scripts/write_openapi.py"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from diffusion_runtime.serving.app import build_api
from diffusion_runtime.serving.dispatcher import Dispatcher
from diffusion_runtime.serving.engine_process import LocalEngines
from diffusion_runtime.serving.files import ResultFiles
from diffusion_runtime.serving.jobs import Jobs
from diffusion_runtime.serving.metrics import Metrics
from diffusion_runtime.serving.settings import ServerSettings

TARGET = Path(__file__).parents[1] / "docs" / "openapi.json"


def document() -> dict[str, Any]:
    """Return the OpenAPI document of a server with default settings."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ServerSettings(storage=Path(folder), name="shapes")
        jobs = Jobs(settings.storage / "jobs.sqlite3")
        api = build_api(Dispatcher(settings, LocalEngines(), {}, jobs, ResultFiles(settings.storage), Metrics()))
        jobs.close()
        return api.openapi()


def text() -> str:
    return json.dumps(document(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
