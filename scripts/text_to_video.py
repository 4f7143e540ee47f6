"""examples/text_to_video.py, where other projects keep it."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[1] / "examples" / "text_to_video.py"), run_name="__main__")
