"""`info FOLDER` of a modular folder: its pipeline, and where each component is."""

from __future__ import annotations

from pathlib import Path

from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.tables import facts_table
from diffusion_runtime.cli.terminal import json_text, put_on_stdout
from diffusion_runtime.core.model_folder import MODULAR_INDEX_FILE
from diffusion_runtime.untrusted.files import user_path

SCHEMA = "diffusion_runtime.modular/1"


def is_modular_path(path: str) -> bool:
    """Return whether a path is a folder whose modular index counts."""
    folder = user_path(path, "FILE")
    if not (folder / MODULAR_INDEX_FILE).is_file():
        return False
    from diffusion_runtime.models.modular_folder import is_modular

    return is_modular(folder)


def run_modular_info(path: str, *, as_json: bool) -> int:
    """Print the facts of a modular folder on standard output; nothing is downloaded. Raises ModelLoadError."""
    from diffusion_runtime.core.model_folder import HubPart
    from diffusion_runtime.models.modular_folder import read_places

    class_name, places = read_places(user_path(path, "FILE"))
    rows = {
        name: (
            kind,
            place if isinstance(place, Path) else f"{place.hub_id}/{place.subfolder}@{place.revision or 'main'}",
        )
        for name, (kind, place) in places.items()
    }
    if as_json:
        elsewhere = [name for name, (_, place) in places.items() if isinstance(place, HubPart)]
        components = {name: {"class": kind, "place": str(place)} for name, (kind, place) in rows.items()}
        values = {"path": path, "class": class_name, "components": components, "elsewhere": elsewhere}
        put_on_stdout(json_text({"schema": SCHEMA, **values}))
        return 0
    facts = [("pipeline", class_name), *((name, f"{kind}\n{place}") for name, (kind, place) in rows.items())]
    console_on_stdout().print(facts_table(facts, "Modular folder"))
    return 0
