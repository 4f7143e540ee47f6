"""Write configs/*.yaml: the models of diffusion_runtime/models/published.yaml as files for --config; and
the JSON Schema of such files, diffusion_runtime/assets/config.schema.json."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from diffusion_runtime.cli.config_file import SCHEMA_FILE, schema_comment

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "diffusion_runtime" / "models" / "published.yaml"


def config_texts() -> dict[str, str]:
    """File name -> text of every config."""
    blocks = re.split(r"^([\w.-]+):\n", SOURCE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    texts = {}
    schema = schema_comment(Path("..") / SCHEMA_FILE.resolve().relative_to(ROOT.resolve()))
    for name, block in zip(blocks[::2], blocks[1::2], strict=True):
        text = textwrap.dedent(block).strip("\n") + "\n"
        # What the package knows of the model is no part of a config file.
        texts[f"{name}.yaml"] = schema + re.sub(r"^published:\n(?:[ ]+.*\n)+\n", "", text, flags=re.MULTILINE)
    return texts


def main() -> None:
    from diffusion_runtime.cli.config_schema import schema_text

    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
    for name, text in config_texts().items():
        (ROOT / "configs" / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
